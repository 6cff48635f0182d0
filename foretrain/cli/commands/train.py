"""`foretrain train`: run a config, with a forecast written beside it before it starts."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable, say
from foretrain.base.units import format_bytes, format_left, format_percent
from foretrain.cli.common import CONFIG_CONTEXT, ERR, OUT, Json, Quiet, Words, need_one_of, print_json, print_notes
from foretrain.cli.old_options import spellings
from foretrain.cli.patient import patient_output
from foretrain.config.resolve import ResolvedConfig, resolve, to_toml

if TYPE_CHECKING:
    from foretrain.config.options import RunConfig
    from foretrain.data.dataset import DatasetInfo
    from foretrain.predict.plan import Plan
    from foretrain.training.contention import Contention, Reading
    from foretrain.training.device import Placement
    from foretrain.training.notes import Event
    from foretrain.training.store import EvaluationMetrics, RunDirectory, RunRecord, StepMetrics

LINE_EVERY_S = 5.0  # a log file wants fewer lines than a terminal; metrics.jsonl has them all

EPILOG = """Examples:

foretrain train baby

foretrain train config/train_shakespeare_char.py --device=cpu --compile=false

foretrain train config.py --init_from=nanoGPT/out/ckpt.pt --init_optimizer        (continue where nanoGPT stopped)

foretrain train my.toml --batch_size=auto    (the largest micro-batch that fits here)

foretrain train my.toml --resume auto        (after Ctrl-C, a crash or a power cut)

foretrain train my.toml --auto-restart       (resumes automatically after a crash)"""


def add_to(app: typer.Typer) -> None:
    app.command("train", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(train_command)


def train_command(
    words: Words = None,
    resume: Annotated[
        str,
        typer.Option(help="auto: resume the newest unfinished run in this out_dir; no: start a new one."),
    ] = "no",
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="With batch_size = auto: trust the forecast and skip the trial.")
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option(*spellings("--auto-restart"), help="Resume from the last checkpoint automatically after a crash."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a config, with a live line, evaluation and checkpoints. Ctrl-C saves; --resume auto resumes."""
    need_one_of("--resume", resume, ("auto", "no"))
    resolved = resolve(words or [])
    if keep_going:
        from foretrain.cli.commands import keep_going as supervisor

        need_torch()
        with patient_output():
            raise typer.Exit(supervisor.keep_going(resolved.config))
    from foretrain.cli.commands.keep_going import end_with_parent

    end_with_parent()
    print_notes(resolved.notes, quiet=quiet)
    go_on = resume == "auto" or resolved.config.init_from == "resume"
    with patient_output():
        record = train(resolved, resume=go_on, quiet=quiet or as_json, trial=not no_trial)
        if as_json:
            from foretrain.training.store import SCHEMA

            print_json(record.to_json(schema=SCHEMA))
    if record.status == "interrupted":
        raise typer.Exit(int(ExitCode.STOPPED))


def train(resolved: ResolvedConfig, *, resume: bool = False, quiet: bool = False, trial: bool = True) -> RunRecord:
    """Train a resolved config in its run directory; returns the record. Raises UserError."""
    need_torch()
    if (count := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        raise UserError("environment.one_process", count=count[:20])
    set_allocator(resolved.config.allocator_settings)
    from foretrain.training.contention import Clock

    since = Clock().read()  # what the machine does while torch is imported and the data is prepared
    from foretrain.advice import host_fit
    from foretrain.training.device import environment, place
    from foretrain.training.host_memory import give_back, keep_memory
    from foretrain.training.trainer import Trainer

    if resume and (done := _finished(resolved.config)) is not None:
        _say_finished(done, resolved.config, quiet=quiet)
        return done.read_record()
    _check_start(resolved, resume)
    placement = place(resolved.config)
    if placement.device.type == "cpu":
        keep_memory()
    resolved, info = prepare_data(resolved, quiet=quiet)
    if placement.device.type == "cpu" and not resolved.config.auto_batch_size:  # which looks by itself
        host_fit.check(resolved.config, placement.gpu, compiled=placement.compiled)
    directory, resuming = _directory(resolved, resume, quiet)
    try:
        resolved, placement = _choose(resolved, placement, directory, resuming)
        give_back()  # what the measurements took is not the training's
        if resolved.config.auto_batch_size and not resuming:  # a resumed run goes on as it was
            from foretrain.cli.commands.auto_batch import chosen

            resolved = chosen(resolved, placement, trial=trial, quiet=quiet)
            split = (resolved.config.batch_size, resolved.config.gradient_accumulation_steps)
            directory.event("auto_batch", batch_size=split[0], accumulation=split[1])
        config = resolved.config
        if not resuming:
            _write_inputs(directory, resolved, environment(placement), placement)
        printer = Printer(quiet, config.max_iters)
        if not quiet:
            _print_start(directory, resolved, placement)
        expected = _expected(directory)
        trainer = Trainer(
            config, info, directory, placement, printer, resolved.name, expected,
            _contention(placement, since),
        )  # fmt: skip
        trainer.flag.ends_process = True
        record = trainer.run(resume=resuming)
        printer.end(record, directory)
        return record
    finally:
        directory.release()


def _expected(directory: RunDirectory) -> tuple[float, float] | None:
    """Seconds of a step and of an evaluation by the plan beside the run; None where there is none to be read."""
    from foretrain.base.safe_read import read_text
    from foretrain.predict.plan import Plan

    try:
        timing = Plan.from_json(read_text(directory.path / "plan.json")).timing
    except (OSError, ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    if timing is None:
        return None
    return timing.step_s.expected_s, timing.evaluation_s.expected_s if timing.evaluation_s else 0.0


def _contention(placement: Placement, since: Reading) -> Contention | None:
    """What watches other programs while a CPU trains."""
    import torch

    from foretrain.training.contention import Contention

    return Contention(torch.get_num_threads(), since=since) if placement.device.type == "cpu" else None


def _choose(
    resolved: ResolvedConfig, placement: Placement, directory: RunDirectory, resuming: bool
) -> tuple[ResolvedConfig, Placement]:
    """What the config leaves open: as the run has it already, else measured."""
    from dataclasses import replace

    from foretrain.training import choices

    given = set(resolved.sources)
    if resuming:
        chosen = choices.recall(resolved.config, placement, directory.read_record(), given)
    else:
        chosen = choices.decide(resolved.config, placement, given)
    return replace(resolved, config=chosen.config), chosen.placement


def set_allocator(own: str) -> None:
    """Before torch is imported, which reads the variable then. Raises UserError."""
    from foretrain.predict.allocator.settings import Settings, merged

    variables = merged(own, os.environ)
    try:
        Settings.of_environment({**os.environ, **variables})
    except ValueError as error:
        if own:
            raise UserError("usage.alloc_conf", problem=str(error)) from None
    os.environ.update(variables)


def _steps_wanted(config: RunConfig) -> int:
    """A run with as many steps has nothing left to do; an evaluation is of any run."""
    return 1 << 62 if config.eval_only else config.max_iters


def _finished(config: RunConfig) -> RunDirectory | None:
    """The run that there is nothing left of to resume; None where there is none, or another one has steps to do."""
    from foretrain.training import store

    if store.newest_unfinished(config.out_dir, _steps_wanted(config)) is not None:
        return None
    return store.newest(config.out_dir)


def _say_finished(run: RunDirectory, config: RunConfig, *, quiet: bool) -> None:
    if not quiet:
        steps = run.read_record().steps_done
        line = say("train.already_finished", path=str(run.path), steps=steps, total=config.max_iters)
        OUT.print(Text(printable(line)), soft_wrap=True)


def _check_start(resolved: ResolvedConfig, resume: bool) -> None:
    """What a run starts from, looked for before its data: what is lacking is said at once. Raises UserError."""
    from foretrain.training import initial, store

    config = resolved.config
    if not resume:
        initial.find(config.init_from)
    elif store.newest_unfinished(config.out_dir, _steps_wanted(config)) is None:
        left = store.base_path(config.out_dir) / "ckpt.pt"
        if left.is_file():  # nanoGPT's own init_from = 'resume' means this file
            raise UserError("usage.resume_nanogpt", path=str(left))


def need_torch() -> None:
    """Raise UserError when the training extra is not installed."""
    import importlib.util

    if any(importlib.util.find_spec(name) is None for name in ("torch", "safetensors", "numpy")):
        raise UserError("environment.missing_torch")


def prepare_data(resolved: ResolvedConfig, *, quiet: bool = False) -> tuple[ResolvedConfig, DatasetInfo]:
    """The dataset of a config, made if it is the built-in one, checked against the model."""
    from dataclasses import replace

    from foretrain.cli.fetching import fetch
    from foretrain.data import dataset
    from foretrain.data.builtin import prepare_built_in
    from foretrain.data.locate import locate, no_dataset

    config = resolved.config
    if config.dataset == dataset.BUILT_IN:
        info = prepare_built_in(config)
    else:
        found = locate(config.dataset)
        if found is None:
            raise no_dataset(config.dataset)
        info = found
        fetch(info, quiet=quiet)
    if info.vocab_size and "vocab_size" not in resolved.sources:
        config = config.model_copy(update={"vocab_size": info.vocab_size})
        resolved = replace(resolved, config=config, sources={**resolved.sources, "vocab_size": info.path})
    dataset.check_usable(info, config.vocab_size, config.block_size, config.eval_block)
    return resolved, info


def _directory(resolved: ResolvedConfig, resume: bool, quiet: bool) -> tuple[RunDirectory, bool]:
    """(the run's directory with its lock held, whether it holds a run to go on with)."""
    from foretrain.training import store

    out_dir = resolved.config.out_dir
    if resume:
        found = store.newest_unfinished(out_dir, _steps_wanted(resolved.config))
        if found is not None:
            found.acquire()
            return found, True
        if not quiet:
            ERR.print(Text(say("train.nothing_to_resume", out_dir=out_dir), style="dim"))
    return store.create(out_dir), False


def _write_inputs(
    directory: RunDirectory, resolved: ResolvedConfig, environment: dict[str, str], placement: Placement
) -> None:
    """Config, environment and the forecast, on disk before the first step."""
    import json

    from foretrain.app.plan import Target, make_plan
    from foretrain.predict.plan import SCHEMA

    config = resolved.config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    forecast = make_plan(
        ResolvedConfig(config, {**resolved.sources, "vocab_size": "run"}, (), resolved.name),
        Target(placement.gpu, 0),
    )
    _warn_of_limit(forecast, resolved.config)
    directory.write("config.toml", to_toml(resolved.config))
    directory.write("environment.json", json.dumps(environment, indent=1) + "\n")
    directory.write("plan.json", json.dumps(forecast.to_json(schema=SCHEMA)) + "\n")


def _warn_of_limit(forecast: Plan, config: RunConfig) -> None:
    """The run starts all the same: it may shrink its micro-batch, and a CPU's limit is only watched."""
    if config.memory_limit and forecast.verdict_of("foretrain") == "does_not_fit":
        needs = max(phase.needed_low_bytes for phase in forecast.memory_of("foretrain").phases)
        line = say("train.beyond_limit", needs=needs, limit=config.memory_limit_bytes)
        ERR.print(Text(line, style="yellow"), soft_wrap=True)


def _print_start(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement) -> None:
    from foretrain.model.shape import ModelShape

    config = resolved.config
    mode = "compiled" if placement.compiled else "eager"
    line = say(
        "train.start", name=resolved.name, params=ModelShape.of(config).n_params, device=placement.gpu.name,
        dtype=placement.dtype, mode=say(f"mode.{mode}"), steps=config.max_iters, tokens=config.tokens_per_step,
        path=str(directory.path),
    )  # fmt: skip
    ERR.print(Text(printable(line), style="bold"), soft_wrap=True)


class Printer:
    """Progress on stderr: one live line on a terminal, lines otherwise."""

    def __init__(self, quiet: bool, max_iters: int) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty()
        self.width = len(str(max_iters))
        self.max_iters = max_iters
        self._pending = False
        self._next_line_s = 0.0

    def __call__(self, event: Event) -> None:
        if self.quiet and getattr(event, "id", "") != "checkpoint_skipped":  # which --json does not tell
            return
        kind = getattr(event, "kind", "note")
        if kind == "step":
            self._step(event)  # type: ignore[arg-type]
        elif kind == "evaluation":
            self._line(self._evaluation(event))  # type: ignore[arg-type]
        else:
            self._line(Text(say(f"event.{event.id}", **event.values), style="dim"))  # type: ignore[union-attr]

    def _step(self, m: StepMetrics) -> None:
        parts = [
            f"step {m.step + 1:>{self.width}}/{self.max_iters}",
            f"loss {m.loss:.4f}",
            f"{m.tokens_per_s:,.0f} tok/s",
            f"MFU {format_percent(m.mfu)}" if m.mfu is not None else "",
            format_bytes(m.memory_bytes) if m.memory_bytes else "",
            f"ETA {format_left(m.eta_s)}",
            say("train.data_wait", share=m.data_wait_s / m.step_s) if m.data_wait_s > 0.01 * m.step_s else "",
        ]
        line = "  ".join(part for part in parts if part)
        if self.live:
            sys.stderr.write("\r\x1b[2K" + line[: max(20, ERR.width - 1)])
            sys.stderr.flush()
            self._pending = True
        elif time.monotonic() >= self._next_line_s or m.step + 1 == self.max_iters:
            sys.stderr.write(line + "\n")
            self._next_line_s = time.monotonic() + LINE_EVERY_S

    def _evaluation(self, m: EvaluationMetrics) -> Text:
        text = f"step {m.step:>{self.width}}/{self.max_iters}  "
        text += say("train.evaluation", train=m.train_loss, val=m.val_loss, took=m.evaluation_s)
        return Text(text, style="bold" if m.best else "")

    def _line(self, text: Text) -> None:
        if self._pending:
            sys.stderr.write("\r\x1b[2K")
            self._pending = False
        ERR.print(text, soft_wrap=True)

    def end(self, record: RunRecord, directory: RunDirectory) -> None:
        """The last line: how it ended, and what to do next."""
        if self.quiet:
            return
        values = {
            "path": str(directory.path), "steps": record.steps_done, "wall": record.wall_s,
            "val": record.val_loss if record.val_loss is not None else float("nan"), "reason": record.reason,
        }  # fmt: skip
        if self._pending:
            sys.stderr.write("\n")
            self._pending = False
        OUT.print(Text(printable(say(f"train.{record.status}", **values))), soft_wrap=True)

"""`foretrain tune`: the setting that trains fastest on this machine, measured; tokens per step stay."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from foretrain.advice.micro_batch import choose
from foretrain.app.plan import with_dataset
from foretrain.app.train import need_torch, set_allocator
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.installation import installed_torch
from foretrain.base.messages import printable, say
from foretrain.base.quantities import parse_duration
from foretrain.base.units import format_bytes
from foretrain.cli.common import CONFIG_CONTEXT, ERR, OUT, Json, Quiet, Words, print_json, print_notes
from foretrain.cli.old_options import spellings, typed
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig, resolve, to_toml
from foretrain.hardware.cpu import physical_cores
from foretrain.hardware.devices import used_here_bytes
from foretrain.predict.plan import available
from foretrain.predict.speed.time import is_calibrated
from foretrain.reports import text
from foretrain.reports.views import tune as tune_view
from foretrain.reports.views.tune import difference
from foretrain.training.host_memory import keep_memory
from foretrain.tuning import cache as tune_memory
from foretrain.tuning import space as tune_space
from foretrain.tuning.cache import path_of, recall
from foretrain.tuning.pool import Pool
from foretrain.tuning.record import SCHEMA, Tuning
from foretrain.tuning.space import TUNABLE, Machine, Setting, apply, default_knobs, levels_of, options

if TYPE_CHECKING:
    from foretrain.training.device import Placement

LEAST_BUDGET_S = 10.0

EPILOG = """Examples:

foretrain tune config/train_shakespeare_char.py --write tuned.toml   (then: foretrain train tuned.toml)

foretrain tune my.toml --budget 10min --trials 40

foretrain tune my.toml --options batch_size,compile,loss_chunk_size

foretrain tune my.toml --memory_limit=10GiB --json   (every trial, and speed against memory)"""


def add_to(app: typer.Typer) -> None:
    app.command("tune", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(tune_command)


def tune_command(
    words: Words = None,
    budget: Annotated[str, typer.Option(help="How long to search, such as 90s, 3min or 1h.")] = "3min",
    trials: Annotated[
        int | None,
        typer.Option(help="Most settings to try. Default: a quarter of them, 4 to 24.", min=1, max=1000),
    ] = None,
    knobs: Annotated[
        str,
        typer.Option(
            *spellings("--options"),
            help="Options to change, such as batch_size,compile. Default: all that keep the learning unchanged.",
        ),
    ] = "",
    write: Annotated[
        Path | None,
        typer.Option(help="Write the best config, and every trial next to it as JSON.", metavar="FILE.toml"),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Ignore earlier measurements.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure which settings are fastest here, without changing tokens per step or the result."""

    need_torch()
    budget_s, wanted = _budget_s(budget), _wanted(knobs)
    _check_write(write)
    resolved = resolve(words or [])
    print_notes(resolved.notes, quiet=quiet)
    job = prepare(resolved, wanted)
    found = None if no_cache else job.recalled(budget_s, trials)
    if found is None:
        progress = Progress(job.base, quiet=quiet or as_json)
        try:
            found = job.search(budget_s, trials, progress)
        finally:
            progress.close()
    if write is not None and found.stop != "interrupted":
        _write(found, write, quiet=quiet or as_json)
    _print(found, as_json=as_json)
    if found.stop == "interrupted":
        raise typer.Exit(int(ExitCode.INTERRUPTED))


def _budget_s(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError:
        raise UserError("usage.tune_budget", text=text[:40]) from None
    if seconds < LEAST_BUDGET_S:
        raise UserError("usage.tune_budget", text=text[:40])
    return seconds


def _check_write(path: Path | None) -> None:
    """Before minutes are spent: a name that cannot be written, or is taken. Raises UserError."""
    if path is None:
        return
    if path.suffix != ".toml":  # nor is '' a name, which is the current folder to Path
        raise UserError("usage.cannot_write_file", path=str(path), reason="its name must end in .toml")
    for each in (path, path.with_suffix(".json")):
        if each.exists():
            raise UserError("usage.cannot_write_file", path=str(each), reason="it is there already")
    if not os.access(path.parent, os.W_OK):
        raise UserError("usage.cannot_write_file", path=str(path), reason="the folder cannot be written to")


@dataclass(frozen=True)
class Job:
    """What is to be searched, and where. `base`: the config with everything decided that `train` would decide."""

    name: str
    base: RunConfig
    choices: list[tuple[Any, ...]]
    machine: Machine
    placement: Placement
    room_bytes: int | None

    @property
    def path(self) -> Path:
        from importlib.metadata import version

        return path_of(self.base, self.choices, self.placement.gpu, version("foretrain"))

    def settings(self) -> list[Setting]:

        return list(tune_space.settings(self.base, self.choices))

    @property
    def cpu_clock(self) -> bool:
        """Whether every setting runs on one thread, so that its CPU time can be counted instead of the wall's."""
        import torch

        own = self.base.cpu_threads or torch.get_num_threads()
        return not self.machine.cuda and own == 1 and set(self.choices[-1]) <= {0, 1}

    def recalled(self, budget_s: float, trials: int | None) -> Tuning | None:
        """The answer of before, where it still holds."""

        return recall(self.path, self.room_bytes, budget_s, trials or 0)

    def search(self, budget_s: float, trials: int | None, listen: Any) -> Tuning:
        """Measure; the answer is kept. Raises UserError where nothing runs."""
        import datetime

        import torch

        from foretrain.tuning import answer as tune_answer
        from foretrain.tuning.tuner import Limits, Outlook, Tuner

        started, gpu, dtype = time.monotonic(), self.placement.gpu, self.placement.dtype
        calibrated = is_calibrated(self.base, gpu, dtype, "foretrain")
        outlook = Outlook(gpu, dtype, self.room_bytes, calibrated)
        with Pool(self.room_bytes, self.room_bytes, cpu_clock=self.cpu_clock) as pool:
            tuner = Tuner(self.settings(), outlook, pool, Limits(budget_s, trials), time.monotonic, listen)
            tuner.run()
        found = Tuning(
            name=self.name, device=gpu.name, torch_version=installed_torch(), calibrated=calibrated,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            tokens_per_step=self.base.tokens_per_step, given_options=self.settings()[0].named,
            took_s=time.monotonic() - started, budget_s=budget_s, most_trials=tuner.most,
            clock="cpu" if self.cpu_clock else "wall", cap_bytes=self.room_bytes, **tune_answer.answer(tuner),
        )  # fmt: skip
        configs = [apply(self.base, tuple(trial.options.values())) for trial in found.trials]
        threads = 0 if self.machine.cuda else torch.get_num_threads()
        found = found.model_copy(update={"fed": tune_memory.feed(found, configs, gpu, dtype, threads)})
        tune_memory.keep(found, self.path)
        return found


def prepare(resolved: ResolvedConfig, knobs: tuple[str, ...] = ()) -> Job:
    """Decide what the config leaves open as `train` would, and what may be changed. Raises UserError."""

    set_allocator(resolved.config.allocator_settings)
    from foretrain.training import choices
    from foretrain.training.device import obstacle_to_compile, place

    asked = with_dataset(resolved)
    placement, given = place(asked), frozenset(resolved.sources)
    if placement.device.type == "cpu":
        keep_memory()
    room, _ = available(asked, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    config = asked
    if asked.auto_batch_size:
        planned = asked.model_copy(update={"compile": placement.compiled})
        made = choose(planned, placement.gpu, placement.dtype, room).config
        config = made.model_copy(update={"compile": asked.compile})
    chosen = choices.decide(config, placement, set(given))
    base = chosen.config.model_copy(
        update={
            "dtype": chosen.placement.dtype, "compile": placement.compiled, "device": str(placement.device),
            "auto_batch_size": False,
        }
    )  # fmt: skip
    cuda = placement.device.type == "cuda"
    machine = Machine(cuda, obstacle_to_compile(placement.device) is None, () if cuda else _threads(asked, base))
    found = options(asked, base, given, knobs or default_knobs(asked, given, machine), machine)
    return Job(resolved.name, base, found, machine, placement, room)


def _wanted(text: str) -> tuple[str, ...]:

    names = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in TUNABLE]
    if unknown or (text and not names):
        raise UserError(
            "usage.tune_knobs", option=typed("--options"), unknown=", ".join(unknown)[:80] or text, known=list(TUNABLE)
        )
    return names


def _threads(asked: RunConfig, base: RunConfig) -> tuple[int, ...]:
    """Numbers worth trying besides the base's own, unless the environment decides: the cores, half of them, one."""
    import torch

    if "OMP_NUM_THREADS" in os.environ and not asked.cpu_threads:
        return ()
    own = base.cpu_threads or torch.get_num_threads()
    return tuple(n for n in sorted({physical_cores(), max(1, physical_cores() // 2), 1}, reverse=True) if n != own)


def _write(found: Tuning, path: Path, *, quiet: bool) -> None:
    """The config, and every trial beside it. Raises UserError."""
    import json

    for each, config in ((path, to_toml(found.config)), (path.with_suffix(".json"), "")):
        try:
            with each.open("x", encoding="utf-8") as file:
                file.write(config or json.dumps(found.to_json(schema=SCHEMA), indent=1) + "\n")
        except OSError as error:
            raise UserError("usage.cannot_write_file", path=str(each), reason=error.strerror or "") from None
    if not quiet:
        line = say("tune.written", path=str(path), trials=str(path.with_suffix(".json")))
        ERR.print(Text(printable(line)), soft_wrap=True)


def _print(found: Tuning, *, as_json: bool) -> None:

    if as_json:
        print_json(found.to_json(schema=SCHEMA))
        return

    text.render(tune_view.document(found), OUT)


class Progress:
    """Each trial a line on stderr; rounds of the race in one line that changes, on a terminal."""

    def __init__(self, base: RunConfig, *, quiet: bool) -> None:
        self.base, self.quiet = base, quiet
        self.status: Any = None

    def __call__(self, id: str, values: dict[str, Any]) -> None:
        if self.quiet:
            return
        self.close()
        if id == "trying":
            self._live(say("tune.trying", number=values["number"], most=values["most"], what=self._what(values)))
        elif id == "tried":
            self._tell(self._tried(values))
        elif id == "round":
            self._live(say("tune.round", **values))
        else:
            self._tell(say(f"tune.{id}", **values))

    def close(self) -> None:
        """Take away the line that changes."""
        if self.status is not None:
            self.status.stop()
            self.status = None

    def _what(self, values: dict[str, Any]) -> str:

        setting: Setting = values["setting"]
        given: dict[str, object] = dict(zip(TUNABLE, levels_of(self.base), strict=True))
        return difference(setting.named, setting.config.gradient_accumulation_steps, given)

    def _tried(self, values: dict[str, Any]) -> str:
        what = self._what(values)
        if (death := values["death"]) is not None:
            return say(f"tune.died.{death.reason}", what=what, peak=death.peak_bytes, problem=death.problem)
        if values["changed"]:
            return say("tune.changed", what=what)
        rate = values["setting"].config.tokens_per_step / values["step_s"]
        id = "tune.tried_first" if values["first"] else "tune.tried"
        peak = format_bytes(values["peak_bytes"])
        return say(id, what=what, rate=rate, peak=peak, speed=values["speed"])

    def _live(self, line: str) -> None:
        if ERR.is_terminal:
            self.status = ERR.status(Text(printable(line)))
            self.status.start()

    def _tell(self, line: str) -> None:
        ERR.print(Text(printable(line), style="dim"), soft_wrap=True)

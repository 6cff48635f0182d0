"""A training run from its config to its record: placement, data, directory, choices, forecast beside it, trainer."""

import json
from dataclasses import dataclass, replace

import torch

from foretrain.advice import host_fit
from foretrain.app import auto_batch
from foretrain.app.plan import make_plan
from foretrain.base.errors import UserError
from foretrain.base.safe_read import read_text
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig, to_toml
from foretrain.data import dataset
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.data.locate import locate, no_dataset
from foretrain.data.remote import Bar, fetch, no_bar
from foretrain.hardware.devices import Target
from foretrain.model.shape import ModelShape
from foretrain.predict.plan import SCHEMA, Plan
from foretrain.training import choices, starting, store
from foretrain.training.contention import Contention, Reading
from foretrain.training.device import Placement, environment, place
from foretrain.training.host_memory import give_back, keep_memory
from foretrain.training.notes import Listener, Note
from foretrain.training.store import RunDirectory, RunRecord
from foretrain.training.trainer import Trainer


@dataclass(frozen=True)
class Request:
    """What is to be trained, and how, as in `train_resolved`. `since`: the machine before torch was imported."""

    resolved: ResolvedConfig
    resume: bool
    trial: bool
    listen: Listener
    bar: Bar
    ends_process: bool
    since: Reading


def run(asked: Request) -> RunRecord:
    """Train in the run's directory; returns the record. Raises UserError."""
    resolved, listen = asked.resolved, asked.listen
    if asked.resume and (done := _finished(resolved.config)) is not None:
        record = done.read_record()
        values = {"path": str(done.path), "steps": record.steps_done, "total": resolved.config.max_iters}
        listen(Note("train.already_finished", **values))
        return record
    _check_start(resolved, asked.resume)
    placement = place(resolved.config)
    if placement.device.type == "cpu":
        keep_memory()
    resolved, info = prepare_data(resolved, asked.bar)
    if placement.device.type == "cpu" and not resolved.config.auto_batch_size:  # which looks by itself
        host_fit.check(resolved.config, placement.gpu, compiled=placement.compiled)
    directory, resuming = _directory(resolved, asked.resume, listen)
    try:
        resolved, placement = _choose(resolved, placement, directory, resuming)
        give_back()  # what the measurements took is not the training's
        if resolved.config.auto_batch_size and not resuming:  # a resumed run goes on as it was
            resolved = auto_batch.chosen(resolved, placement, trial=asked.trial, listen=listen)
            split = (resolved.config.batch_size, resolved.config.gradient_accumulation_steps)
            directory.event("auto_batch", batch_size=split[0], accumulation=split[1])
        if not resuming:
            _write_inputs(directory, resolved, placement, listen)
        listen(_start(directory, resolved, placement))
        trainer = Trainer(
            resolved.config, info, directory, placement, listen, resolved.name, _expected(directory),
            _contention(placement, asked.since),
        )  # fmt: skip
        trainer.flag.ends_process = asked.ends_process
        record = trainer.run(resume=resuming)
        listen(_end(directory, record))
        return record
    finally:
        directory.release()


def _start(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement) -> Note:
    config = resolved.config
    return Note(
        "train.start", name=resolved.name, params=ModelShape.of(config).n_params, device=placement.gpu.name,
        dtype=placement.dtype, compiled=placement.compiled, steps=config.max_iters, tokens=config.tokens_per_step,
        path=str(directory.path),
    )  # fmt: skip


def _end(directory: RunDirectory, record: RunRecord) -> Note:
    """How it ended."""
    return Note(
        f"train.{record.status}", path=str(directory.path), steps=record.steps_done, wall=record.wall_s,
        val=record.val_loss if record.val_loss is not None else float("nan"), reason=record.reason,
    )  # fmt: skip


def _expected(directory: RunDirectory) -> tuple[float, float] | None:
    """Seconds of a step and of an evaluation by the plan beside the run; None where there is none to be read."""
    try:
        timing = Plan.from_json(read_text(directory.path / "plan.json")).timing
    except (OSError, ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    if timing is None:
        return None
    return timing.step_s.expected_s, timing.evaluation_s.expected_s if timing.evaluation_s else 0.0


def _contention(placement: Placement, since: Reading) -> Contention | None:
    """What watches other programs while a CPU trains."""
    return Contention(torch.get_num_threads(), since=since) if placement.device.type == "cpu" else None


def _choose(
    resolved: ResolvedConfig, placement: Placement, directory: RunDirectory, resuming: bool
) -> tuple[ResolvedConfig, Placement]:
    """What the config leaves open: as the run has it already, else measured."""
    given = set(resolved.sources)
    if resuming:
        chosen = choices.recall(resolved.config, placement, directory.read_record(), given)
    else:
        chosen = choices.decide(resolved.config, placement, given)
    return replace(resolved, config=chosen.config), chosen.placement


def _steps_wanted(config: RunConfig) -> int:
    """A run with as many steps has nothing left to do; an evaluation is of any run."""
    return 1 << 62 if config.eval_only else config.max_iters


def _finished(config: RunConfig) -> RunDirectory | None:
    """The run that there is nothing left of to resume; None where there is none, or another one has steps to do."""
    if store.newest_unfinished(config.out_dir, _steps_wanted(config)) is not None:
        return None
    return store.newest(config.out_dir)


def _check_start(resolved: ResolvedConfig, resume: bool) -> None:
    """What a run starts from, looked for before its data: what is lacking is said at once. Raises UserError."""
    config = resolved.config
    if not resume:
        starting.find(config.init_from)
    elif store.newest_unfinished(config.out_dir, _steps_wanted(config)) is None:
        left = store.base_path(config.out_dir) / "ckpt.pt"
        if left.is_file():  # nanoGPT's own init_from = 'resume' means this file
            raise UserError("usage.resume_nanogpt", path=str(left))


def prepare_data(resolved: ResolvedConfig, bar: Bar = no_bar) -> tuple[ResolvedConfig, DatasetInfo]:
    """The dataset of a config, made if it is the built-in one, checked against the model. Raises UserError."""
    config = resolved.config
    if config.dataset == dataset.BUILT_IN:
        info = prepare_built_in(config)
    else:
        found = locate(config.dataset)
        if found is None:
            raise no_dataset(config.dataset)
        info = found
        fetch(info, bar)
    if info.vocab_size and "vocab_size" not in resolved.sources:
        config = config.model_copy(update={"vocab_size": info.vocab_size})
        resolved = replace(resolved, config=config, sources={**resolved.sources, "vocab_size": info.path})
    dataset.check_usable(info, config.vocab_size, config.block_size, config.eval_block)
    return resolved, info


def _directory(resolved: ResolvedConfig, resume: bool, listen: Listener) -> tuple[RunDirectory, bool]:
    """(the run's directory with its lock held, whether it holds a run to go on with)."""
    out_dir = resolved.config.out_dir
    if resume:
        found = store.newest_unfinished(out_dir, _steps_wanted(resolved.config))
        if found is not None:
            found.acquire()
            return found, True
        listen(Note("train.nothing_to_resume", out_dir=out_dir))
    return store.create(out_dir), False


def _write_inputs(
    directory: RunDirectory, resolved: ResolvedConfig, placement: Placement, listen: Listener
) -> None:  # fmt: skip
    """Config, environment and the forecast, on disk before the first step."""
    known = environment(placement)
    config = resolved.config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    planned = ResolvedConfig(config, {**resolved.sources, "vocab_size": "run"}, (), resolved.name)
    forecast = make_plan(planned, Target(placement.gpu, 0))
    if resolved.config.memory_limit and forecast.verdict_of("foretrain") == "does_not_fit":
        # It starts all the same: it may shrink its micro-batch, and a CPU's limit is only watched.
        needs = max(phase.needed_low_bytes for phase in forecast.memory_of("foretrain").phases)
        listen(Note("train.beyond_limit", needs=needs, limit=resolved.config.memory_limit_bytes))
    directory.write("config.toml", to_toml(resolved.config))
    directory.write("environment.json", json.dumps(known, indent=1) + "\n")
    directory.write("plan.json", json.dumps(forecast.to_json(schema=SCHEMA)) + "\n")

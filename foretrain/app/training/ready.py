"""A run made ready to begin: its device, data, directory, what the config leaves open, and its forecast.

Of several ranks the first one does it, and tells the others; they look for the data themselves.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretrain.advice.micro_batch import choose as choose_micro_batch
from foretrain.app.plan import make_plan
from foretrain.app.training.request import Ready, Request
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import installed_torch
from foretrain.base.process_memory import resident_bytes
from foretrain.base.units import GIB
from foretrain.config.microbatches import in_parts, sequences_of, smaller_micro_batch, split_of, with_micro_batch
from foretrain.config.options import RunConfig, step_options
from foretrain.config.resolve import ResolvedConfig, to_toml
from foretrain.config.sharing import as_one_rank_of, config_of_all_ranks, config_of_rank
from foretrain.data import dataset
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.data.locate import locate, no_dataset
from foretrain.data.remote import Bar, fetch, no_bar
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import available_memory_bytes, total_memory_bytes
from foretrain.hardware.devices import Target, used_here_bytes
from foretrain.measure import trial as trials
from foretrain.measure.trial import Trial
from foretrain.predict.memory import MARGIN_BYTES, REFUSED, predict
from foretrain.predict.plan import SCHEMA, available
from foretrain.predict.ranks import of_run
from foretrain.predict.spec import StepSpec
from foretrain.runs import folder, state
from foretrain.runs.folder import Listener, Note, RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.training import ranks as group
from foretrain.training import starting
from foretrain.training.device import Placement, environment, give_back, keep_memory, place
from foretrain.training.ranks import FollowerDirectory, Group


# Linux grants memory that it does not have and later kills a process for it, so a run that cannot fit is refused by its
# forecast. Only what is certain is refused: the low end of what the run needs, in the dtype that needs least. A
# memory_limit as large as that is the user's word that it shall start all the same.
def check_memory(
    config: RunConfig, gpu: Gpu, *, compiled: bool, free: Callable[[], int | None] = available_memory_bytes
) -> None:
    """Raise UserError 'memory.machine…' where the run needs more than this process has and the machine has free."""
    left = free()
    if left is None:
        return
    left += resident_bytes() or 0
    dtypes: list[Dtype] = ["float32", "bfloat16"] if config.dtype == "auto" else [config.dtype]
    needs = min(_needs(config, gpu, dtype, compiled)[0] for dtype in dtypes)
    if needs <= left or needs <= (config.memory_limit_bytes or 0):
        return
    values = {"needs": needs, "free": left, "total": total_memory_bytes(), "limit": f"{-(-needs // GIB) + 1}GiB"}
    smaller = _fitting(config, gpu, dtypes[0], compiled, left)
    if smaller is None:
        raise UserError("memory.machine", **values)
    more = sequences_of(config) // smaller
    raise UserError("memory.machine_smaller", smaller=smaller, more=more, **values)


def _needs(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool) -> tuple[int, int]:
    """Return (low, expected) bytes of the run's need."""
    memory = predict(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled))
    return max(phase.needed_low_bytes for phase in memory.phases), memory.needed_bytes


def _fitting(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool, left: int) -> int | None:
    """Return the largest smaller micro-batch for the same training that fits with room to spare."""
    size = smaller_micro_batch(config.batch_size, sequences_of(config))
    while size is not None:
        if _needs(with_micro_batch(config, size), gpu, dtype, compiled)[1] + MARGIN_BYTES <= left:
            return size
        size = smaller_micro_batch(size, sequences_of(config))
    return None


KEPT = Cache("trials")


def _kept_at(config: RunConfig, placement: Placement) -> Path:
    calibration = placement.gpu.calibration
    driver = calibration.driver if calibration else ""
    return KEPT.path([step_options(config), placement.gpu.name, placement.dtype, driver, installed_torch()])


def _kept(path: Path, cap_bytes: int | None) -> Trial | None:
    """Return an earlier trial that still holds."""
    found = KEPT.record(path, Trial)
    holds = found is not None and found.lived and (cap_bytes is None or found.peak_bytes <= cap_bytes)
    return found if holds else None


def choose_batch(resolved: ResolvedConfig, placement: Placement, *, trial: bool, listen: Listener) -> ResolvedConfig:
    """Choose the micro-batch for this device. Raises UserError 'memory.trial' where not even one fits."""
    device = placement.device.type if placement.device.index is None else str(placement.device)
    config = resolved.config.model_copy(update={"device": device})
    room, _ = available(config, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    planned = config.model_copy(update={"compile": placement.compiled})
    choice = choose_micro_batch(planned, placement.gpu, placement.dtype, room)
    listen(Note(f"note.{choice.note.id}", **choice.note.values))
    config = config.model_copy(update=split_of(choice.config))
    if trial:
        config = tried(config, placement, room, listen)
    final = in_parts(resolved.config.model_copy(update=split_of(config)))
    sources = {**resolved.sources, **dict.fromkeys(split_of(config), "batch_size = auto")}
    return replace(resolved, config=final, sources=sources)


def tried(config: RunConfig, placement: Placement, cap_bytes: int | None, listen: Listener) -> RunConfig:
    """Return the config with a micro-batch that lives in a trial. Raises UserError 'memory.trial'."""
    while True:
        path, size = _kept_at(config, placement), config.batch_size
        found = _kept(path, cap_bytes)
        if found is not None:
            listen(Note("auto.kept", batch_size=size, peak=found.peak_bytes))
            return config
        listen(Note("auto.trying", batch_size=size))
        found = trials.run_trial(config, cap_bytes)
        if found.problem:
            listen(Note("auto.problem", problem=found.problem))
            return config
        if found.lived:
            listen(Note("auto.lived", batch_size=size, peak=found.peak_bytes))
            KEPT.keep(path, found.model_dump_json())
            return config
        smaller = smaller_micro_batch(size, sequences_of(config))
        if smaller is None:
            raise UserError("memory.trial", peak=found.peak_bytes, cap=cap_bytes or 0)
        listen(Note("auto.died", batch_size=size, smaller=smaller))
        config = with_micro_batch(config, smaller)


def choose(
    resolved: ResolvedConfig, placement: Placement, directory: RunDirectory, resuming: bool, world: int = 1
) -> tuple[ResolvedConfig, Placement]:
    """Decide what the config leaves open: as the run has it already, else measured."""
    given = set(resolved.sources)
    if world > 1:  # their gradients would be sent in half precision (config/sharing.py)
        given.add("master_weights")
    if resuming:
        chosen = starting.recall(resolved.config, placement, directory.read_record(), given)
    else:
        chosen = starting.spared_compiling(starting.decide(resolved.config, placement, given), given)
    return replace(resolved, config=chosen.config), chosen.placement


def pick_batch(resolved: ResolvedConfig, placement: Placement, asked: Request, world: int) -> ResolvedConfig:
    """Pick the micro-batch for the part of a step that one rank carries out."""
    whole = resolved.config
    own = replace(resolved, config=config_of_rank(as_one_rank_of(whole, world), world))
    chosen = choose_batch(own, placement, trial=asked.trial, listen=asked.listen)
    return replace(chosen, config=config_of_all_ranks(chosen.config, world))


def write_inputs(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement, asked: Request) -> None:
    known = environment(placement)
    config = resolved.config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    planned = ResolvedConfig(config, {**resolved.sources, "vocab_size": "run"}, (), resolved.name)
    forecast = make_plan(planned, Target(placement.gpu, 0))
    if asked.place.world > 1:
        forecast = of_run(forecast, asked.place.world, asked.place.local_world)
    if resolved.config.memory_limit and forecast.verdict_of("foretrain") in REFUSED:
        # It starts all the same: it may shrink its micro-batch, and a CPU's limit is only watched.
        needs = max(phase.needed_low_bytes for phase in forecast.memory_of("foretrain").phases)
        if needs > (limit := resolved.config.memory_limit_bytes or 0):  # else it is the card that is too small
            asked.listen(Note("train.beyond_limit", needs=needs, limit=limit))
    directory.write("config.toml", to_toml(resolved.config))
    directory.write("environment.json", json.dumps(known, indent=1) + "\n")
    directory.write("plan.json", json.dumps(forecast.to_json(schema=SCHEMA)) + "\n")


def told_of(found: Ready | TrainedRun) -> dict[str, Any]:
    if isinstance(found, TrainedRun):
        return {"finished": found.model_dump_json()}
    return {
        "config": found.resolved.config.model_dump_json(), "dtype": found.placement.dtype,
        "compiled": found.placement.compiled, "path": str(found.directory.path.resolve()),
        "resuming": found.resuming, "fingerprint": found.info.fingerprint,
    }  # fmt: skip


def follow(asked: Request, placement: Placement, told: dict[str, Any], rank: int) -> Ready:
    config = RunConfig.from_json(told["config"])
    if placement.device.type == "cpu":
        keep_memory()
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
    resolved, info = prepare_data(replace(asked.resolved, config=config), asked.bar)
    if info.fingerprint != told["fingerprint"]:
        raise UserError("data.other_on_rank", path=info.path)
    directory = FollowerDirectory(Path(told["path"]), rank)
    own = replace(placement, dtype=told["dtype"], compiled=told["compiled"] and placement.compiled)
    return Ready(replace(resolved, config=config), own, info, directory, told["resuming"])


def already_finished(asked: Request) -> TrainedRun | None:
    if not asked.resume or (done := _finished(asked.resolved.config)) is None:
        return None
    record = done.read_record()
    values = {"path": str(done.path), "steps": record.steps_done, "total": asked.resolved.config.max_iters}
    asked.listen(Note("train.already_finished", **values))
    return record


def _steps_wanted(config: RunConfig) -> int:
    """Count the steps that are wanted; an evaluation is of any run."""
    return 1 << 62 if config.eval_only else config.max_iters


def _finished(config: RunConfig) -> RunDirectory | None:
    if folder.newest_unfinished(config.out_dir, _steps_wanted(config)) is not None:
        return None
    return folder.newest(config.out_dir)


def check_start(resolved: ResolvedConfig, resume: bool) -> None:
    """Check what a run starts from, before its data. Raises UserError."""
    config = resolved.config
    if not resume:
        starting.find(config.init_from)
    elif folder.newest_unfinished(config.out_dir, _steps_wanted(config)) is None:
        left = folder.base_path(config.out_dir) / "ckpt.pt"
        if left.is_file():  # nanoGPT's own init_from = 'resume' means this file
            raise UserError("usage.resume_nanogpt", path=str(left))


def directory_of(resolved: ResolvedConfig, resume: bool, listen: Listener) -> tuple[RunDirectory, bool]:
    out_dir = resolved.config.out_dir
    if resume:
        found = folder.newest_unfinished(out_dir, _steps_wanted(resolved.config))
        if found is not None:
            found.acquire()
            return found, True
        listen(Note("train.nothing_to_resume", out_dir=out_dir))
    return folder.create(out_dir), False


def prepare_data(resolved: ResolvedConfig, bar: Bar = no_bar) -> tuple[ResolvedConfig, DatasetInfo]:
    """Find or make the dataset of a config, and check it against the model. Raises UserError."""
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


def alone(asked: Request) -> Ready | TrainedRun:
    return _first(asked, lambda: place(asked.resolved.config), 1)


def together(asked: Request, ranks: Group) -> Ready | TrainedRun:
    placement = group.placed(asked.resolved.config, ranks)
    if ranks.first:
        found = _first(asked, lambda: placement, ranks.world)
        ranks.agree(told_of(found), lambda words: words[0], patient=True)
        return found
    told = ranks.agree(None, lambda words: words[0], patient=True)
    return TrainedRun.from_json(told["finished"]) if "finished" in told else follow(asked, placement, told, ranks.rank)


def _first(asked: Request, placed: Callable[[], Placement], world: int) -> Ready | TrainedRun:
    if (done := already_finished(asked)) is not None:
        return done
    check_start(asked.resolved, asked.resume)
    return _ready(asked, placed(), world)


def _ready(asked: Request, placement: Placement, world: int) -> Ready:
    resolved, listen = asked.resolved, asked.listen
    if placement.device.type == "cpu":
        keep_memory()
    resolved, info = prepare_data(resolved, asked.bar)
    if placement.device.type == "cpu" and not resolved.config.auto_batch_size:  # which looks by itself
        check_memory(resolved.config, placement.gpu, compiled=placement.compiled)
    directory, resuming = directory_of(resolved, asked.resume, listen)
    try:
        directory.tell("starting")
        if asked.label:
            state.write(directory.path, state.read_label(directory.path).with_more(asked.label))
        resolved, placement = choose(resolved, placement, directory, resuming, world)
        give_back()  # what the measurements took is not the training's
        if resolved.config.auto_batch_size and not resuming:  # a resumed run goes on as it was
            resolved = pick_batch(resolved, placement, asked, world)
            split = (resolved.config.batch_size, resolved.config.gradient_accumulation_steps)
            directory.event("auto_batch", batch_size=split[0], accumulation=split[1])
        if not resuming:
            write_inputs(directory, resolved, placement, asked)
    except BaseException:
        directory.release()
        raise
    return Ready(resolved, placement, info, directory, resuming)

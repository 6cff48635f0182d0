"""batch_size = auto for a run: the choice by the estimate, and a short trial of it, kept."""

from dataclasses import replace
from pathlib import Path

from foretrain.advice.micro_batch import choose
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import installed_torch
from foretrain.config.microbatches import in_parts, sequences_of, smaller_micro_batch, split_of, with_micro_batch
from foretrain.config.options import RunConfig, step_options
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.devices import used_here_bytes
from foretrain.measure import trial as trials
from foretrain.measure.trial import Trial
from foretrain.predict.plan import available
from foretrain.runs.folder import Listener, Note
from foretrain.training.device import Placement

KEPT = Cache("trials")


def _kept_at(config: RunConfig, placement: Placement) -> Path:
    calibration = placement.gpu.calibration
    driver = calibration.driver if calibration else ""
    return KEPT.path([step_options(config), placement.gpu.name, placement.dtype, driver, installed_torch()])


def _kept(path: Path, cap_bytes: int | None) -> Trial | None:
    """A trial of before that still says something: it lived, in what there is now."""
    found = KEPT.record(path, Trial)
    holds = found is not None and found.lived and (cap_bytes is None or found.peak_bytes <= cap_bytes)
    return found if holds else None


def chosen(resolved: ResolvedConfig, placement: Placement, *, trial: bool, listen: Listener) -> ResolvedConfig:
    """The config with the micro-batch for this device. Raises UserError 'memory.trial' where not even one lives."""
    device = placement.device.type if placement.device.index is None else str(placement.device)
    config = resolved.config.model_copy(update={"device": device})
    room, _ = available(config, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    planned = config.model_copy(update={"compile": placement.compiled})
    choice = choose(planned, placement.gpu, placement.dtype, room)
    listen(Note(f"note.{choice.note.id}", **choice.note.values))
    config = config.model_copy(update=split_of(choice.config))
    if trial:
        config = tried(config, placement, room, listen)
    final = in_parts(resolved.config.model_copy(update=split_of(config)))
    sources = {**resolved.sources, **dict.fromkeys(split_of(config), "batch_size = auto")}
    return replace(resolved, config=final, sources=sources)


def tried(config: RunConfig, placement: Placement, cap_bytes: int | None, listen: Listener) -> RunConfig:
    """The config with a micro-batch that lives in a trial, smaller where it has to be. Raises UserError
    'memory.trial'."""
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

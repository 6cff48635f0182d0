"""A training run from its config to its record: alone, or as one rank of several; with what it tells of itself."""

from dataclasses import replace

import torch

from foretrain.app.training.forecast import expected_bytes, expected_times, forecast
from foretrain.app.training.ready import alone, together
from foretrain.app.training.reporting import Reporting
from foretrain.app.training.request import Ready, Request
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.data.remote import no_bar
from foretrain.model.shape import ModelShape
from foretrain.training.contention import Clock, Contention, Reading, own_s
from foretrain.training.device import Placement
from foretrain.training.notes import Note
from foretrain.training.ranks.group import Group, Ranks
from foretrain.training.store import RunDirectory, RunRecord
from foretrain.training.trainer import Trainer


def run(asked: Request) -> RunRecord:
    """Train in the run's directory; returns the record. Raises UserError."""
    if asked.place.world == 1:
        return _train(asked, alone(asked), Ranks())
    if not asked.place.first:
        asked = replace(asked, listen=lambda event: None, bar=no_bar)
    with Group(asked.place, asked.resolved.config.collective_timeout) as ranks:
        return _train(asked, together(asked, ranks), ranks)


def _train(asked: Request, ready: Ready | RunRecord, ranks: Ranks) -> RunRecord:
    if isinstance(ready, RunRecord):  # there is nothing left to do
        return ready
    resolved, placement, directory, listen = ready.resolved, ready.placement, ready.directory, asked.listen
    try:
        listen(_start(directory, resolved, placement))
        if ranks.world > 1:
            listen(_shared(resolved.config, ranks.world))
        plan = forecast(directory, ranks.world)
        planned_bytes = expected_bytes(plan, on_card=placement.gpu.reserves)
        with Reporting(ready, asked.trackers if ranks.first else (), listen, planned_bytes) as reporting:
            trainer = Trainer(
                resolved.config, ready.info, directory, placement, listen, resolved.name, expected_times(plan),
                _contention(placement, asked.since, reporting) if ranks.world == 1 else None, ranks,
            )  # fmt: skip
            trainer.flag.ends_process = asked.ends_process
            record = trainer.run(resume=ready.resuming)
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


def _shared(config: RunConfig, world: int) -> Note:
    own = config.gradient_accumulation_steps // world
    return Note("train.ranks", world=world, strategy=config.strategy, micro_batches=own, batch_size=config.batch_size)


def _end(directory: RunDirectory, record: RunRecord) -> Note:
    """How it ended."""
    return Note(
        f"train.{record.status}", path=str(directory.path), steps=record.steps_done, wall=record.wall_s,
        val=record.val_loss if record.val_loss is not None else float("nan"), reason=record.reason,
    )  # fmt: skip


def _contention(placement: Placement, since: Reading, reporting: Reporting) -> Contention | None:
    """What watches other programs while a CPU trains; a tracker's process is none of them."""
    if placement.device.type != "cpu":
        return None
    clock = Clock(own=lambda: own_s() + reporting.processor_s())
    return Contention(torch.get_num_threads(), clock=clock, since=since)

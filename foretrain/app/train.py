"""Train a config: what must be decided before torch is imported; app/training_session.py does the rest."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from foretrain.app.plan import Config, resolved_of
from foretrain.base.errors import UserError
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.sharing import check_ranks
from foretrain.data.remote import Bar, no_bar
from foretrain.predict.allocator.settings import Settings, merged
from foretrain.runs.folder import Listener
from foretrain.runs.record import TrainedRun
from foretrain.runs.state import UNSAID, Label, changed
from foretrain.runs.trackers import asked_for
from foretrain.training.contention import Clock
from foretrain.training.place import place_of


def train(
    config: Config = "baby",
    *,
    resume: bool = False,
    trial: bool = True,
    listen: Listener = lambda event: None,
    **options: Any,
) -> TrainedRun:
    """The record of a training run: `foretrain.train("baby", device="cpu", max_iters=200).val_loss`.

    The run is in `out_dir`: config, forecast (made before the first step), metrics, checkpoints. `config`, `options`:
    as in `plan`; times in the record are in seconds, memory in bytes, losses in nats per token. `resume`:
    continue the newest unfinished run in out_dir. `trial`: with batch_size = "auto", try the choice in a process of its
    own first. Started by torchrun or Slurm it is one rank of several: the first one listens and writes. `listen`
    hears each step (StepMetrics), evaluation (EvaluationMetrics) and notes with an id, as soon as they are there.
    Ctrl-C saves a checkpoint and returns a record with status "interrupted".
    Raises UserError, with the exit code of `foretrain train`: bad config 2, no torch 4, out of memory 5, diverged 6,
    data missing or damaged 7, disk full 8.
    """
    return train_resolved(resolved_of(config, options), resume=resume, trial=trial, listen=listen)


def train_resolved(
    resolved: ResolvedConfig, *, resume: bool = False, trial: bool = True, listen: Listener = lambda event: None,
    bar: Bar = no_bar, ends_process: bool = False, label: Label = UNSAID,
) -> TrainedRun:  # fmt: skip
    """Train as `train` does. `bar`: shows the download of shards. `ends_process`: a late signal stops nothing else."""
    need_torch()
    place = place_of(os.environ)
    if place.world > 1:
        check_ranks(resolved.config, place.world, place.local_world)  # before torch is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a sentence reports what the store and gloo warn of
    set_allocator(resolved.config.allocator_settings)
    since = Clock().read()  # what the machine does while torch is imported and the data is prepared
    trackers = asked_for(resolved.config.report_to, wandb_log=resolved.config.wandb_log)  # of those that there are
    from foretrain.app.training_session import Request, run

    return run(Request(resolved, resume, trial, listen, bar, ends_process, since, trackers, place, label))


def label_of(name: str | None, note: str | None, tags: Sequence[str]) -> Label:
    return changed(UNSAID, name=name, note=note, tags=tags)


def need_torch() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "safetensors", "numpy")):
        raise UserError("environment.missing_torch")


def set_allocator(own: str) -> None:
    """Set the allocator before torch is imported, which reads the variable then. Raises UserError."""
    variables = merged(own, os.environ)
    try:
        Settings.of_environment({**os.environ, **variables})
    except ValueError as error:
        if own:
            raise UserError("usage.alloc_conf", problem=str(error)) from None
    os.environ.update(variables)

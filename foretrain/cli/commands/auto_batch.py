"""batch_size = auto on the command line: the choice by the ledger, and for `train` a short trial of it, kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from foretrain.base.installation import cache_folder, installed_torch
from foretrain.base.messages import printable, say
from foretrain.base.safe_read import read_text
from foretrain.cli.common import ERR
from foretrain.config.microbatches import split_of
from foretrain.config.options import step_options
from foretrain.config.resolve import ResolvedConfig

if TYPE_CHECKING:
    from foretrain.config.options import RunConfig
    from foretrain.training.device import Placement
    from foretrain.tuning.trial import Trial


def _kept_at(config: RunConfig, placement: Placement) -> Path:
    calibration = placement.gpu.calibration
    key = [
        step_options(config),
        placement.gpu.name,
        placement.dtype,
        calibration.driver if calibration else "",
        installed_torch(),
    ]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return cache_folder() / "trials" / f"{digest}.json"


def _kept(path: Path, cap_bytes: int | None) -> Trial | None:
    """A trial of before that still says something: it lived, in what there is now."""
    from foretrain.tuning.trial import Trial

    with contextlib.suppress(OSError, ValueError):
        found = Trial.from_json(read_text(path))
        if found.lived and (cap_bytes is None or found.peak_bytes <= cap_bytes):
            return found
    return None


def _keep(path: Path, trial: Trial) -> None:
    from foretrain.training.files import replace_text

    with contextlib.suppress(OSError):  # without it the next start tries again
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, trial.model_dump_json())


def _tell(id: str, quiet: bool, **values: Any) -> None:
    if not quiet:
        ERR.print(Text(printable(say(id, **values)), style="dim"), soft_wrap=True)


def chosen(resolved: ResolvedConfig, placement: Placement, *, trial: bool, quiet: bool) -> ResolvedConfig:
    """The config with the micro-batch for this device. Raises UserError 'memory.trial' where not even one lives."""
    from foretrain.advice.micro_batch import choose
    from foretrain.hardware.devices import used_here_bytes
    from foretrain.predict.plan import available

    device = placement.device.type if placement.device.index is None else str(placement.device)
    config = resolved.config.model_copy(update={"device": device})
    room, _ = available(config, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    planned = config.model_copy(update={"compile": placement.compiled})
    choice = choose(planned, placement.gpu, placement.dtype, room)
    _tell(f"note.{choice.note.id}", quiet, **choice.note.values)
    config = config.model_copy(update=split_of(choice.config))
    if trial:
        config = _tried(config, placement, room, quiet)
    final = resolved.config.model_copy(update=split_of(config))
    sources = {**resolved.sources, **dict.fromkeys(split_of(config), "batch_size = auto")}
    return replace(resolved, config=final, sources=sources)


def _tried(config: RunConfig, placement: Placement, cap_bytes: int | None, quiet: bool) -> RunConfig:
    """Shrink until a trial lives."""
    from foretrain.base.errors import UserError
    from foretrain.config.microbatches import cut, sequences_of, shrunk
    from foretrain.tuning.trial import run_trial

    while True:
        path, size = _kept_at(config, placement), config.batch_size
        found = _kept(path, cap_bytes)
        if found is not None:
            _tell("auto.kept", quiet, batch_size=size, peak=found.peak_bytes)
            return config
        _tell("auto.trying", quiet, batch_size=size)
        found = run_trial(config, cap_bytes)
        if found.problem:
            _tell("auto.problem", quiet, problem=found.problem)
            return config
        if found.lived:
            _tell("auto.lived", quiet, batch_size=size, peak=found.peak_bytes)
            _keep(path, found)
            return config
        smaller = shrunk(size, sequences_of(config))
        if smaller is None:
            raise UserError("memory.trial", peak=found.peak_bytes, cap=cap_bytes or 0)
        _tell("auto.died", quiet, batch_size=size, smaller=smaller)
        config = cut(config, smaller)

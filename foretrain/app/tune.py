"""Measure which settings train fastest here, without torch until it starts. `foretrain.tune` for Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from foretrain.app.plan import Config, resolved_of
from foretrain.app.train import need_torch, set_allocator
from foretrain.base.errors import UserError
from foretrain.config.resolve import ResolvedConfig
from foretrain.measure.space import TUNABLE
from foretrain.measure.tune_record import Tuning
from foretrain.training.place import place_of

if TYPE_CHECKING:
    from foretrain.app.tuning_session import Job


def tune(
    config: Config = "baby",
    *,
    budget_s: float = 180.0,
    trials: int | None = None,
    change: Iterable[str] = (),
    gpus: int = 1,
    recall: bool = True,
    listen: Callable[[str, dict[str, Any]], None] = lambda id, values: None,
    **options: Any,
) -> Tuning:
    """The settings that were tried, and the fastest: `foretrain.tune("baby", budget_s=60).config`.

    Tokens per step and what is learned stay. `config`, `options`: as in `plan`. `budget_s`: how long to search;
    `trials`: settings at most, by default a quarter of them, 4 to 24. `change`: names of options that may change, such
    as ["batch_size", "compile"]; by default all that keep the learning. `gpus`: how many cards share each step, in ways
    that are searched too; on a CPU, processes. `recall`: an earlier answer will do. `listen` hears each trial. Times
    in the record are in seconds, memory is in bytes.
    Raises UserError: bad config 2, no torch or nothing that runs 4.
    """
    names = tuple(change)
    check_tunable(names, "change")
    return job_of(resolved_of(config, options), names, gpus).run(budget_s, trials, recall=recall, listen=listen)


def job_of(resolved: ResolvedConfig, change: tuple[str, ...] = (), gpus: int = 1) -> Job:
    """Return the search's job, with what the config leaves open decided as `train` would."""
    if (world := place_of(os.environ).world) > 1:
        raise UserError("usage.tune_gpus", count=world)
    need_torch()
    set_allocator(resolved.config.allocator_settings)
    from foretrain.app.tuning_session import prepare

    return prepare(resolved, change, gpus)


def check_tunable(names: tuple[str, ...], option: str) -> None:
    """Raise UserError for a name that is not of an option that can be tuned. `option`: where they were given."""
    if unknown := [name for name in names if name not in TUNABLE]:
        raise UserError("usage.tune_knobs", option=option, unknown=", ".join(unknown)[:80], known=list(TUNABLE))

"""What `foretrain tune` keeps: its answer, for the next time it is asked the same, and the steps that it timed."""

import os
from collections.abc import Sequence
from pathlib import Path

from foretrain.base.cache import Cache
from foretrain.base.installation import installed_torch
from foretrain.config.one_graph import is_one_graph
from foretrain.config.options import RunConfig, step_options
from foretrain.hardware.calibration import save_tuned
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import usable_cores
from foretrain.predict.tuned_steps import step_of
from foretrain.tuning.record import TuneTrial, Tuning
from foretrain.tuning.space import TUNABLE, Level

KEPT = Cache("tuned")
SURE = 0.05  # a step time that may be wrong by more corrects nothing
QUIET = 0.25  # share of the machine that other programs may use, for a step time to count
SAME_ROOM = 1.1  # room that differs by less is the same where room decided


def path_of(base: RunConfig, choices: Sequence[Sequence[Level]], gpu: Gpu, version: str, world: int = 1) -> Path:
    """Where the answer for this config, these levels, so many of this device and these versions lies."""
    driver = gpu.calibration.driver if gpu.calibration else ""
    space = [(knob, sorted(map(str, levels))) for knob, levels in zip(TUNABLE, choices, strict=True)]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    what = [step_options(base), space, gpu.name, driver, usable_cores(), threads, installed_torch(), version]
    return KEPT.path([*what, world] if world > 1 else what)


def recall(path: Path, room_bytes: int | None, budget_s: float, trials: int) -> Tuning | None:
    """An answer of before that still holds: it had as many trials and as much time, or needed no more, and there is as
    much memory. None for a damaged file, too."""
    found = KEPT.record(path, Tuning)
    if found is None or found.most_trials < trials or (found.stop == "budget" and found.budget_s < budget_s):
        return None
    if room_bytes is not None and (found.best.peak_bytes or 0) > room_bytes:
        return None
    limited = found.fitting < found.settings or any(trial.verdict == "memory" for trial in found.trials)
    if limited and room_bytes and found.cap_bytes and room_bytes > SAME_ROOM * found.cap_bytes:
        return None
    return found.model_copy(update={"known": True})


def keep(found: Tuning, path: Path) -> None:
    """For the next time; an interrupted search is not an answer. Without it the next time measures again."""
    if found.stop != "interrupted":
        KEPT.keep(path, found.model_dump_json(indent=1))


def feed(found: Tuning, configs: Sequence[RunConfig], gpu: Gpu, dtype: Dtype, threads: int) -> int:
    """Keep the timed steps for this device's plans (predict/tuned_steps.py); how many. `configs`: in the trials' order.

    Only what is sure: bounds within 5 %, on a machine that did little else. `threads`: PyTorch's own; 0 on cards.
    """
    if found.elsewhere > QUIET:
        return 0
    steps = []
    for trial, config in zip(found.trials, configs, strict=True):
        if _is_sure(trial):
            own = dtype if config.dtype == "auto" else config.dtype
            used = threads and (config.cpu_threads or threads)
            graphed = is_one_graph(config, gpu, own)
            steps.append(step_of(config, own, trial.step_s or 0.0, used, graphed=graphed))
    driver = gpu.calibration.driver if gpu.calibration else ""
    try:
        if steps:
            save_tuned(gpu.name, driver, tuple(steps))
    except OSError:
        return 0
    return len(steps)


def _is_sure(trial: TuneTrial) -> bool:
    if None in (trial.step_s, trial.low_s, trial.high_s) or trial.verdict in ("memory", "timeout", "failed", "changed"):
        return False
    return (trial.high_s or 0) / (trial.low_s or 1) <= (1 + SURE) ** 2

"""The cache of `foretrain tune`: its answers, and the steps that it timed."""

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import installed_torch
from foretrain.config.checks import is_one_graph
from foretrain.config.options import RunConfig, step_options
from foretrain.hardware.calibration import save_tuned
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import usable_cores
from foretrain.measure.space import TUNABLE, Level, learning
from foretrain.measure.tune_record import (
    NEAR,
    ForecastError,
    TuneTrial,
    Tuning,
    Verdict,
    estimate,
    rounded_up,
    with_pareto,
)
from foretrain.measure.tuner import UNPAIRED_NOISE, TriedSetting, Tuner
from foretrain.predict.tuned_steps import step_of

KEPT = Cache("tuned")
SURE = 0.05  # a step time that may be wrong by more corrects nothing
QUIET = 0.25  # share of the machine that other programs may use, for a step time to count
SAME_ROOM = 1.1  # room that differs by less is the same where room decided


def path_of(base: RunConfig, choices: Sequence[Sequence[Level]], gpu: Gpu, version: str, world: int = 1) -> Path:
    driver = gpu.calibration.driver if gpu.calibration else ""
    space = [(name, sorted(map(str, levels))) for name, levels in zip(TUNABLE, choices, strict=True)]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    what = [step_options(base), space, gpu.name, driver, usable_cores(), threads, installed_torch(), version]
    return KEPT.path([*what, world] if world > 1 else what)


def recall(path: Path, room_bytes: int | None, budget_s: float, trials: int) -> Tuning | None:
    """Return an earlier answer that still holds: as many trials, time and memory. None for a damaged file, too."""
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
    if found.stop != "interrupted":
        KEPT.keep(path, found.model_dump_json(indent=1))


def feed(found: Tuning, configs: Sequence[RunConfig], gpu: Gpu, dtype: Dtype, threads: int) -> int:
    """Keep reliable timed steps for this device's plans; return how many. `threads`: PyTorch's own; 0 on cards."""
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


def answer(tuner: Tuner) -> dict[str, Any]:
    """Return a search's fields of a `Tuning`. Raises UserError where nothing that was tried runs."""
    living = [trial for trial in tuner.tried.values() if trial.lives]
    if not living:
        raise _nothing(tuner)
    winner = tuner.winner
    if winner is None or not tuner.tried[winner].lives:
        winner = min(living, key=lambda trial: trial.middle).number
    trials = [_record(tuner, trial, winner) for trial in tuner.tried.values()]
    trials.sort(key=lambda t: (t.verdict != "best", t.step_s is None, t.step_s or 0.0))
    given = tuner.tried.get(tuner.given) if tuner.given is not None else None
    gain = tuner.slower(given.number, winner) if given is not None and given.lives else None
    first = tuner.tried.get(int(tuner.model.prior.argmin()))
    lived = [trial for trial in trials if trial.step_s is not None]
    return {
        "config": tuner.settings[winner].config, "trials": with_pareto(trials), "settings": tuner.total,
        "fitting": len(tuner.settings), "given_fits": gain is not None,
        "gain": math.expm1(gain.mean) if gain else None, "gain_low": math.expm1(gain.low) if gain else None,
        "gain_high": math.expm1(gain.high) if gain else None,
        "first_choice": math.expm1(tuner.slower(first.number, winner).mean) if first and first.lives else None,
        "time_error": ForecastError.of([(t.predicted_s, t.step_s) for t in lived]),
        "memory_error": ForecastError.of([(t.predicted_bytes, t.peak_bytes) for t in lived]),
        "stop": tuner.stop, "rounds": len(tuner.race.rounds),
        "least_budget_s": tuner.least_budget_s() if tuner.stop == "budget" else None,
        "elsewhere": statistics.median(burst.elsewhere for trial in living for burst in trial.bursts),
    }  # fmt: skip


def _nothing(tuner: Tuner) -> UserError:
    deaths = [trial.death for trial in tuner.tried.values() if trial.death is not None]
    if tuner.stop == "interrupted" or not deaths:
        return UserError("check.tune_nothing_yet")
    failed = [death for death in deaths if death.reason == "failed"]
    if failed:
        return UserError("environment.tune_failed", count=len(deaths), problem=failed[0].problem)
    if any(death.reason == "timeout" for death in deaths):
        least_s = tuner.least_budget_s() or 2 * tuner.budget_s
        values = {"count": len(deaths), "budget": tuner.budget_s, "least": rounded_up(least_s)}
        return UserError("check.tune_too_slow", **values)
    peak = min(death.peak_bytes for death in deaths)
    return UserError("memory.tune_none_lives", count=len(deaths), peak=peak, cap=tuner.outlook.room_bytes or 0)


def _record(tuner: Tuner, trial: TriedSetting, winner: int) -> TuneTrial:
    setting = tuner.settings[trial.number]
    times: dict[str, Any] = {}
    if trial.lives:
        logs = [math.log(burst.step_s) for burst in tuner.tried[winner].bursts]
        slower, own = tuner.slower(trial.number, winner), estimate(logs)
        half = slower.half
        if trial.number == winner:  # its own steps, drift included
            half = own.half if math.isfinite(own.half) else 2 * UNPAIRED_NOISE
        middle = statistics.median(logs) + slower.mean
        times = {
            "step_s": math.exp(middle), "low_s": math.exp(middle - half), "high_s": math.exp(middle + half),
            "tokens_per_s": setting.config.tokens_per_step / math.exp(middle),
        }  # fmt: skip
    return TuneTrial(
        options=setting.named, gradient_accumulation_steps=setting.config.gradient_accumulation_steps,
        learning=learning(tuner.base, setting.config), verdict=_verdict(tuner, trial, winner),
        given=trial.number == tuner.given, predicted_s=trial.predicted_s, predicted_bytes=trial.predicted_bytes,
        peak_bytes=trial.peak_bytes or None, started_s=trial.started_s, bursts=len(trial.bursts),
        problem=trial.death.problem if trial.death else "", **times,
    )  # fmt: skip


def _verdict(tuner: Tuner, trial: TriedSetting, winner: int) -> Verdict:
    if trial.changed:
        return "changed"
    if trial.death is not None:
        return trial.death.reason
    if trial.number == winner:
        return "best"
    if trial.number in tuner.race.alive:
        return "as_good" if tuner.slower(trial.number, winner).mean <= NEAR else "close"
    return "slower"

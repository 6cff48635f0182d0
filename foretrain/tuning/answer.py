"""From what a search saw to what `foretrain tune` says: trials with bounds, the gain, the forecast's error."""

import math
import statistics
from typing import Any

from foretrain.base.errors import UserError
from foretrain.tuning.cost import rounded_up
from foretrain.tuning.race import NEAR, estimate
from foretrain.tuning.record import ForecastError, TuneTrial, Verdict, with_pareto
from foretrain.tuning.space import learning
from foretrain.tuning.tuner import UNPAIRED_NOISE, Tried, Tuner


def answer(tuner: Tuner) -> dict[str, Any]:
    """The fields of a `Tuning` that a search knows. Raises UserError where nothing that was tried runs."""
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


def _record(tuner: Tuner, trial: Tried, winner: int) -> TuneTrial:
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


def _verdict(tuner: Tuner, trial: Tried, winner: int) -> Verdict:
    if trial.changed:
        return "changed"
    if trial.death is not None:
        return trial.death.reason
    if trial.number == winner:
        return "best"
    if trial.number in tuner.race.alive:
        return "as_good" if tuner.slower(trial.number, winner).mean <= NEAR else "close"
    return "slower"

"""Ablations, each the first subject with one setting changed, and their planned price: of learning as long as the
compared part, of speed and memory SHORT_STEPS."""

from collections.abc import Sequence
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.comparison import settings
from foretrain.comparison.settings import Effect, Setting
from foretrain.comparison.subject import Subject
from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu, find
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import available, timing
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time

SHORT_STEPS = 200  # at which benchmarks/compare_power.py finds 3%
MOST_RUNS = 8


class Ablation(Record):
    """One run to make, which differs from `base` in one setting. `answers`: the effects that it would explain.
    `impossible`: why this cannot be changed alone. `scaled`: the time is scaled by a measured step."""

    base: str
    other: str
    setting: str
    value: Any
    changes: dict[str, Any]
    answers: tuple[Effect, ...]
    steps: int = 0
    time_s: float | None = None
    energy_j: float | None = None
    cost: float | None = None
    currency: str = ""
    verdict: Verdict | None = None
    scaled: bool = False
    impossible: str = ""


# Why a setting cannot be changed alone; for others accumulation does not divide the tokens per step.
_WHY_NOT = {"program": "program", "parameters": "shape", settings.CONTENTS: "contents", settings.RANKS: "ranks"}


def ablation_runs(
    base: Subject, other: Subject, differing: Sequence[Setting], place: int, compared_tokens: float | None
) -> tuple[Ablation, ...]:
    """Return a run for each setting that differs and has an effect; none where only one does. `place`: of `other`."""
    can = [setting for setting in differing if setting.affects]
    if len(can) < 2 or base.config is None:
        return ()
    return tuple(_run(base, other, setting, setting.values[place], compared_tokens) for setting in can[:MOST_RUNS])


def _run(base: Subject, other: Subject, setting: Setting, value: Any, compared_tokens: float | None) -> Ablation:
    assert base.config is not None
    common = {
        "base": base.label, "other": other.label, "setting": setting.name, "value": value, "answers": setting.affects,
    }  # fmt: skip
    gpu, changed = base.gpu, base.config
    if setting.name == "gpu":
        gpu, options = other.gpu or find(value), {}
    else:
        found = settings.changes(setting, base.config, value)
        if found is None:
            return Ablation(**common, changes={}, impossible=_WHY_NOT.get(setting.name, "tokens"))
        options = found
        try:
            changed = _checked(base, base.config, options)
        except UserError as error:
            return Ablation(**common, changes=options, impossible=str(error).splitlines()[-1].strip())
    steps = SHORT_STEPS
    if "learning" in setting.affects:
        steps = max(1, round(compared_tokens / changed.tokens_per_step)) if compared_tokens else changed.max_iters
    if gpu is None or (base.world or 1) > 1:  # several ranks are not priced here
        return Ablation(**common, changes=options, steps=steps)
    try:
        return _priced(base, changed, gpu, steps, {**common, "changes": options})
    except UserError as error:  # the card cannot do what the setting asks for
        return Ablation(**common, changes=options, impossible=str(error))


def _checked(base: Subject, config: RunConfig, options: dict[str, Any]) -> RunConfig:
    """Return the base's config with these options. Raises UserError where they conflict."""
    defaults = RunConfig().model_dump()
    values = {k: v for k, v in config.model_dump().items() if v != defaults[k] and k != "total_batch_size"}
    sources = dict.fromkeys(values, base.label) | dict.fromkeys(options, "compare")
    changed, problems = check(values | options, sources)
    if changed is None:
        raise problems[0]
    return changed


def _priced(base: Subject, changed: RunConfig, gpu: Gpu, steps: int, common: dict[str, Any]) -> Ablation:
    spec = StepSpec.checked(changed, gpu, base.step)
    rent = {} if base.rent_per_hour is None else {"price_per_hour": base.rent_per_hour}
    run = spec.but(max_iters=steps, **rent)
    factor = _measured_factor(base)
    predicted = step_time(run)
    logged_s = predicted.expected_s * factor if predicted and factor else None
    timed = timing(run, logged_s)
    room, _ = available(changed, gpu, base.used_by_others_bytes)
    memory = predict(spec, room)
    money = timed.money() if timed else None
    return Ablation(
        **common, steps=steps, time_s=timed.length_s.expected_s if timed else None,
        energy_j=timed.energy_expected_j if timed else None, cost=money[1] if money else None,
        currency=changed.currency, verdict=memory.verdict, scaled=factor is not None,
    )  # fmt: skip


def _measured_factor(base: Subject) -> float | None:
    if not base.measured or base.step_s is None or base.config is None or base.gpu is None:
        return None
    predicted = step_time(StepSpec.of(base.config, base.gpu, base.step))
    return base.step_s.expected_s / predicted.expected_s if predicted else None

"""What a run of any kind takes: its time, energy and money, in lines of a first screen or as the rows of a table."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from foretrain.base.messages import format_value, listed
from foretrain.base.units import Span
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.spec import StepName
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import NO_TIME, Prices, Spending, Timing
from foretrain.reports.document import Cell, Figure, Figures, Message, Quantity, Row
from foretrain.reports.views.shared import uncalibrated

Trained = Plan | ClusterPlan | FineTunePlan
Rows = list[tuple[Cell, ...]]
LATEST_S = 3e9  # a run of more than a century has no date


def speed_source(plan: Trained, timing: Timing) -> Message:
    if timing.source == "measured (log)":
        return Message("source.log")
    if timing.source == "calibrated":
        return Message("source.calibrated")
    if isinstance(plan, FineTunePlan):
        return Message("finetune.speed_from", {"gpu": plan.gpu.name})
    return uncalibrated(one_card(plan))


def one_card(plan: Plan | ClusterPlan) -> Plan:
    return plan.one_card if isinstance(plan, ClusterPlan) else plan


def cards_of(plan: Trained) -> int:
    if isinstance(plan, ClusterPlan):
        return plan.cluster.world
    return plan.tune.world if isinstance(plan, FineTunePlan) else 1


def no_time(plan: Trained, texts: str = "first") -> Message:
    if isinstance(plan, FineTunePlan):
        return Message(f"{texts}.no_time" if plan.bound == "exact" else "finetune.no_time", {"gpu": plan.gpu.name})
    id = "no_time_of_recipe" if one_card(plan).of_untimed_recipe else "no_time"
    return Message(f"{texts}.{id}", {"gpu": plan.gpu.name, "recipe": plan.config.recipe})


# -- lines of a first screen ---------------------------------------------------------------------------------------


def takes_rows(
    plan: Trained, timing: Timing | None, steps: int | None = None, marks: tuple[str, str] | None = None
) -> list[Row]:
    """Return the time and the cost. `steps`: where not the plan's; `marks`: what each of the two depends on."""
    if timing is None:
        unknown = [Row(Message("first.label.cost"), Message("first.cost_unknown"))] if isinstance(plan, Plan) else []
        return [Row(Message("first.label.time"), no_time(plan)), *unknown]
    values = {"total": _span(timing.length_s), "step": timing.step_s.expected_s, "tokens": timing.tokens_per_s}
    if isinstance(plan, FineTunePlan):
        values |= {"steps": timing.steps or 0, "more": listed(_rates(plan, timing))}
        ids = ("first.time", "finetune.time_short") if timing.total_s else ("finetune.speed", "finetune.speed_short")
    else:
        one = one_card(plan)
        count = steps or one.work.steps
        values |= {"steps": count, "more": _work_of_step(plan, count), "batches": one.evaluation_batches}
        ids = ("first.time_evaluation",) * 2 if one.config.eval_only else ("first.time", "first.time_short")
    full, brief = (Message(id, values) for id in ids)
    if marks is None and plan.verdict in REFUSED:
        mark = "if_eager" if plan.verdict == "does_not_run" else "if_fitted"
        marks = mark, mark
    elif marks is None and isinstance(plan, FineTunePlan) and plan.tune.fills_rows:
        marks = "at_most", "at_most"
    prices = timing.prices if isinstance(plan, FineTunePlan) else plan.config
    cost = cost_of(prices, timing, plan.gpu, cards_of(plan))
    if marks is not None:
        full, brief = (Message(f"first.{marks[0]}", {"text": text}) for text in (full, brief))
        cost = Message(f"first.{marks[1]}", {"text": cost})
    rows = [Row(Message("first.label.time"), full, short=brief)]
    if timing.total_s is None:
        return rows
    co2 = [Row(Message("row.co2"), text, optional=2) for text in _co2(prices, timing)]
    return [*rows, Row(Message("first.label.cost"), cost), *co2]


def _work_of_step(plan: Plan | ClusterPlan, steps: int) -> Message:
    if isinstance(plan, ClusterPlan):
        sequences = {"micro_batches": plan.micro_batches, "batch_size": plan.config.batch_size}
        return Message("cluster.sequences", sequences)
    return Message("first.tokens", {"tokens": steps * plan.config.tokens_per_step})


def _rates(plan: FineTunePlan, timing: Timing) -> list[str]:
    shares = {"mfu": timing.mfu, **({"hfu": timing.hfu} if plan.tune.gradient_checkpointing else {})}
    known = [
        Message(f"finetune.{name}", {"share": share}).text() for name, share in shares.items() if share is not None
    ]
    if timing.generation_s:
        known.insert(0, Message("finetune.generation", {"duration": timing.generation_s}).text())
    return [Message("finetune.line_speed", {"tokens": timing.tokens_per_s}).text(), *known]


def cost_of(prices: RunConfig | Prices, spent: Spending, gpu: Gpu, cards: int = 1) -> Message:
    p, money = prices, spent.money()
    values = {
        "money": (*money, p.currency) if money else (0.0, 0.0, 0.0, p.currency), "price_hour": p.price_per_hour,
        "currency": p.currency, "price_kwh": p.price_per_kwh, "energy": spent.energy_expected_j or 0.0, "count": cards,
    }  # fmt: skip
    if spent.rent_expected is not None and cards > 1:
        return Message("cluster.rent", values)
    if spent.rent_expected is not None:
        return Message("first.rent_and_power" if spent.cost_expected else "first.rent", values)
    if spent.energy_expected_j is None:
        return Message("first.no_cost", {"gpu": gpu.name})
    return Message("first.power" if spent.cost_expected else "first.energy", values)


# -- rows of a table -------------------------------------------------------------------------------------------------


def time_rows(plan: Trained, timing: Timing, now: datetime | None = None) -> Rows:
    """A step, the whole run, and what that spends. `now`: says when the run would end if it were started then."""
    if isinstance(plan, Plan) and plan.config.eval_only:
        rows = [_evaluation(plan, timing)]
    else:
        rows = [*_step_rows(plan, timing), *_whole_rows(plan, timing)]
    total = timing.total_s
    if total is None:
        return rows
    rows.append((Message("row.total_time"), duration(total)))
    if now is not None and total.high_s < LATEST_S:
        ends = {name: now + timedelta(seconds=getattr(total, f"{name}_s")) for name in ("low", "expected", "high")}
        ends = {name: f"{moment:%Y-%m-%d %H:%M}" for name, moment in ends.items()}
        rows.append((Message("row.finish"), Message("value.finish", ends)))
    if isinstance(plan, ClusterPlan) and plan.one_card.timing is not None:
        rows.append((Message("cluster.row.one_card"), duration(plan.one_card.timing.length_s)))
    prices = timing.prices if isinstance(plan, FineTunePlan) else plan.config
    return [*rows, *spending_rows(prices, plan.gpu, timing, cards_of(plan)), *_other_step(plan, timing)]


def _step_rows(plan: Trained, timing: Timing) -> Rows:
    rows: Rows = [(Message("row.step_time"), duration(timing.step_s))]
    rank = plan.best or plan.least if isinstance(plan, ClusterPlan) else None
    if rank is not None and rank.time is not None:
        rows.append((Message("cluster.row.own"), duration(rank.time.compute_s)))
        rows.append((Message("cluster.row.waits"), duration(rank.time.waits_s)))
    rows.append((Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})))
    if isinstance(plan, ClusterPlan):
        return [*rows, *([(Message("cluster.row.mfu"), Quantity(timing.mfu, "percent"))] if timing.mfu else [])]
    if timing.generation_s is not None:
        rows.append((Message("row.generation"), Quantity(timing.generation_s, "duration")))
    if isinstance(plan, Plan):
        return [*rows, (Message("row.mfu"), _mfu(timing, plan.gpu, plan.dtype))]
    rows.append((Message("row.mfu"), _share("finetune.mfu_flops", timing.flops_per_step, timing.mfu)))
    return [*rows, (Message("row.hfu"), _share("finetune.hfu_flops", timing.hardware_flops_per_step, timing.hfu))]


def _whole_rows(plan: Trained, timing: Timing) -> Rows:
    if isinstance(plan, FineTunePlan) or not timing.steps:
        return []
    rows, step, evaluation = Rows(), timing.step_s, timing.evaluation_s
    if one_card(plan).compiled:
        compiling = timing.compile_s or NO_TIME
        first, own = compiling.plus(step), evaluation.expected_s if evaluation else 0.0
        values = {"low": first.low_s, "expected": first.expected_s, "high": first.high_s}
        logged = {"compile": compiling.expected_s, "logged": first.expected_s + own}
        rows.append((Message("row.first_step"), Message("value.first_step", {**values, **logged})))
    if evaluation is not None:
        save = timing.save_s.expected_s if timing.save_s else 0.0
        values = {"count": timing.n_evaluations, "each": evaluation.expected_s, "save": save}
        rows.append((Message("row.evaluations"), Message("value.evaluations", values)))
    steps = timing.steps
    every = Range(low_s=step.low_s * steps, expected_s=step.expected_s * steps, high_s=step.high_s * steps)
    return [*rows, (Message("row.all_steps", {"steps": steps}), duration(every))]


def _evaluation(plan: Plan, timing: Timing) -> tuple[Cell, ...]:
    took = timing.evaluation_s
    assert took is not None
    values = {"batches": plan.evaluation_batches, "low": took.low_s, "expected": took.expected_s, "high": took.high_s}
    return Message("row.evaluation"), Message("value.evaluation_time", values)


def _other_step(plan: Trained, timing: Timing) -> Rows:
    if not isinstance(plan, Plan) or plan.config.eval_only or timing.source == "measured (log)":
        return []
    other: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    beside = plan.timing_of(other)
    id = "row.nanogpt_time" if other == "nanogpt" else "row.foretrain_time"
    return [] if beside is None else [(Message(id), duration(beside.step_s))]


def _mfu(timing: Timing, gpu: Gpu, dtype: str) -> Message:
    values = {"mfu": timing.mfu, "nanogpt": timing.nanogpt_mfu, "rate": timing.flop_per_s, "dtype": dtype}
    peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
    if timing.mfu is None or peak is None:
        return Message("value.mfu_unknown", values)
    return Message("value.mfu_cpu" if gpu.kind == "cpu" else "value.mfu", {**values, "peak": peak})


def _share(id: str, counted: int | None, share: float | None) -> str:
    parts = [Message(id, {"flops": counted}).text()]
    return listed([Quantity(share, "percent").text(), *parts] if share is not None else parts)


def spending_rows(prices: RunConfig | Prices, gpu: Gpu, timing: Spending, cards: int = 1) -> Rows:
    rows = Rows()
    if timing.power is not None:
        values = {
            "expected": timing.energy_expected_j, "low": timing.energy_low_j, "high": timing.energy_high_j,
            "watts": timing.power.expected_w, "watts_low": timing.power.low_w, "watts_high": timing.power.high_w,
            "board": gpu.board_power_w or 0, "count": cards,
        }  # fmt: skip
        id = "value.energy_cpu" if timing.power.model == "cpu" else "value.energy"
        rows.append((Message("row.energy"), Message("cluster.energy" if cards > 1 else id, values)))
    if timing.cost_expected is not None:
        rows.append(_money("electricity", (timing.cost_low, timing.cost_expected, timing.cost_high), prices))
    if timing.rent_expected is not None:
        rows.append(_money("rent", (timing.rent_low, timing.rent_expected, timing.rent_high), prices))
    return rows + [(Message("row.co2"), text) for text in _co2(prices, timing)]


def _money(id: str, amounts: tuple[float | None, ...], prices: RunConfig | Prices) -> tuple[Cell, ...]:
    values = dict(zip(("low", "expected", "high"), amounts, strict=True))
    values |= {"price_kwh": prices.price_per_kwh, "price_hour": prices.price_per_hour}
    return Message(f"row.{id}"), Message(f"value.{id}", {**values, "currency": prices.currency})


def _co2(prices: RunConfig | Prices, timing: Spending) -> list[Message]:
    if timing.co2_expected_g is None:
        return []
    values = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
    return [Message("value.co2", {**values, "factor": prices.co2_per_kwh})]


def duration(took: Range) -> Message:
    if took.low_s == took.high_s:
        return Message("value.duration", {"expected": took.expected_s})
    return Message("value.duration_range", {"low": took.low_s, "expected": took.expected_s, "high": took.high_s})


def _span(took: Range) -> Span:
    return took.low_s, took.expected_s, took.high_s


# -- figures of a report ------------------------------------------------------------------------------------------


def figures_of(items: Iterable[tuple[str, Cell | None, Cell]]) -> Figures:
    """(id, value, source) of each; those that nothing is known of are left out."""
    return Figures(
        tuple(Figure(Message(f"figure.{id}"), value, source) for id, value, source in items if value is not None)
    )


def of_plan(plan: Plan | FineTunePlan) -> Figures:
    bounded = isinstance(plan, FineTunePlan) and plan.bound != "exact"
    found = [] if bounded else [_ranged("memory_needed", plan.needs.neediest.needed_span, "bytes", plan.needs.source)]
    if plan.available_bytes is not None:
        free = Quantity(plan.available_bytes, "bytes")
        found.append(Figure(Message("figure.available"), free, plan.gpu.name))
    if (timing := plan.timing) is not None:
        found += _times(timing) + (_spent(timing, timing.source, timing.prices.currency) if timing.total_s else [])
    if isinstance(plan, Plan) and plan.work.tokens:
        tokens, source = Quantity(plan.work.tokens, "count"), Message("source_name.config")
        found.append(Figure(Message("figure.tokens"), tokens, source))
    return Figures(tuple(found))


def _times(timing: Timing) -> list[Figure]:
    run = [_ranged("wall", _span(timing.length_s), "duration", timing.source)] if timing.total_s else []
    if timing.steps == 0:
        return run
    step = _span(timing.step_s)
    speed = _ranged("speed", _per_step(timing.tokens_per_s, step), "number", timing.source)
    found = [_ranged("step", step, "duration", timing.source), *run, speed]
    if timing.mfu:
        found.append(_ranged("mfu", _per_step(timing.mfu, step), "percent", timing.source))
    return found


def _per_step(value: float, step_s: Span) -> Span:
    low, expected, high = step_s
    return value * expected / high, value, value * expected / low


def _spent(timing: Spending, source: str, currency: str) -> list[Figure]:
    found = []
    if joules := timing.energy_expected_j:
        span = (timing.energy_low_j or joules, joules, timing.energy_high_j or joules)
        found.append(_ranged("energy", span, "energy", source))
    if money := timing.money():
        low, amount, high = money
        amount_text = Message("value.amount", {"amount": amount, "currency": currency})
        found.append(Figure(Message("figure.cost"), amount_text, source, _ends(low, high, "money")))
    return found


def _ranged(id: str, span: Span, format: str, source: str) -> Figure:
    low, expected, high = span
    return Figure(Message(f"figure.{id}"), Quantity(expected, format), source, _ends(low, high, format))


def _ends(low: float, high: float, format: str) -> Cell:
    ends = {"low": format_value(low, format), "high": format_value(high, format)}
    return Message("value.low_to_high", ends) if ends["low"] != ends["high"] else ""

"""The time of a plan in rows: a step, the whole run, when it ends, what it costs; and of a plan that only evaluates."""

from datetime import datetime, timedelta

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.energy import Prices, Spending
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.predict.timing import NO_TIME
from foretrain.reports.document import Block, Cell, Message, Paragraph, Table
from foretrain.reports.views.shared import uncalibrated

LATEST_S = 3e9  # a run of more than a century has no date


def blocks(plan: Plan, now: datetime | None) -> tuple[Block, ...]:
    """What the step that is meant takes, and the other trainer\'s beside it; or why nobody can say."""
    timing = plan.timing_of(plan.step)
    if timing is None:
        id = "plan.no_time_of_recipe" if plan.of_untimed_recipe else "plan.no_time"
        return (Paragraph(Message(id, {"gpu": plan.gpu.name, "recipe": plan.config.recipe})),)
    rows = _time_rows(plan, timing, now)
    other: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    beside = None if plan.config.eval_only else plan.timing_of(other)
    if beside and timing.source != "measured (log)":
        took = beside.step_s
        id = "row.nanogpt_time" if other == "nanogpt" else "row.foretrain_time"
        rows.append((Message(id), duration(took.low_s, took.expected_s, took.high_s)))
    table = Table((), tuple(rows))
    if timing.source == "estimated":
        return table, Paragraph(uncalibrated(plan))
    return table, Paragraph(Message("source.log" if timing.source.startswith("measured") else "source.calibrated"))


def duration(low: float, expected: float, high: float) -> Message:
    """Seconds as a text, with their range where there is one."""
    if low == high:
        return Message("value.duration", {"expected": expected})
    return Message("value.duration_range", {"low": low, "expected": expected, "high": high})


def _time_rows(plan: Plan, timing: Timing, now: datetime | None) -> list[tuple[Cell, ...]]:
    total = timing.length_s
    rows = [_evaluation_time_row(plan, timing)] if plan.config.eval_only else _step_rows(plan, timing)
    rows.append((Message("row.total_time"), duration(total.low_s, total.expected_s, total.high_s)))
    if now is not None and total.high_s < LATEST_S:
        ends = {name: now + timedelta(seconds=getattr(total, f"{name}_s")) for name in ("low", "expected", "high")}
        rows.append(
            (Message("row.finish"), Message("value.finish", {k: f"{v:%Y-%m-%d %H:%M}" for k, v in ends.items()}))
        )
    return rows + spending_rows(plan.config, plan.gpu, timing)


def _step_rows(plan: Plan, timing: Timing) -> list[tuple[Cell, ...]]:
    step, evaluation = timing.step_s, timing.evaluation_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), duration(step.low_s, step.expected_s, step.high_s)),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.mfu"), _mfu(timing, plan.gpu, plan.dtype)),
    ]
    if plan.compiled and plan.work.steps:
        compiling = timing.compile_s or NO_TIME
        first, own = compiling.plus(step), evaluation.expected_s if evaluation else 0.0
        values = {"low": first.low_s, "expected": first.expected_s, "high": first.high_s}
        logged = {"compile": compiling.expected_s, "logged": first.expected_s + own}
        rows.append((Message("row.first_step"), Message("value.first_step", {**values, **logged})))
    if evaluation is not None:
        rows.append(
            (
                Message("row.evaluations"),
                Message(
                    "value.evaluations",
                    {
                        "count": timing.n_evaluations,
                        "each": evaluation.expected_s,
                        "save": timing.save_s.expected_s if timing.save_s else 0.0,
                    },
                ),
            )
        )
    steps = plan.work.steps
    all_steps = duration(step.low_s * steps, step.expected_s * steps, step.high_s * steps)
    rows.append((Message("row.all_steps", {"steps": steps}), all_steps))
    return rows


def spending_rows(prices: RunConfig | Prices, gpu: Gpu, timing: Spending) -> list[tuple[Cell, ...]]:
    """Energy, electricity or rent, CO2: each where it is known."""
    rows = []
    if timing.power is not None:
        values = {
            "expected": timing.energy_expected_j, "low": timing.energy_low_j, "high": timing.energy_high_j,
            "watts": timing.power.expected_w, "watts_low": timing.power.low_w, "watts_high": timing.power.high_w,
            "board": gpu.board_power_w or 0,
        }  # fmt: skip
        id = "value.energy_cpu" if timing.power.model == "cpu" else "value.energy"
        rows.append((Message("row.energy"), Message(id, values)))
    if timing.cost_expected is not None:
        rows.append(_money_row("electricity", (timing.cost_low, timing.cost_expected, timing.cost_high), prices))
    if timing.rent_expected is not None:
        rows.append(_money_row("rent", (timing.rent_low, timing.rent_expected, timing.rent_high), prices))
    if timing.co2_expected_g is not None:
        values = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
        rows.append((Message("row.co2"), Message("value.co2", {**values, "factor": prices.co2_per_kwh})))
    return rows


def _money_row(id: str, amounts: tuple[float | None, ...], prices: RunConfig | Prices) -> tuple[Cell, ...]:
    values = dict(zip(("low", "expected", "high"), amounts, strict=True))
    values |= {"price_kwh": prices.price_per_kwh, "price_hour": prices.price_per_hour}
    return Message(f"row.{id}"), Message(f"value.{id}", {**values, "currency": prices.currency})


def _mfu(timing: Timing, gpu: Gpu, dtype: str) -> Message:
    """MFU against this card, and what nanoGPT would print for the same speed."""
    values = {"mfu": timing.mfu, "nanogpt": timing.nanogpt_mfu, "rate": timing.flop_per_s, "dtype": dtype}
    peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
    if timing.mfu is None or peak is None:
        return Message("value.mfu_unknown", values)
    return Message("value.mfu_cpu" if gpu.kind == "cpu" else "value.mfu", {**values, "peak": peak})


def _evaluation_time_row(plan: Plan, timing: Timing) -> tuple[Cell, ...]:
    """Seconds of all batches, which the whole run has beside its compilation."""
    took = timing.evaluation_s
    assert took is not None
    values = {"batches": plan.evaluation_batches, "low": took.low_s, "expected": took.expected_s, "high": took.high_s}
    return Message("row.evaluation"), Message("value.evaluation_time", values)

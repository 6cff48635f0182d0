"""The first screen of a fine-tuning plan: does it fit, how fast, what takes the memory, what to change."""

from pathlib import Path
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice
from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.timing import Timing
from foretrain.reports.document import Message, Quantity, Row, Screen
from foretrain.reports.views.advice import change_rows
from foretrain.reports.views.lead import assumed_rows, lead_of, more_rows, title
from foretrain.reports.views.shared import cost_of, grouped

LARGEST = 4  # groups of memory that are named


def screen(plan: FineTunePlan, changes: tuple[Advice, ...], asked: Asked) -> Screen:
    """One plan, a dozen lines."""
    rows = [
        *read_rows(plan),
        *batch_rows(plan),
        _trained(plan),
        *time_rows(plan),
        _memory(plan),
        *change_rows(plan, changes, asked),
    ]
    rows += [*assumed_rows(plan), *more_rows(plan, asked)]
    return Screen(title(plan, asked), tuple(lead_of(plan)), None, tuple(rows))


def read_rows(plan: FineTunePlan) -> list[Row]:
    read = [note.values for note in plan.notes if note.id == "finetune_read_as"]
    shown = [{**values, "where": Path(str(values["where"])).name} for values in read]
    return [Row(Message("finetune.label.read_as"), Message("finetune.read_as", values)) for values in shown]


def bound_rows(plan: FineTunePlan) -> list[Row]:
    if plan.bound == "exact":
        return []
    return [Row(Message("first.label.note"), Message(f"finetune.bound.{plan.bound}", {"keys": plan.bounded_by}))]


def time_unknown(plan: FineTunePlan) -> Message:
    return Message("first.no_time" if plan.bound == "exact" else "finetune.no_time", {"gpu": plan.gpu.name})


def batch_rows(plan: FineTunePlan) -> list[Row]:
    t = plan.tune
    values = {"batch": t.sequences, "seq_len": t.seq_len, "accum": t.grad_accum, "tokens": t.tokens_per_step}
    id = "finetune.batch" if t.grad_accum == 1 else "finetune.batch_accum"
    if t.world > 1:
        id, values = "finetune.batch_cards", values | {"world": t.world}
    rows = [Row(Message("first.label.batch"), Message(id, values))]
    if plan.facts and t.seq_len > plan.facts.max_positions:
        beyond = {"seq_len": t.seq_len, "most": plan.facts.max_positions}
        rows.append(Row(Message("first.label.note"), Message("finetune.beyond_trained", beyond)))
    return rows


def _trained(plan: FineTunePlan) -> Row:
    return Row(Message("finetune.label.trains"), trained_text(plan), short=trained_text(plan, brief=True))


def trained_text(plan: FineTunePlan, *, brief: bool = False) -> Message:
    c, t = plan.counts, plan.tune
    share = c.n_trained / c.n_params
    values: dict[str, Any] = {
        "trained": c.n_trained, "params": c.n_params, "share": share, "dtype": t.dtype, "optim": t.optim,
        "bits": 8 if t.load_in_8bit else 4,
    }  # fmt: skip
    id = "finetune.trained_quantized" if t.quantized else "finetune.trained" if t.adapters else "finetune.trained_all"
    return Message("finetune.trained_short" if brief and t.adapters else id, values)


def time_rows(plan: FineTunePlan) -> list[Row]:
    timing = plan.timing
    if timing is None:
        return [Row(Message("first.label.time"), time_unknown(plan))]
    total = timing.total_s
    rate = Message("finetune.line_speed", {"tokens": timing.tokens_per_s}).text()
    values: dict[str, Any] = {
        "rate": listed([rate, *_shares(plan, timing)]), "step": timing.step_s.expected_s, "steps": timing.steps or 0,
        "tokens": timing.tokens_per_s,
        "total": (total.low_s, total.expected_s, total.high_s) if total else (0.0, 0.0, 0.0),
    }  # fmt: skip
    ids = ("finetune.time", "finetune.time_short") if total else ("finetune.speed", "finetune.speed_short")
    said, brief = (Message(id, values) for id in ids)
    rows = [Row(Message("first.label.time"), said, short=brief)]
    if total:
        rows.append(Row(Message("first.label.cost"), cost_of(timing.prices, timing, plan.gpu, plan.tune.world)))
        if timing.co2_expected_g is not None:
            co2 = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
            factor = {"factor": timing.prices.co2_per_kwh}
            rows.append(Row(Message("row.co2"), Message("value.co2", {**co2, **factor}), optional=2))
    return rows


def _shares(plan: FineTunePlan, timing: Timing) -> list[str]:
    shares = {"mfu": timing.mfu, **({"hfu": timing.hfu} if plan.tune.gradient_checkpointing else {})}
    return [Message(f"finetune.{name}", {"share": share}).text() for name, share in shares.items() if share is not None]


def _memory(plan: FineTunePlan) -> Row:
    parts = sorted(grouped(plan.memory.neediest.components), key=lambda part: -part[1])[:LARGEST]
    named = [f"{Message(f'group.{group}').text()} {Quantity(size, 'bytes').text()}" for group, size in parts]
    return Row(Message("finetune.label.memory"), listed(named), short=listed(named[:2]))


def component(plan: FineTunePlan, id: str) -> Message:
    if id == "gradients":
        return Message("finetune.gradients", {"dtypes": listed(plan.counts.gradient_dtypes)})
    return Message(f"component.{id}")

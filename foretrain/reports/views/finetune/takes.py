"""What a fine-tuning run takes besides memory: batch, weights, time, the shares of the peak, energy and money."""

from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.timing import Timing
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.finetune.screen import batch_rows, time_unknown, trained_text
from foretrain.reports.views.plan_time import duration, spending_rows


def section(plan: FineTunePlan, *more: tuple[Cell, ...]) -> Section:
    """All that the first screen has of it, with ranges. `more`: rows that come first."""
    rows = [*more, *((row.label, row.text) for row in batch_rows(plan))]
    rows.append((Message("finetune.label.trains"), trained_text(plan)))
    if plan.timing is None:
        unknown = Paragraph(Message("first.said", {"text": time_unknown(plan)}))
        return Section(Message("finetune.takes"), (Table((), tuple(rows)), unknown))
    rows += _time_rows(plan.timing)
    if plan.timing.total_s is None:
        return Section(Message("finetune.takes"), (Table((), tuple(rows)), Paragraph(Message("finetune.no_length"))))
    rows += spending_rows(plan.timing.prices, plan.gpu, plan.timing)
    return Section(Message("finetune.takes"), (Table((), tuple(rows)), Paragraph(Message("source.power"))))


def _time_rows(timing: Timing) -> list[tuple[Cell, ...]]:
    step, total = timing.step_s, timing.total_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), duration(step.low_s, step.expected_s, step.high_s)),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.mfu"), _share("finetune.mfu_flops", timing.flops_per_step, timing.mfu)),
        (Message("row.hfu"), _share("finetune.hfu_flops", timing.hardware_flops_per_step, timing.hfu)),
    ]
    if total is not None and timing.steps is not None:
        heading = Message("row.all_steps", {"steps": timing.steps})
        rows.append((heading, duration(total.low_s, total.expected_s, total.high_s)))
    return rows


def _share(id: str, counted: int | None, share: float | None) -> str:
    """FLOPs of a step, and the share of the card's peak that they are in its time."""
    said = [Message(id, {"flops": counted}).text()]
    return listed([Quantity(share, "percent").text(), *said] if share is not None else said)

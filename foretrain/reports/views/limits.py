"""The answers to inverse questions as Documents: what fits in a limit, and the best model for it."""

from foretrain.config.options import RunConfig
from foretrain.predict.plan import Plan
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.plan_time import spending_rows
from foretrain.reports.views.shared import TONES, assumed, uncalibrated


def within(plan: Plan, answer: Within) -> Document:
    """`--within`, `--tokens`: the steps that fit, what they are worth, what else has to change."""
    config = answer.config
    values = {
        "text": answer.limit.text, "steps": answer.steps, "cautious": answer.steps_cautious,
        "optimistic": answer.steps_optimistic, "tokens": answer.tokens, "step": Message(f"step.{answer.step}"),
        "gpu": plan.gpu.name,
    }  # fmt: skip
    exact = answer.steps_cautious == answer.steps == answer.steps_optimistic
    blocks: list[Block] = [Paragraph(Message("within.answer_exact" if exact else "within.answer", values), "good")]
    if not exact:
        blocks.append(Paragraph(Message("within.cautious" if answer.steps_cautious else "within.not_sure", values)))
    if answer.verdict in ("tight", "does_not_fit"):
        blocks.append(Paragraph(Message(f"within.{answer.verdict}", values), TONES[answer.verdict]))
    sections = [
        Section(Message("within.section"), (*blocks, *assumed(plan))),
        Section(Message("within.takes"), (Table((), _rows(plan, answer)), *_source(plan))),
    ]
    if answer.changed:
        rows = tuple(
            (name, _number(getattr(plan.config, name)), _number(getattr(config, name))) for name in answer.changed
        )
        heads = (Message("column.key"), Message("column.now"), Message("column.then"))
        notes: list[Block] = [Table(heads, rows, frozenset({1, 2}))]
        if "lr_decay_iters" in answer.changed:
            notes.append(Paragraph(Message("within.decay"), "warn"))
        if config.decay_lr and plan.config.warmup_iters:
            notes.append(Paragraph(warmup(plan.config, config)))
        sections.append(Section(Message("within.change"), tuple(notes)))
    source = Message("within.source_logged" if _logged(plan) else "plan.source")
    subtitle = Message("within.subtitle", {**values, "source": source})
    return Document(Message("within.title", {"name": plan.name}), subtitle, sections)


def warmup(asked: RunConfig, fitting: RunConfig) -> Message:
    """The warm-up as a share of both runs."""
    values = {
        "warmup": fitting.warmup_iters, "steps": fitting.max_iters, "share": fitting.warmup_iters / fitting.max_iters,
        "asked": asked.warmup_iters, "asked_steps": asked.max_iters,
    }  # fmt: skip
    return Message("within.warmup", values)


def _logged(plan: Plan) -> bool:
    return plan.timing is not None and plan.timing.source.startswith("measured")


def _number(value: int) -> Cell:
    return f"{value:,}"


def _source(plan: Plan) -> tuple[Block, ...]:
    source = Message("source.log") if _logged(plan) else uncalibrated(plan)
    return Paragraph(source), Paragraph(Message("source.power"))


def _rows(plan: Plan, answer: Within) -> tuple[tuple[Cell, ...], ...]:
    timing = answer.timing
    total, step, each = timing.total_s, timing.step_s, timing.evaluation_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.tokens"), Message("value.tokens", {"tokens": answer.tokens, "steps": answer.steps}))
    ]
    if answer.epochs is not None:
        values = {"epochs": answer.epochs, "tokens": plan.work.dataset_tokens}
        rows.append((Message("row.epochs"), Message("value.epochs", values)))
    rows.append((Message("row.step_time"), Quantity(step.expected_s, "duration")))
    rows.append((
        Message("row.evaluations"),
        Message("value.evaluations", {
            "count": timing.n_evaluations, "each": each.expected_s if each else 0.0,
            "save": timing.save_s.expected_s if timing.save_s else 0.0}),
    ))  # fmt: skip
    span = {"low": total.low_s, "expected": total.expected_s, "high": total.high_s}
    rows.append((Message("row.total_time"), Message("value.duration_range", span)))
    return tuple(rows + spending_rows(plan, timing))

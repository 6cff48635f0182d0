"""The answer of --best as a Document: the model, its neighbours, its settings, and what the estimate is worth."""

import math

from foretrain.advice.best import Best, Candidate
from foretrain.config.options import RunConfig
from foretrain.predict.plan import Plan
from foretrain.predict.scaling import PRACTICE, SMALLEST_FITTED, SMALLEST_VOCABULARY
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.plan_time import spending_rows
from foretrain.reports.views.shared import assumed, uncalibrated


def document(plan: Plan, answer: Best) -> Document:
    """The whole answer."""
    winner = answer.candidates[0]
    sections = [
        Section(Message("best.section"), (*_answer(plan, answer, winner), *assumed(plan))),
        Section(Message("best.binds"), tuple(Paragraph(Message(f"bind.{bind}")) for bind in answer.binds)),
        Section(Message("best.candidates"), (_candidates(answer),)),
        Section(Message("best.settings"), (_settings(plan.config, winner.config),)),
        Section(Message("within.takes"), (Table((), _takes(plan, winner)), Paragraph(Message("source.power")))),
        Section(Message("best.ratio"), (_practice(winner), Paragraph(Message("best.ratio_why")))),
        Section(Message("plan.notes"), _notes(plan, answer)),
    ]
    title = Message("best.title", {"gpu": plan.gpu.name, "text": answer.limit.text})
    return Document(title, Message("best.subtitle"), sections)


def _answer(plan: Plan, answer: Best, winner: Candidate) -> tuple[Block, ...]:
    c = winner.config
    values = {
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "params": winner.n_params,
        "tokens": winner.tokens, "ratio": winner.tokens / winner.n_params, "loss": winner.loss,
        "low": winner.loss_low, "high": winner.loss_high, "hours": winner.timing.total_s.expected_s,
        "needed": winner.needed_bytes, "available": plan.available_bytes or 0, "cautious": winner.steps_cautious,
        "steps": winner.steps,
    }  # fmt: skip
    believable = winner.loss < math.log(c.vocab_size)
    id = "best.answer" if believable else "best.answer_no_loss"
    values["blind"] = math.log(c.vocab_size)
    blocks: list[Block] = [Paragraph(Message(id, values), "good" if believable else "warn")]
    if winner.epochs is not None:
        data = {"epochs": winner.epochs, "data": answer.dataset_tokens, "worth": winner.tokens_worth}
        blocks.append(Paragraph(Message("best.epochs", data)))
    else:
        blocks.append(Paragraph(Message("best.no_data"), "warn"))
    if winner.steps_cautious != winner.steps:
        blocks.append(Paragraph(Message("best.cautious" if winner.steps_cautious else "best.not_sure", values)))
    return tuple(blocks)


def _candidates(answer: Best) -> Table:
    rows = tuple(
        (
            f"{c.config.n_layer}/{c.config.n_head}/{c.config.n_embd}",
            Quantity(c.n_params, "count"),
            Quantity(c.tokens, "count"),
            f"{c.tokens / c.n_params:,.0f}",
            "–" if c.epochs is None else f"{c.epochs:,.2f}",
            f"{c.loss:.3f}",
            f"{c.loss_low:.2f} – {c.loss_high:.2f}",
            f"{c.config.batch_size} × {c.config.gradient_accumulation_steps}",
            "+" if c.config.activation_checkpointing else "",
            Quantity(c.needed_bytes, "bytes"),
        )
        for c in answer.candidates
    )
    names = (
        "shape", "params", "tokens", "ratio", "epochs", "est_loss", "between", "batch", "checkpointed", "needed_short"
    )  # fmt: skip
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, rows, frozenset({1, 2, 3, 4, 5, 7, 9}), optional=(8, 9, 4, 6))


def _settings(asked: RunConfig, chosen: RunConfig) -> Table:
    """Every knob that differs from the config that was given."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, str(getattr(asked, name)), str(getattr(chosen, name)))
        for name in RunConfig.model_fields
        if getattr(asked, name) != getattr(chosen, name)
    )
    return Table((Message("column.key"), Message("column.now"), Message("column.then")), rows, frozenset({1, 2}))


def _takes(plan: Plan, winner: Candidate) -> tuple[tuple[Cell, ...], ...]:
    total = winner.timing.total_s
    span = {"low": total.low_s, "expected": total.expected_s, "high": total.high_s}
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), Quantity(winner.timing.step_s.expected_s, "duration")),
        (Message("row.total_time"), Message("value.duration_range", span)),
    ]
    return tuple(rows + spending_rows(plan, winner.timing))


def _practice(winner: Candidate) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (Message("best.section"), f"{winner.tokens / winner.n_params:,.0f}", ""),
        *((p.model, f"{p.tokens / p.n_params:,.0f}", p.source) for p in PRACTICE),
    ]
    heads = (Message("column.model"), Message("column.ratio"), Message("column.source"))
    return Table(heads, tuple(rows), frozenset({1}))


def _notes(plan: Plan, answer: Best) -> tuple[Block, ...]:
    """What the estimate is worth, and those notes of the plan that hold for any model on this card."""
    winner = answer.candidates[0]
    blocks: list[Block] = [Paragraph(Message("best.explained"), "warn")]
    if winner.n_params < SMALLEST_FITTED:
        blocks.append(Paragraph(Message("best.extrapolated"), "warn"))
    if winner.config.vocab_size < SMALLEST_VOCABULARY:
        blocks.append(Paragraph(Message("best.vocabulary", {"vocab_size": winner.config.vocab_size}), "warn"))
    blocks.append(
        Paragraph(Message("best.searched", {"shapes": answer.shapes, "step": Message(f"step.{answer.step}")}))
    )
    kept = ("others_unknown", "bf16_unsupported", "vocab_unaligned", "mps_as_cuda")
    blocks += [Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes if note.id in kept]
    return *blocks, Paragraph(uncalibrated(plan))

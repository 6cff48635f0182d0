"""The answers to inverse questions as Documents: what fits in a limit, and the best model for it."""

import math

from foretrain.advice.best import Best, Candidate
from foretrain.config.options import RunConfig
from foretrain.predict.plan import Plan
from foretrain.predict.scaling import PRACTICE, SMALLEST_FITTED, SMALLEST_VOCABULARY
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.plan import spending_rows
from foretrain.reports.views.shared import TONES, assumed, uncalibrated, warmup


def within(plan: Plan, answer: Within) -> Document:
    """`--within`, `--tokens`: the steps that fit, what they are worth, what else has to change."""
    then = answer.plan
    assert isinstance(then, Plan)
    config = then.config
    values = {
        "text": answer.limit.text, "steps": answer.steps, "cautious": answer.steps_cautious,
        "optimistic": answer.steps_optimistic, "tokens": answer.tokens, "step": Message(f"step.{plan.step}"),
        "gpu": plan.gpu.name,
    }  # fmt: skip
    exact = answer.steps_cautious == answer.steps == answer.steps_optimistic
    blocks: list[Block] = [Paragraph(Message("within.answer_exact" if exact else "within.answer", values), "good")]
    if not exact:
        blocks.append(Paragraph(Message("within.cautious" if answer.steps_cautious else "within.not_sure", values)))
    if plan.verdict not in ("fits", None):
        blocks.append(Paragraph(Message(f"within.{plan.verdict}", values), TONES[plan.verdict]))
    sections = [
        Section(Message("within.section"), (*blocks, *assumed(plan))),
        Section(Message("within.takes"), (Table((), _within_takes(then, answer)), *_source(plan))),
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


def _logged(plan: Plan) -> bool:
    return plan.timing is not None and plan.timing.source.startswith("measured")


def _number(value: int) -> Cell:
    return f"{value:,}"


def _source(plan: Plan) -> tuple[Block, ...]:
    source = Message("source.log") if _logged(plan) else uncalibrated(plan)
    return Paragraph(source), Paragraph(Message("source.power"))


def _within_takes(plan: Plan, answer: Within) -> tuple[tuple[Cell, ...], ...]:
    timing = plan.timing
    assert timing is not None
    total, step, each = timing.length_s, timing.step_s, timing.evaluation_s
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
    return tuple(rows + spending_rows(plan.config, plan.gpu, timing))


# -- the best model for a limit ---------------------------------------------------------------------------


def best(plan: Plan, answer: Best) -> Document:
    """`--best`: the model, its neighbours, its settings, and what the estimate is worth."""
    winner = answer.candidates[0]
    sections = [
        Section(Message("best.section"), (*_answer(plan, answer, winner), *assumed(plan))),
        Section(Message("best.binds"), tuple(Paragraph(Message(f"bind.{bind}")) for bind in answer.binds)),
        Section(Message("best.candidates"), (_candidates(answer),)),
        Section(Message("best.settings"), (_settings(plan.config, winner.config),)),
        Section(Message("within.takes"), (Table((), _best_takes(plan, winner)), Paragraph(Message("source.power")))),
        Section(Message("best.ratio"), (_practice(winner), Paragraph(Message("best.ratio_why")))),
        Section(Message("plan.notes"), _notes(plan, answer)),
    ]
    title = Message("best.title", {"gpu": plan.place, "text": answer.limit.text})
    return Document(title, Message("best.subtitle"), sections)


def _answer(plan: Plan, answer: Best, winner: Candidate) -> tuple[Block, ...]:
    c = winner.config
    values = {
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "params": winner.n_params,
        "tokens": winner.tokens, "ratio": winner.tokens / winner.n_params, "loss": winner.loss,
        "low": winner.loss_low, "high": winner.loss_high, "hours": winner.timing.length_s.expected_s,
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
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, str(getattr(asked, name)), str(getattr(chosen, name)))
        for name in RunConfig.model_fields
        if getattr(asked, name) != getattr(chosen, name)
    )
    return Table((Message("column.key"), Message("column.now"), Message("column.then")), rows, frozenset({1, 2}))


def _best_takes(plan: Plan, winner: Candidate) -> tuple[tuple[Cell, ...], ...]:
    total = winner.timing.length_s
    span = {"low": total.low_s, "expected": total.expected_s, "high": total.high_s}
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), Quantity(winner.timing.step_s.expected_s, "duration")),
        (Message("row.total_time"), Message("value.duration_range", span)),
    ]
    return tuple(rows + spending_rows(plan.config, plan.gpu, winner.timing))


def _practice(winner: Candidate) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (Message("best.section"), f"{winner.tokens / winner.n_params:,.0f}", ""),
        *((p.model, f"{p.tokens / p.n_params:,.0f}", p.source) for p in PRACTICE),
    ]
    heads = (Message("column.model"), Message("column.ratio"), Message("column.source"))
    return Table(heads, tuple(rows), frozenset({1}))


def _notes(plan: Plan, answer: Best) -> tuple[Block, ...]:
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

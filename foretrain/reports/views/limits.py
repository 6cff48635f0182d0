"""The answers to inverse questions: what of a run fits in a limit, the largest value that fits, the best model."""

import math

from foretrain.advice.asked import Asked
from foretrain.advice.best import Best, Candidate
from foretrain.advice.first_answer import finetune_command, within_command
from foretrain.base.messages import listed
from foretrain.base.units import format_bytes
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.scaling import PRACTICE, SMALLEST_FITTED, SMALLEST_VOCABULARY
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.cluster import next_rows
from foretrain.reports.views.finetune import batch_rows
from foretrain.reports.views.lead import assumed_rows, lead_of, name_of, sources_of, title, written
from foretrain.reports.views.shared import assumed, uncalibrated, uneven, verdict_word, within_answer
from foretrain.reports.views.takes import (
    Trained,
    duration,
    one_card,
    speed_source,
    spending_rows,
    takes_rows,
    time_rows,
)


def screen(plan: Trained, found: Within, asked: Asked, searched: Largest | None = None) -> Screen:
    """`--within`, `--tokens`: the steps that fit first. `searched`: with the largest value of an option."""
    then, refused = found.plan, plan.verdict in REFUSED
    lead = [Paragraph(within_answer(found), "plain" if refused else "good"), *lead_of(plan, asked, others=False)]
    if refused:
        lead.reverse()
    if searched is not None and isinstance(plan, FineTunePlan):
        lead.append(Paragraph(largest_value(plan, searched)))
    rows = [*(batch_rows(then) if isinstance(then, FineTunePlan) else [])]
    rows += [Row(Message("finetune.label.data"), text) for text in _epochs(then, found)]
    rows += takes_rows(then, then.timing, steps=found.steps)
    if changed := _changed(plan, found):
        shown = (Message("first.change", {"key": key, "now": now, "then": new}) for key, now, new in changed)
        rows.append(Row(Message("first.label.change"), listed(each.text() for each in shown)))
    rows += [Row(Message("first.label.note"), each) for each in (*_share(plan, found), *_warmup(plan, then))]
    rows += [] if asked.quiet else _next(plan, found, asked)
    rows += assumed_rows(plan)
    rows += [] if asked.quiet else [Row(Message("first.label.more"), Message("first.more_full"), optional=3)]
    return Screen(title(plan, asked), tuple(lead), None, tuple(rows))


def within(plan: Trained, found: Within, searched: Largest | None = None) -> Document:
    """`--within`, `--tokens`: the steps that fit, what they take, what else has to change."""
    then = found.plan
    head: list[Block] = [Paragraph(within_answer(found), "good"), *lead_of(plan), *map(Paragraph, _share(plan, found))]
    if isinstance(plan, FineTunePlan):
        head += [Paragraph(largest_value(plan, searched))] if searched is not None else []
    else:
        step = one_card(plan).step
        head += [Paragraph(Message("within.counts", {"step": Message(f"step.{step}")})), *assumed(one_card(plan))]
    rows: list[tuple[Cell, ...]] = [
        (Message("row.tokens"), Message("value.tokens", {"tokens": found.tokens, "steps": found.steps}))
    ]
    rows += [(Message("row.epochs"), text) for text in _epochs(then, found)]
    assert then.timing is not None
    rows += time_rows(then, then.timing)
    sources = Paragraph(speed_source(then, then.timing)), Paragraph(Message("source.power"))
    sections = [
        Section(Message("within.section"), tuple(head)),
        Section(Message("within.takes"), (Table((), tuple(rows)), *sources)),
    ]
    if changed := _changed(plan, found):
        heads = (Message("column.key"), Message("column.now"), Message("column.then"))
        shown = tuple((key, f"{now:,}", f"{new:,}") for key, now, new in changed)
        notes: list[Block] = [Table(heads, shown, frozenset({1, 2}))]
        notes += [Paragraph(Message("within.decay"), "warn")] if "lr_decay_iters" in found.changed else []
        sections.append(Section(Message("advice.diff"), (*notes, *map(Paragraph, _warmup(plan, then)))))
    subtitle = {"gpu": plan.place, "text": found.limit.text, "source": sources_of(then)}
    return Document(Message("within.title", {"name": name_of(plan)}), Message("within.subtitle", subtitle), sections)


def _changed(plan: Trained, found: Within) -> list[tuple[str, int, int]]:
    """Each option that follows the steps, with its value now and then."""
    if isinstance(plan, FineTunePlan) or isinstance(found.plan, FineTunePlan):
        return []
    return [(key, getattr(plan.config, key), getattr(found.plan.config, key)) for key in found.changed]


def _epochs(then: Trained, found: Within) -> list[Message]:
    if isinstance(then, FineTunePlan):
        values = {"epochs": found.epochs or 0.0, "tokens": then.tune.dataset_tokens}
        return [Message("finetune.epochs" if found.epochs is not None else "finetune.epochs_unknown", values)]
    tokens = one_card(then).work.dataset_tokens
    return [] if found.epochs is None else [Message("value.epochs", {"epochs": found.epochs, "tokens": tokens})]


def _share(plan: Trained, found: Within) -> list[Message]:
    """How much of a fine-tuning run that is, where its length is known."""
    if found.asked_steps is None or not isinstance(plan, FineTunePlan):
        return []
    share = found.steps / found.asked_steps
    id = "finetune.within_whole" if share >= 1 else "finetune.within_part"
    return [Message(id, {"steps": found.asked_steps, "share": share})]


def _warmup(plan: Trained, then: Trained) -> list[Message]:
    if isinstance(plan, FineTunePlan) or isinstance(then, FineTunePlan):
        return []
    asked, fitting = plan.config, then.config
    if not (fitting.decay_lr and asked.warmup_iters):
        return []
    values = {
        "warmup": fitting.warmup_iters, "steps": fitting.max_iters, "share": fitting.warmup_iters / fitting.max_iters,
        "asked": asked.warmup_iters, "asked_steps": asked.max_iters,
    }  # fmt: skip
    return [Message("within.warmup", values)]


def _next(plan: Trained, found: Within, asked: Asked) -> list[Row]:
    label, then = Message("first.label.next"), found.plan
    if isinstance(plan, FineTunePlan):
        if plan.verdict in REFUSED:
            return [Row(label, command=(*finetune_command("advise", asked), *asked.options("advise")))]
        whole = found.asked_steps is not None and found.asked_steps <= found.steps
        return [] if whole else [Row(label, Message("finetune.within_next", {"steps": found.steps}))]
    assert not isinstance(then, FineTunePlan)
    if isinstance(then, ClusterPlan):
        changed = () if asked.wrote else tuple(f"--{name}={getattr(then.config, name)}" for name in found.changed)
        return next_rows(then, asked, changed)
    command = within_command(one_card(plan), then, found.changed, asked)
    return [Row(label, command=command) if command else written(asked)]


# -- the largest value that fits -----------------------------------------------------------------------------


def largest(plan: AnyPlan, found: Largest) -> Document:
    """`--largest`: the value, and what each that was tried needs."""
    traced = found.source == "traced"
    names = ("verdict", "takes", *(("limit",) if traced else ()))
    columns = (found.option, *(Message(f"column.{name}") for name in names))
    rows = tuple(
        (
            f"{probe.value:,}", verdict_word(probe.verdict), Quantity(probe.needed_expected_bytes, "bytes"),
            *((Quantity(probe.smallest_limit_bytes, "bytes"),) if traced else ()),
        )
        for probe in found.probes
    )  # fmt: skip
    step = [Message("report.figures_of", {"step": Message(f"step.{plan.step}")})] if isinstance(plan, Plan) else []
    sizes = found.option == "batch_size" and traced
    blocks: list[Block] = [
        *map(Paragraph, step),
        Paragraph(largest_value(plan, found), "good" if found.value else "bad"),
        Table(columns, rows, frozenset({0, 2, 3} if traced else {0, 2})),
        *(uneven((probe.value, probe.needed_expected_bytes) for probe in found.probes) if sizes else ()),
    ]
    if not isinstance(plan, InferencePlan):  # which no trace is of
        blocks.append(Paragraph(Message("largest.how" if traced else "largest.how_estimated")))
    section = Section(Message("largest.title", {"option": found.option}), tuple(blocks))
    source = Message("plan.source_trace" if traced else "plan.source")
    return Document(Message("plan.title", {"name": name_of(plan)}), source, [section])


def largest_value(plan: AnyPlan, found: Largest) -> Message:
    """The largest value that fits, what it needs, and why the next one does not fit."""
    beyond, room = found.beyond, found.available_bytes
    facts = plan.facts if isinstance(plan, FineTunePlan | InferencePlan) else None
    needed = beyond.needed_expected_bytes if beyond else 0
    values = {
        "option": found.option, "value": found.value, "gpu": plan.gpu.name, "available": room, "beyond": needed,
        "needed": found.found.needed_expected_bytes if found.found else 0, "next": beyond.value if beyond else 0,
        "positions": facts.max_positions if facts else 0,
    }  # fmt: skip
    tight = beyond is not None and (needed <= room or format_bytes(needed) == format_bytes(room))
    if not found.value:
        return Message("largest.none_tight" if tight else "largest.none", values)
    if facts and found.option in ("seq_len", "context") and found.value == facts.max_positions:
        trained = "largest.trained" if beyond and beyond.fits else "largest.trained_all"
        return Message("largest.learned" if facts.positions == "learned" else trained, values)
    if beyond is None:
        return Message("largest.all", values)
    return Message("largest.tight" if tight else "largest.value", values)


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
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), Quantity(winner.timing.step_s.expected_s, "duration")),
        (Message("row.total_time"), duration(winner.timing.length_s)),
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

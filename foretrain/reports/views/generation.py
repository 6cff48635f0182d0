"""A plan of generating text: a dozen lines, one line to paste, and the whole with every formula."""

from typing import Any

from foretrain.advice.asked import QUIET, Asked
from foretrain.advice.record import Advice
from foretrain.base.messages import has, listed
from foretrain.config.inference import USUAL_CONTEXT
from foretrain.predict.inference.plan import FormatFit, InferencePlan, RunnableModels
from foretrain.predict.inference.speed import GenerationTiming
from foretrain.predict.memory import FAILING, Component
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.advice import change_rows, change_text
from foretrain.reports.views.explain import component_of, sums_table
from foretrain.reports.views.lead import lead_of, title
from foretrain.reports.views.shared import Page, card_memory

MODELS = 20  # of a card's table without --full
SHOWN = 3  # formats of the first screen
SHARED = ("inference_layer", "inference_tensor")  # notes that say how cards share the model


def screen(plan: InferencePlan, asked: Asked, changes: tuple[Advice, ...] = ()) -> Screen:
    parts = _memory(plan)
    shared = [note for note in plan.notes if note.id in SHARED]
    rows = [Row(Message("inference.label.cards"), Message(f"note.{note.id}", note.values)) for note in shared]
    rows.append(Row(Message("inference.label.memory"), listed(parts), short=listed(parts[:2])))
    rows += _speed_rows(plan, plan.timing) if plan.timing else [Row(Message("inference.label.speed"), _no_speed(plan))]
    rows += [Row(Message("inference.label.most"), each) for each in most(plan)]
    rows += [Row(Message("first.label.change"), each) for each in _change(plan)]
    fitting = any(each.effect.verdict == "fits" for each in changes)
    rows += change_rows(plan, changes, asked) if fitting or plan.smallest is None else []
    rows += [Row(Message("first.label.note"), note, optional=1) for note in _notes(plan, SHARED)]
    if not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("first.more_full"), optional=2))
    return Screen(
        title(plan, asked),
        tuple(lead_of(plan)),
        None if plan.verdict in FAILING else _formats(plan, SHOWN),
        tuple(rows),
    )


def models(found: RunnableModels, *, full: bool, quiet: bool) -> Screen:
    """The table of models that run on a card, the largest first."""
    shown = found.models if full else found.models[:MODELS]
    rows = tuple((each.model, *_format_cells(each)) for each in shown)
    columns = (Message("inference.column.model"), *COLUMNS)
    fit, context = len(found.models), found.asked.context or USUAL_CONTEXT
    values = {"gpu": found.gpu.name, "context": context, "batch": found.asked.batch, "fit": fit}
    values |= {"left": found.left_out, "hidden": fit - len(shown)}
    notes = [Row(Message("first.label.note"), Message("inference.models.how", values))]
    if found.uncounted:
        others = {"models": ", ".join(found.uncounted)}
        notes.append(Row(Message("first.label.note"), Message("inference.models.uncounted", others)))
    if values["hidden"] and not quiet:
        notes.append(Row(Message("first.label.more"), Message("inference.models.more", values)))
    lead = Paragraph(Message("inference.models.lead", values))
    table = Table(columns, rows, frozenset({2, 3, 4})) if rows else None
    return Screen(Message("inference.models.title", values), (lead,), table, tuple(notes))


def _formats(plan: InferencePlan, most: int) -> Table | None:
    names = [each.weights for each in plan.formats]
    first = names.index(plan.asked.weights) if plan.asked.weights in names else 0

    rows = tuple(_format_cells(each) for each in plan.formats[first : first + most])
    return Table(COLUMNS, rows, frozenset({1, 2, 3})) if len(rows) > 1 else None


COLUMNS = tuple(Message(f"inference.column.{name}") for name in ("weights", "needs", "context", "speed"))


def _format_cells(each: FormatFit) -> tuple[Cell, ...]:
    context, speed = (f"{number:,.0f}" if number else "–" for number in (each.longest_context, each.tokens_per_s))
    return each.weights, Quantity(each.needed_bytes, "bytes"), context, speed


def document(plan: InferencePlan, changes: tuple[Advice, ...] = ()) -> Document:
    parts = sums_table(_components(plan), plan)
    memory = Section(Message("inference.memory"), (parts,))
    formats = _formats(plan, len(plan.formats))
    rows = (Message("inference.label.speed"), Message("inference.value"))
    speeds = Section(Message("inference.speed"), (Table(rows, _speed_table(plan)),)) if plan.timing else None
    blocks = [Paragraph(each) for each in (*most(plan), *_change(plan), *_notes(plan))]
    blocks += [Paragraph(Message("first.said", {"text": change_text(plan, each)})) for each in changes]
    blocks += [Paragraph(Message("inference.how"))] if plan.timing else [Paragraph(_no_speed(plan))]
    sections = [
        Section(Message("finetune.verdict"), (*lead_of(plan), *card_memory(plan.gpu))),
        memory,
        *([speeds] if speeds else []),
        *([Section(Message("inference.formats"), (formats,))] if formats else []),
    ]
    sections.append(Section(Message("finetune.notes"), tuple(blocks)))
    return Document(title(plan, Asked()), Message("finetune.subtitle", {"where": plan.where}), sections)


def page(plan: InferencePlan) -> Page:
    made = document(plan)
    needs = [(Message("first.said", {"text": plan.asked.weights}), plan.memory, plan.verdict)]
    return Page(made, needs, (made.title,), screen=screen(plan, QUIET))


def _memory(plan: InferencePlan) -> list[str]:
    return [
        f"{component_of(plan, each.id).text()} {Quantity(each.size_bytes, 'bytes').text()}"
        for each in _components(plan)
    ]


def _components(plan: InferencePlan) -> tuple[Component, ...]:
    phase = plan.memory.neediest
    overhead = phase.needed_expected_bytes - phase.allocated_bytes
    more = (Component(id="overhead", size_bytes=overhead, formula=""),) if overhead else ()
    return (*phase.components, *more)


def _speed_values(plan: InferencePlan, speed: GenerationTiming) -> dict[str, float | str]:
    return {
        "tokens": speed.tokens_per_s, "low": speed.tokens_per_s_low, "high": speed.tokens_per_s_high,
        "each": speed.tokens_per_s / plan.asked.batch, "batch": plan.asked.batch, "first": speed.first_token_s,
        "prompt": plan.asked.prompt, "prompt_tokens": speed.prompt_tokens_per_s,
        "weights": speed.weights_bytes_per_token, "cache": speed.cache_bytes_per_token,
        "host": speed.host_bytes_per_token,
    }  # fmt: skip


def _speed_rows(plan: InferencePlan, speed: GenerationTiming) -> list[Row]:
    values = _speed_values(plan, speed)
    rate = Message("inference.rate" if plan.asked.batch == 1 else "inference.rate_batch", values)
    rate_text = Message("first.if_fitted", {"text": rate}) if plan.verdict == "does_not_fit" else rate
    return [
        Row(Message("inference.label.speed"), rate_text),
        *(Row(Message("first.label.cost"), each) for each in _cost(plan, speed)),
        Row(Message("inference.label.first"), Message("inference.first", values)),
        Row(Message("first.label.limits"), Message(f"inference.limit.{speed.limited_by}", values)),
    ]


def _speed_table(plan: InferencePlan) -> tuple[tuple[Cell, ...], ...]:
    speed = plan.timing
    assert speed is not None
    values = _speed_values(plan, speed)
    rows = ("rate" if plan.asked.batch == 1 else "rate_batch", "first", "prompt_rate", f"limit.{speed.limited_by}")
    labels = ("speed", "first", "prompt", "limit")
    shown = zip(labels, rows, strict=True)
    speed_rows = [(Message(f"inference.label.{label}"), Message(f"inference.{id}", values)) for label, id in shown]
    return *speed_rows, *((Message("first.label.cost"), each) for each in _cost(plan, speed))


def _cost(plan: InferencePlan, speed: GenerationTiming) -> list[Message]:
    money, prices = speed.money(), speed.prices
    if money is None:
        return []
    each = tuple(amount * 1_000_000 / plan.asked.batch for amount in money)
    values = {"price_hour": prices.price_per_hour, "currency": prices.currency, "count": plan.asked.world}
    id = "inference.cost" if plan.asked.world == 1 else "inference.cost_cards"
    return [Message(id, {"money": (*each, prices.currency), **values})]


def _no_speed(plan: InferencePlan) -> Message:
    return Message("inference.no_speed", {"gpu": plan.gpu.name})


def most(plan: InferencePlan) -> list[Message]:
    """The longest context and the largest batch that fit; none where not even one does."""
    if not plan.longest_context or not plan.largest_batch:
        return []
    values = {
        "context": plan.longest_context, "batch": plan.asked.batch, "batches": plan.largest_batch,
        "asked": plan.asked.context,
    }  # fmt: skip
    whole = plan.longest_context >= plan.facts.max_positions
    return [Message("inference.most_whole" if whole else "inference.most", values)]


def _change(plan: InferencePlan) -> list[Message]:
    if plan.smallest is None:
        return []
    least = plan.smallest
    kind = "card" if least.card else "none" if plan.gpu.kind == "cuda" else "memory"
    if least.card and (plan.asked.world > 1 or plan.used_by_others_bytes):
        kind = "cards" if plan.asked.world > 1 else "card_shared"
    values: dict[str, Any] = {
        "count": plan.asked.world,
        "weights": least.weights,
        "needed": least.needed_bytes,
        "card": least.card,
        "size": least.card_bytes,
    }
    return [Message(f"inference.smallest.{kind}", values)]


def _notes(plan: InferencePlan, without: tuple[str, ...] = ()) -> list[Message]:
    shown_notes = [note for note in plan.notes if note.id not in without and has(f"note.{note.id}")]
    return [Message(f"note.{note.id}", note.values) for note in shown_notes]

"""Several cards beside each other: whether a run of any kind fits each, what it takes there, and which is best."""

from collections.abc import Sequence

from foretrain.advice.asked import Asked
from foretrain.advice.cards import Choice, ComparedCard, ComparedCards
from foretrain.base.messages import listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.finetune import batch_rows, bound_rows
from foretrain.reports.views.lead import assumed_rows, title
from foretrain.reports.views.shared import TONES, assumed, needs_of_free, uncalibrated, verdict_word

MOST_CARDS = 5  # of the first screen; --full has all


def screen(plans: Sequence[AnyPlan], found: ComparedCards, asked: Asked) -> Screen:
    hidden = len(plans) - MOST_CARDS
    rows = [*_run(plans[0]), Row(Message("first.label.best"), _best(found.best))]
    notes = _notes(plans[0], found)
    rows += [Row(Message("first.label.note"), each, optional=1 if number else 0) for number, each in enumerate(notes)]
    chosen = found.best.cheapest or found.best.fastest
    if not asked.quiet:
        rows.append(Row(Message("first.label.next"), command=_next(plans, chosen, asked)))
    rows += assumed_rows(plans[0])
    if hidden > 0:
        rows.append(Row(Message("first.label.more"), Message("first.more_cards", {"count": hidden})))
    elif not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("first.more_full"), optional=3))
    return Screen(_title(plans, asked), (), _table(plans[:MOST_CARDS], found), tuple(rows))


def document(plans: Sequence[AnyPlan], found: ComparedCards) -> Document:
    """Does it fit and where is it highest; time, energy and money; the best of those that fit."""
    first = plans[0]
    memory: list[Block] = [_memory(plans)]
    memory += (
        assumed(first)
        if isinstance(first, Plan)
        else [Paragraph(Message("first.said", {"text": row.text})) for row in _run(first)]
    )
    takes: list[Block] = [_table(plans, found), *map(Paragraph, _notes(first, found)), Paragraph(_best(found.best))]
    takes += [Paragraph(uncalibrated(first))] if isinstance(first, Plan) else []
    takes.append(Paragraph(Message("source.power")))
    sections = [Section(Message("cards.memory"), tuple(memory)), Section(Message("cards.takes"), tuple(takes))]
    return Document(_title(plans, Asked()), Message("cards.subtitle"), sections)


def _title(plans: Sequence[AnyPlan], asked: Asked) -> Message:
    return title(plans[0], asked, where=Message("first.gpus", {"count": len(plans)}))


def _run(plan: AnyPlan) -> list[Row]:
    return [*batch_rows(plan), *bound_rows(plan)] if isinstance(plan, FineTunePlan) else []


def _next(plans: Sequence[AnyPlan], chosen: str | None, asked: Asked) -> tuple[str, ...]:
    """The plan of the best card; where the run fits none, what to change on the largest."""
    plan = max(plans, key=lambda plan: (plan.gpu.name == chosen, plan.available_bytes or 0))
    rent = plan.timing.prices.price_per_hour if plan.timing else None
    command = "advise" if chosen is None else "plan"
    options = asked.model_copy(update={"gpu": plan.gpu.name}).card_options()
    return ("foretrain", command, *asked.words, *options, *asked.options(command, rent))


def _best(choice: Choice) -> Message:
    if choice.fastest is None:
        return Message("cards.none_fits")
    parts = []
    for name in dict.fromkeys(n for n in (choice.fastest, choice.cheapest, choice.least_energy) if n):
        marks = listed(Message(f"first.is.{mark}").text() for mark in choice.marks(name))
        parts.append(Message("first.card_is", {"name": name, "marks": marks}).text())
    return Message("first.said", {"text": " ".join(parts)})


def _notes(plan: AnyPlan, found: ComparedCards) -> list[Message]:
    """What the figures are of, where that is not the whole run, and where prices differ in kind."""
    figures: list[Message] = []
    if found.of != "run" and found.best.fastest is not None:
        figures.append(Message(f"cards.figures.{found.of}", {"text": found.limit.text if found.limit else ""}))
        figures += [Message("finetune.no_length")] if found.of == "million" and isinstance(plan, FineTunePlan) else []
    return [*figures, *([Message("cards.mixed")] if found.best.mixed_prices else [])]


def _memory(plans: Sequence[AnyPlan]) -> Table:
    first = plans[0]
    verdicts = ["verdict"]
    if isinstance(first, Plan):
        foretrain = first.step == "foretrain"
        verdicts = ["verdict", "nanogpt_verdict"] if foretrain else ["nanogpt_verdict", "foretrain_verdict"]
        verdicts.append("dtype")
    names = ("gpu", "memory", "needed_short", "highest_in", *verdicts)
    rows: list[tuple[Cell, ...]] = []
    for plan in plans:
        worst = plan.needs.neediest
        cells = [
            plan.gpu.name,
            Quantity(plan.gpu.memory_bytes, "bytes"),
            Quantity(worst.needed_expected_bytes, "bytes"),
        ]
        cells += [Message(f"phase.{worst.phase}"), verdict_word(plan.verdict)]
        if isinstance(plan, Plan):
            other = plan.verdict_of("nanogpt" if plan.step == "foretrain" else "foretrain")
            cells += [verdict_word(other), plan.dtype]
        rows.append(tuple(cells))
    tones = tuple(TONES[plan.verdict] if plan.verdict in REFUSED else "plain" for plan in plans)
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, tuple(rows), frozenset({1, 2}), tones, optional=(6, 1) if "dtype" in names else (1,))


def _table(plans: Sequence[AnyPlan], found: ComparedCards) -> Table:
    cards = found.cards[: len(plans)]
    amount = "epochs" if any(card.epochs is not None for card in found.cards) else "tokens"
    names = ["gpu", "verdict", "needs_of_free", *([amount] if found.of == "limit" else []), "hours"]
    names += ["mfu", "energy"] if any(plan.timing and plan.timing.mfu for plan in plans) else ["energy"]
    names += ["money_of", *(["co2"] if any(card.co2_g is not None for card in found.cards) else [])]
    heads = tuple(Message(f"column.{name}", {"currency": found.currency}) for name in names)
    rows = tuple(_row(plan, card, found, names) for plan, card in zip(plans, cards, strict=True))
    tones = tuple("plain" if card.verdict == "fits" else TONES[card.verdict] for card in cards)
    optional = tuple(names.index(name) for name in ("mfu", "energy") if name in names)
    return Table(heads, rows, frozenset(range(2, len(names))), tones, optional)


def _row(plan: AnyPlan, card: ComparedCard, found: ComparedCards, names: Sequence[str]) -> tuple[Cell, ...]:
    fits, timing = card.verdict not in REFUSED, plan.timing
    hours = Quantity(card.duration_s if fits else None, "duration")
    if fits and found.of == "run" and timing is not None:
        total = timing.length_s
        hours = Quantity((total.low_s, total.expected_s, total.high_s), "duration_span")
    cells: dict[str, Cell] = {
        "gpu": card.name, "verdict": verdict_word(card.verdict), "hours": hours,
        "needs_of_free": needs_of_free(card.needed_bytes, card.verdict, card.available_bytes),
        "epochs": f"{card.epochs:,.2f}" if fits and card.epochs is not None else "–",
        "tokens": Quantity(card.tokens if fits else None, "count"),
        "mfu": Quantity(timing.mfu if fits and timing else None, "percent"),
        "energy": Quantity(card.energy_j if fits else None, "energy"),
        "money_of": Quantity(card.cost or None if fits else None, "money"),
        "co2": Quantity(card.co2_g if fits else None, "mass"),
    }  # fmt: skip
    return tuple(cells[name] for name in names)

"""What of a fine-tuning run fits in a limit, and the largest value of an option that fits on the card."""

from foretrain.advice.asked import Asked
from foretrain.advice.cards import FineTuneCard, FineTuneCards
from foretrain.base.units import format_bytes
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.largest import Largest
from foretrain.predict.memory import REFUSED
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.finetune import whole
from foretrain.reports.views.finetune.screen import (
    assumed_rows,
    batch_rows,
    bound_rows,
    command_of,
    time_rows,
    title,
    title_of_cards,
    verdict_of,
)
from foretrain.reports.views.shared import TONES, best_cards, needs_of_free, verdict_word, within_answer


def screen(found: Within, asked: Asked, searched: Largest | None = None) -> Screen:
    """`--within`, `--tokens`: what fits first."""
    plan = found.plan
    assert isinstance(plan, FineTunePlan)
    lead = [*_answer(found), verdict_of(plan)]
    if plan.verdict in REFUSED:
        lead.reverse()
    if searched is not None:
        lead.append(Paragraph(largest(plan, searched)))
    rows = [
        *batch_rows(plan),
        Row(Message("finetune.label.data"), _epochs(plan, found)),
        *time_rows(plan),
        *_asked(found),
    ]
    whole = found.asked_steps is not None and found.asked_steps <= found.steps
    if not asked.quiet and not whole and plan.verdict not in REFUSED:
        rows.append(Row(Message("first.label.next"), Message("finetune.within_next", {"steps": found.steps})))
    if not asked.quiet and plan.verdict in REFUSED:
        command = (*command_of("advise", asked), *asked.options("advise"))
        rows.append(Row(Message("first.label.next"), command=command))
    return Screen(title(plan), tuple(lead), None, (*rows, *assumed_rows(plan)))


def _answer(found: Within) -> list[Paragraph]:
    return [Paragraph(within_answer(found), "good" if found.plan.verdict not in REFUSED else "plain")]


def _epochs(plan: FineTunePlan, found: Within) -> Message:
    values = {"epochs": found.epochs or 0.0, "tokens": plan.tune.dataset_tokens}
    return Message("finetune.epochs" if found.epochs is not None else "finetune.epochs_unknown", values)


def _run(found: Within) -> list[Message]:
    if found.asked_steps is None:
        return []
    share = found.steps / found.asked_steps
    id = "finetune.within_whole" if share >= 1 else "finetune.within_part"
    return [Message(id, {"steps": found.asked_steps, "share": share})]


def _asked(found: Within) -> list[Row]:
    return [Row(Message("first.label.note"), each) for each in _run(found)]


def document(found: Within, searched: Largest | None = None) -> Document:
    plan = found.plan
    assert isinstance(plan, FineTunePlan)
    said: list[Block] = [*_answer(found), verdict_of(plan), *(Paragraph(each) for each in _run(found))]
    if searched is not None:
        said.append(Paragraph(largest(plan, searched)))
    tokens = {"tokens": found.tokens, "steps": found.steps}
    rows: tuple[tuple[Cell, ...], ...] = (
        (Message("row.tokens"), Message("value.tokens", tokens)), (Message("row.epochs"), _epochs(plan, found)),
    )  # fmt: skip
    answer = Section(Message("within.section"), tuple(said))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan), where, [answer, *whole.sections(plan, more=rows)])


def largest(plan: FineTunePlan, found: Largest) -> Message:
    beyond, room = found.beyond, found.available_bytes
    needed = beyond.needed_expected_bytes if beyond else 0
    values = {
        "option": found.option, "value": found.value, "gpu": plan.gpu.name, "available": room, "beyond": needed,
        "needed": found.found.needed_expected_bytes if found.found else 0, "next": beyond.value if beyond else 0,
        "positions": plan.facts.max_positions if plan.facts else 0,
    }  # fmt: skip
    tight = beyond is not None and (needed <= room or format_bytes(needed) == format_bytes(room))
    if not found.value:
        return Message("finetune.largest_none_tight" if tight else "finetune.largest_none", values)
    if plan.facts and found.option == "seq_len" and found.value == plan.facts.max_positions:
        trained = "finetune.largest_trained" if beyond and beyond.fits else "finetune.largest_trained_all"
        return Message("finetune.largest_learned" if plan.facts.positions == "learned" else trained, values)
    if beyond is None:
        return Message("finetune.largest_all", values)
    return Message("finetune.largest_tight" if tight else "finetune.largest", values)


MOST_CARDS = 5  # of the first screen; --full has all


def cards_screen(plans: list[FineTunePlan], found: FineTuneCards, asked: Asked) -> Screen:
    hidden = len(found.cards) - MOST_CARDS
    rows = [*batch_rows(plans[0]), Row(Message("first.label.best"), best_cards(found.best))]
    if found.best.fastest is not None:
        rows.append(Row(Message("first.label.note"), _figures(found)))
    if found.best.mixed_prices:
        rows.append(Row(Message("first.label.note"), Message("first.mixed"), optional=1))
    chosen = found.best.cheapest or found.best.fastest
    if not asked.quiet:
        card = chosen or max(found.cards, key=lambda card: card.available_bytes or 0).name
        command = _next("advise" if chosen is None else "plan", card, plans, asked)
        rows.append(Row(Message("first.label.next"), command=command))
    rows += bound_rows(plans[0])
    rows += assumed_rows(plans[0])
    if hidden > 0:
        rows.append(Row(Message("first.label.more"), Message("first.more_cards", {"count": hidden})))
    return Screen(title_of_cards(plans[0], len(plans)), (), _table(found, MOST_CARDS), tuple(rows))


def _next(command: str, card: str, plans: list[FineTunePlan], asked: Asked) -> tuple[str, ...]:
    timing = next(plan.timing for plan in plans if plan.gpu.name == card)
    options = asked.options(command, timing.prices.price_per_hour if timing else None)
    return (*command_of(command, asked.model_copy(update={"gpu": card})), *options)


def cards_document(plans: list[FineTunePlan], found: FineTuneCards) -> Document:
    run = Table(
        (),
        tuple((row.label, row.text) for row in (*batch_rows(plans[0]), *bound_rows(plans[0]), *assumed_rows(plans[0]))),
    )
    said = [_table(found, len(found.cards)), Paragraph(_figures(found)), Paragraph(_best(found)), run]
    if found.best.mixed_prices:
        said.append(Paragraph(Message("cards.mixed"), "warn"))
    said.append(Paragraph(Message("source.power")))
    subtitle = Message("finetune.subtitle", {"where": plans[0].where})
    return Document(
        title_of_cards(plans[0], len(plans)), subtitle, [Section(Message("finetune.verdict"), tuple(said))]
    )  # fmt: skip


def _best(found: FineTuneCards) -> Message:
    return Message("first.said", {"text": best_cards(found.best)})


def _figures(found: FineTuneCards) -> Message:
    return Message(f"finetune.figures.{found.of}", {"text": found.limit.text if found.limit else ""})


def _table(found: FineTuneCards, most: int) -> Table:
    shown = found.cards[:most]
    epochs = any(card.epochs is not None for card in found.cards)
    amount = "epochs" if epochs else "tokens"
    names = ["gpu", "verdict", "needs_of_free", *([amount] if found.of == "limit" else []), "hours", "energy"]
    names += ["money_of", *(["co2"] if any(card.co2_g is not None for card in found.cards) else []), "best"]
    heads = tuple(Message(f"column.{name}", {"currency": found.currency}) for name in names)
    rows = tuple(_card(card, found, names) for card in shown)
    tones = tuple(TONES[card.verdict] for card in shown)
    numeric = frozenset(range(2, len(names) - 1))
    return Table(heads, rows, numeric, tuple("plain" if tone == "good" else tone for tone in tones), (len(names) - 1,))


def _card(card: FineTuneCard, found: FineTuneCards, names: list[str]) -> tuple[Cell, ...]:
    fits = card.verdict not in REFUSED
    needs = needs_of_free(card.needed_bytes, card.verdict, card.available_bytes)
    cells: dict[str, Cell] = {
        "gpu": card.name, "verdict": verdict_word(card.verdict), "needs_of_free": needs,
        "epochs": f"{card.epochs:,.2f}" if fits and card.epochs is not None else "–",
        "tokens": Quantity(card.tokens if fits else None, "count"),
        "hours": Quantity(card.duration_s if fits else None, "duration"),
        "energy": Quantity(card.energy_j if fits else None, "energy"),
        "money_of": Quantity(card.cost if fits else None, "money"),
        "co2": Quantity(card.co2_g if fits else None, "mass"),
        "best": " ".join(Message(f"mark.{mark}").text() for mark in found.best.marks(card.name)),
    }  # fmt: skip
    return tuple(cells[name] for name in names)

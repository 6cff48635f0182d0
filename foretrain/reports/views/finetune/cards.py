"""A fine-tuning run on several cards: what fits, what it takes, and the best of those that fit."""

from foretrain.advice.asked import Asked
from foretrain.advice.cards import FineTuneCard, FineTuneCards
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import REFUSED
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.finetune.screen import assumed_rows, batch_rows, bound_rows, command_of, title_of_cards
from foretrain.reports.views.shared import TONES, best_cards, needs_of_free, verdict_word

MOST_CARDS = 5  # of the first screen; --full has all


def screen(plans: list[FineTunePlan], found: FineTuneCards, asked: Asked) -> Screen:
    """One row for each card, then the best."""
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
    """The command for one card, with its own rent."""
    timing = next(plan.timing for plan in plans if plan.gpu.name == card)
    options = asked.options(command, timing.prices.price_per_hour if timing else None)
    return (*command_of(command, asked.model_copy(update={"gpu": card})), *options)


def document(plans: list[FineTunePlan], found: FineTuneCards) -> Document:
    """All cards."""
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
    """What the figures are of: the whole run, a million tokens, or what fits in a limit."""
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

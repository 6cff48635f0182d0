"""What to change in a fine-tuning run: a row a change, with what planning it says."""

from foretrain.advice.asked import Asked
from foretrain.advice.finetune_advice import AdvisedChange, FineTuneAdvice
from foretrain.predict.memory import REFUSED
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.finetune.screen import (
    MUCH_LONGER,
    assumed_rows,
    change_notes,
    next_row,
    title,
    verdict_of,
    words_of,
)
from foretrain.reports.views.shared import taken_bytes, verdict_word

LINES = 15
LEAST, MOST = 4, 5  # changes of the first screen


def screen(found: FineTuneAdvice, asked: Asked, count: int | None = None) -> Screen:
    """The best changes. `count`: how many were asked for."""
    plan, shown = found.plan, found.top(count or _as_many_as_help(found))
    rows: list[Row] = []
    if shown.advised and shown.advised[0].verdict not in REFUSED and not asked.quiet:
        rows.append(next_row(plan, shown.advised[0], asked))
    if any(change.learns_otherwise for change in shown.advised):
        rows.append(Row(Message("first.label.note"), Message("finetune.learns_otherwise")))
    rows += change_notes(plan, shown.advised)
    if hidden := len(found.advised) - len(shown.advised):
        rows.append(Row(Message("first.label.more"), Message("first.more_cards", {"count": hidden})))
    lead = (verdict_of(plan), *_nothing(found))
    return Screen(title(plan), lead, _table(shown) if shown.advised else None, (*rows, *assumed_rows(plan)), LINES)


def _as_many_as_help(found: FineTuneAdvice) -> int:
    """Those that are enough, and what is not enough alone where few are."""
    return max(LEAST, min(MOST, sum(change.verdict == "fits" for change in found.advised)))


def document(found: FineTuneAdvice, hidden: int) -> Document:
    """All changes, and how to read them."""
    plan = found.plan
    said: list[Block] = [verdict_of(plan), *_nothing(found)]
    if found.advised:
        said += [_table(found), *map(Paragraph, (Message("finetune.learns_otherwise"), Message("finetune.advice_how")))]
    if any(change.traced and change.traced.reason for change in found.advised):
        reason = next(change.traced.reason for change in found.advised if change.traced and change.traced.reason)
        said.append(Paragraph(Message("finetune.advice_untraced", {"reason": reason}), "warn"))
    if hidden:
        said.append(Paragraph(Message("advice.more", {"count": hidden, "all": hidden + len(found.advised)})))
    heading = Message("advice.list")
    return Document(title(plan), Message("finetune.subtitle", {"where": plan.where}), [Section(heading, tuple(said))])


def _nothing(found: FineTuneAdvice) -> tuple[Paragraph, ...]:
    """That nothing helps, where nothing does, or nothing alone."""
    if not found.advised:
        return (Paragraph(Message("advice.nothing" if found.goal == "fit" else "advice.nothing_better"), "warn"),)
    if found.goal == "fit" and not any(change.verdict == "fits" for change in found.advised):
        return (Paragraph(Message("finetune.none_fits_lead"), "warn"),)
    if found.goal == "fit" and all(len(change.ids) > 1 for change in found.advised):
        return (Paragraph(Message("finetune.together")),)
    return ()


def _table(found: FineTuneAdvice) -> Table:
    traced = any(change.traced for change in found.advised)
    fifth = "traced" if traced else "saved" if found.goal == "fit" else ""
    names = ["number", "change", "verdict", "needed", *([fifth] if fifth else []), "time_change"]
    rows = tuple(_row(i, change, fifth) for i, change in enumerate(found.advised, 1))
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, rows, frozenset({3, 4, 5}))


def _row(number: int, change: AdvisedChange, fifth: str) -> tuple[Cell, ...]:
    verdict = change.traced.verdict if change.traced and change.traced.verdict else change.verdict
    cells: dict[str, list[Cell]] = {
        "saved": [Quantity(change.saved_bytes, "bytes")], "": [],
        "traced": [Quantity(change.traced.needed_bytes if change.traced else None, "bytes")],
    }  # fmt: skip
    taken = taken_bytes(change.needed_bytes, verdict, change.available_bytes)
    mark = " *" if change.learns_otherwise else ""
    return (
        f"{number}{mark}", " ".join(words_of(change)), verdict_word(verdict),
        Quantity(taken, "bytes"), *cells[fifth], _longer(change),
    )  # fmt: skip


def _longer(change: AdvisedChange) -> Cell:
    """Of the time of a token; much longer as so many times."""
    if change.longer is not None and change.longer > MUCH_LONGER:
        return Message("value.times", {"factor": 1 + change.longer})
    return Quantity(change.longer, "signed_percent")

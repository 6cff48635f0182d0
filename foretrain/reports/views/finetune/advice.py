"""What to change in fine-tuning or in generating text: a row a change, with what planning it says."""

import shlex
from collections.abc import Sequence
from itertools import count

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice, Advices
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import REFUSED
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Message,
    Paragraph,
    Quantity,
    Row,
    Screen,
    Section,
    Table,
    Verbatim,
)
from foretrain.reports.views import generation
from foretrain.reports.views.advice import detail
from foretrain.reports.views.finetune.screen import (
    MUCH_LONGER,
    assumed_rows,
    change_notes,
    next_row,
    otherwise,
    title,
    verdict_of,
    words_of,
)
from foretrain.reports.views.shared import taken_bytes, verdict_word

LINES = 15
LEAST, MOST = 4, 5  # changes of the first screen


def screen(plan: FineTunePlan | InferencePlan, found: Advices, asked: Asked, most: int | None = None) -> Screen:
    """The best changes. `most`: how many were asked for."""
    changes = found.advised or found.partial
    shown = changes[: most or _as_many_as_help(found)]
    rows: list[Row] = []
    if shown and shown[0].effect.verdict not in REFUSED and not asked.quiet:
        rows.append(next_row(plan, shown[0], asked))
    if any(change.learns_otherwise for change in shown):
        rows.append(Row(Message("first.label.note"), otherwise(plan)))
    rows += change_notes(plan, shown)
    if found.goal == "quality" and shown:
        rows.append(Row(Message("first.label.note"), Message("finetune.better_how")))
    if hidden := len(changes) - len(shown):
        rows.append(Row(Message("first.label.more"), Message("first.more_cards", {"count": hidden})))
    lead = (_verdict(plan), *_nothing(found))
    rows += assumed_rows(plan) if isinstance(plan, FineTunePlan) else []
    return Screen(_title(plan), lead, _table(found, shown) if shown else None, tuple(rows), LINES)


def _title(plan: FineTunePlan | InferencePlan) -> Message:
    return title(plan) if isinstance(plan, FineTunePlan) else generation.title(plan)


def _verdict(plan: FineTunePlan | InferencePlan) -> Paragraph:
    return verdict_of(plan) if isinstance(plan, FineTunePlan) else generation.verdict(plan)


def _as_many_as_help(found: Advices) -> int:
    """Those that are enough, and what is not enough alone where few are."""
    return max(LEAST, min(MOST, len(found.advised)))


def document(plan: FineTunePlan | InferencePlan, found: Advices, hidden: int) -> Document:
    """All changes, and how to read them."""
    changes = found.advised or found.partial
    said: list[Block] = [_verdict(plan), *_nothing(found)]
    if changes:
        said += [_table(found, changes), Paragraph(otherwise(plan))]
        said += [Paragraph(Message("finetune.advice_how"))] if isinstance(plan, FineTunePlan) else []
        said += _sources(found, changes)
    untraced = [each.confirmation.reason for each in changes if each.confirmation and each.confirmation.reason]
    if untraced:
        said.append(Paragraph(Message("finetune.advice_untraced", {"reason": untraced[0]}), "warn"))
    if hidden:
        said.append(Paragraph(Message("advice.more", {"count": hidden, "all": hidden + len(changes)})))
    heading = Message("advice.list")
    return Document(_title(plan), Message("finetune.subtitle", {"where": plan.where}), [Section(heading, tuple(said))])


def one(plan: FineTunePlan | InferencePlan, found: Advices, number: int, asked: Asked) -> Document:
    """Change `number` (from 1) in full, and the whole command of the run with it."""
    change = found.advised[number - 1]
    do = [Verbatim(shlex.join(command(plan, change, asked)))]
    why = [Section(Message("finetune.better_title"), tuple(sources))] if (sources := _sources(found, [change])) else ()
    return detail(found, number, " ".join(words_of(change)), why, do, "finetune.phase")


def _sources(found: Advices, changes: Sequence[Advice]) -> list[Paragraph]:
    """What was published of changes that learn more."""
    return [Paragraph(Message(f"finetune.better.{each.rules[0]}")) for each in changes if found.goal == "quality"]


def command(plan: FineTunePlan | InferencePlan, change: Advice, asked: Asked) -> tuple[str, ...]:
    return next_row(plan, change, asked).command


def _nothing(found: Advices) -> tuple[Paragraph, ...]:
    """That nothing helps, where nothing does, or nothing alone."""
    if found.goal == "quality" and not found.advised:
        return (Paragraph(Message("finetune.better_nothing"), "warn"),)
    if not found.advised and not found.partial:
        return (Paragraph(Message("advice.nothing" if found.goal == "fit" else "advice.nothing_better"), "warn"),)
    if found.partial:
        return (Paragraph(Message("finetune.none_fits_lead"), "warn"),)
    if found.goal == "fit" and all(len(change.rules) > 1 for change in found.advised):
        return (Paragraph(Message("finetune.together")),)
    return ()


def _table(found: Advices, changes: Sequence[Advice]) -> Table:
    traced = any(change.confirmation for change in changes)
    costs = found.goal == "cost" and found.now.total_s
    fifth = "traced" if traced else "saved" if found.goal == "fit" else "sum" if costs else ""
    names = ["number", "change", "verdict", "needed", *([fifth] if fifth else []), "time_change"]
    numbers = ("–" if found.partial else str(number) for number in count(1))
    rows = tuple(_row(number, change, fifth) for number, change in zip(numbers, changes, strict=False))
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, rows, frozenset({3, 4, 5}))


def _row(number: str, change: Advice, fifth: str) -> tuple[Cell, ...]:
    traced, effect = change.confirmation, change.effect
    verdict = traced.verdict if traced and traced.verdict else effect.verdict
    cells: dict[str, list[Cell]] = {
        "saved": [Quantity(effect.saved_bytes, "bytes")], "": [], "sum": [Quantity(effect.money, "money")],
        "traced": [Quantity(traced.needed_bytes if traced else None, "bytes")],
    }  # fmt: skip
    taken = taken_bytes(effect.needed_bytes, verdict, effect.available_bytes)
    mark = " *" if change.learns_otherwise else ""
    return (
        f"{number}{mark}", " ".join(words_of(change)), verdict_word(verdict),
        Quantity(taken, "bytes"), *cells[fifth], _longer(effect.slower),
    )  # fmt: skip


def _longer(slower: float | None) -> Cell:
    """Of the time of a token; much longer as so many times."""
    if slower is not None and slower > MUCH_LONGER:
        return Message("value.times", {"factor": 1 + slower})
    return Quantity(slower, "signed_percent")

"""The first screen of `advise`: where the run stands, what fits, and the command that comes next. Fifteen lines."""

from dataclasses import replace

from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import changed_command, is_one_command
from foretrain.advice.record import Advice, Advices
from foretrain.predict.plan import Plan
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Row, Screen, Table
from foretrain.reports.views import first as first_view
from foretrain.reports.views.advice import EXACTNESS_ID, document, one, short
from foretrain.reports.views.shared import taken_bytes, verdict_word

__all__ = ["document", "one", "screen"]
LINES = 15
LEAST, MOST = 3, 5  # changes; what is not enough alone fills up where few are
ROOM, WIDE = 8, 24  # lines for them, and about how many columns one has for its name
COMMAND = 68  # columns of a line of the command
ASSUMED = 2  # lines of what had to be guessed, which always stand there


def screen(plan: Plan, found: Advices, asked: Asked, count: int | None = None) -> Screen:
    """The best changes. `count`: how many were asked for."""
    advised = found.advised[: count or MOST]
    partial = found.partial[: max(0, LEAST - len(advised))]
    following = _next(plan, found, asked)
    if count is None:
        taken = ASSUMED * bool(plan.assumptions) + bool(plan.used_by_others_bytes) + _more_lines(following)
        advised = _that_fit_the_screen(plan, advised, ROOM - taken)
    values = {
        "name": found.name, "gpu": plan.gpu.name, "goal": Message(f"goal.{found.goal}"),
        "sources": first_view.sources_of(plan, found.trainer),
    }  # fmt: skip
    lead = first_view.lead_of(plan, asked)[:1]
    if not advised:
        lead.append(Paragraph(Message("advice.nothing" if found.nothing_fits else "advice.nothing_better"), "warn"))
    rows = [] if asked.quiet else [*following, *_more(len(found.advised) - len(advised), advised)]
    optional = 0 if plan.assumptions else 1
    assumed = [replace(row, optional=optional) for row in first_view.assumed_rows(plan, found.trainer)]
    table = _table(plan, found, advised, partial) if advised or partial else None
    return Screen(Message("advice.screen_title", values), tuple(lead), table, (*rows, *assumed), LINES)


def _more_lines(following: list[Row]) -> int:
    return sum(len(" ".join(row.command)) // COMMAND for row in following)


def _that_fit_the_screen(plan: Plan, advised: tuple[Advice, ...], room: int) -> tuple[Advice, ...]:
    lines = [1 + len(short(plan, advice)) // WIDE for advice in advised]
    while len(lines) > 1 and sum(lines) > room:
        lines.pop()
    return advised[: len(lines)]


def _table(plan: Plan, found: Advices, advised: tuple[Advice, ...], partial: tuple[Advice, ...]) -> Table:
    last = {"quality": "estimate", "speed": "run_change", "cost": "sum"}.get(found.goal, "step_change")
    names = ("number", "change", "verdict", "needed", last, "learning")
    numbered = [*((str(number), advice) for number, advice in enumerate(advised, 1)), *(("–", a) for a in partial)]
    rows = tuple(_row(plan, number, advice, last) for number, advice in numbered)
    tones = tuple("plain" if number != "–" else "warn" for number, _ in numbered)
    numeric = frozenset({3} if last == "estimate" else {3, 4})
    return Table(tuple(Message(f"column.{name}") for name in names), rows, numeric, tones)


def _row(plan: Plan, number: str, advice: Advice, last: str) -> tuple[Cell, ...]:
    effect, estimate = advice.effect, advice.estimate
    traced = advice.confirmation
    verdict = traced.verdict if traced else effect.verdict
    needed = traced.needed_bytes if traced and traced.needed_bytes else effect.needed_bytes
    taken = taken_bytes(needed, verdict, effect.available_bytes)
    cells: dict[str, Cell] = {
        "step_change": Quantity(effect.slower, "signed_percent"),
        "run_change": Quantity(effect.longer, "signed_percent"),
        "sum": Quantity(effect.money, "money"), "estimate": Message("advice.unestimated"),
    }  # fmt: skip
    if estimate is not None:
        cells["estimate"] = Message("advice.estimated", {"then": estimate.loss_then, "now": estimate.loss_now})
    return (
        number, short(plan, advice), verdict_word(verdict), Quantity(taken, "bytes"),
        cells[last], Message(f"exactness.{EXACTNESS_ID[advice.exactness]}"),
    )  # fmt: skip


def _next(plan: Plan, found: Advices, asked: Asked) -> list[Row]:
    if not found.advised:
        return []
    first = found.advised[0]
    if is_one_command(plan, first):
        command = changed_command(plan, first, asked)
    else:
        command = ("foretrain", "advise", *asked.words, *asked.card_options(), "--apply", "1")
    return [Row(Message("first.label.next"), command=command)]


def _more(hidden: int, advised: tuple[Advice, ...]) -> list[Row]:
    if not advised:
        return [Row(Message("first.label.more"), Message("first.more_full"), optional=3)]
    id = "advice.screen_more" if hidden else "advice.screen_all"
    return [Row(Message("first.label.more"), Message(id, {"count": hidden}), optional=3)]

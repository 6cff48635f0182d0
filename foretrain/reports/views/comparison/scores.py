"""What `foretrain eval` found of several runs, as the section of a comparison."""

from collections.abc import Sequence

from foretrain.comparison.compare import Score
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.evaluation.scores import UNKNOWN

_LABEL = 18
MOST_ROWS = 20  # tasks of many parts have hundreds; --json has them all


def sections(found: Sequence[Score], labels: Sequence[str]) -> list[Section]:
    """One row a measurement, one column a run; nothing where none was evaluated."""
    if not found:
        return []
    heads = tuple(label if len(label) <= _LABEL else label[: _LABEL - 1] + "…" for label in labels)
    columns = (Message("column.quantity"), *heads, Message("column.best"))
    table = Table(columns, tuple(map(_row, found[:MOST_ROWS])), frozenset(range(1, len(labels) + 1)))
    more = [Paragraph(Message("scores.more", {"count": len(found) - MOST_ROWS}))] if len(found) > MOST_ROWS else []
    return [Section(Message("scores.section"), (table, *more, Paragraph(Message("scores.noise"))))]


def _row(score: Score) -> tuple[Cell, ...]:
    said: Cell = {"difference": score.best or UNKNOWN, "within_noise": Message("scores.within_noise")}.get(
        score.outcome, score.best or UNKNOWN
    )
    return _name(score), *map(_value, score.values, score.standard_errors), said


def _name(score: Score) -> Cell:
    if score.metric == "bits_per_byte" and not score.filter:
        return Message("scores.bits_of", {"text": score.name})
    filter = "" if score.filter in ("", "none") else f" ({score.filter})"
    return f"{score.name} {score.metric}{filter}"


def _value(value: float | None, error: float | None) -> Cell:
    if value is None or error is None:
        return Quantity(value, "digits4")
    return Message("scores.plus_minus", {"value": value, "error": error})

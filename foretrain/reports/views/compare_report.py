"""The report of a comparison as a Document: what follows, in sentences, then what differs, with pictures."""

from collections.abc import Sequence

from foretrain.analysis.forecast_check import Row, Sources
from foretrain.comparison.compare import Comparison, Side
from foretrain.comparison.loss_axes import LossCurves
from foretrain.reports.document import (
    Axis,
    Block,
    Document,
    Message,
    Paragraph,
    Rank,
    Ranks,
    Section,
)
from foretrain.reports.views import agreement as agreement_view
from foretrain.reports.views import compare as compare_view
from foretrain.reports.views import curves as curves_view

NAMED = ("speed", "tokens", "hours", "memory")  # questions whose answers stand at the top
Checks = Sequence[tuple[str, Sequence[Row]]]


def document(
    found: Comparison,
    losses: LossCurves,
    verdicts: dict[str, str | None],
    checks: Checks = (),
    sources: Sources | None = None,
) -> Document:
    """The comparison with pictures. `verdicts`: does it fit, by label, where memory was predicted. `checks`: of the
    runs among the subjects, predicted against measured."""
    plain = compare_view.document(found)
    by_id = {section.title.id: section for section in plain.sections}
    sections = [Section(Message("side.verdicts"), (*_answers(found), *by_id["side.verdicts"].blocks))]
    sections.append(by_id["side.settings"])
    order = tuple(side.label for side in found.sides)
    curves = curves_view.losses(losses, source="report.source_losses_many", order=order)
    if curves:
        sections.append(Section(Message("report.learning"), curves))
    pictures = (*_speed(found.sides), *_memory(found.sides, verdicts))
    sections.append(Section(Message("side.figures"), (*pictures, *by_id["side.figures"].blocks)))
    agreement = agreement_view.pictures(checks, sources) if checks and sources else ()
    if agreement:
        sections.append(Section(Message("report.check"), agreement))
    if "side.settle" in by_id:
        sections.append(by_id["side.settle"])
    labels = ", ".join(side.label for side in found.sides)
    return Document(Message("report.compare_title", {"labels": labels}), Message("side.subtitle"), sections)


def _answers(found: Comparison) -> tuple[Block, ...]:
    """The questions that have an answer beyond noise, in a sentence each; or that none has."""
    said = [
        Paragraph(
            compare_view.brief(verdict, verdict.pair),
            "good" if verdict.outcome == "difference" and not verdict.unlike_models else "plain",
        )
        for verdict in found.verdicts
        if verdict.pair and verdict.outcome in ("difference", "forecast") and verdict.question in NAMED
    ]  # fmt: skip
    return tuple(said) or (Paragraph(Message("report.no_difference")),)


def _speed(sides: tuple[Side, ...]) -> tuple[Block, ...]:
    ranks = tuple(
        Rank(
            side.label, side.tokens_per_s, *_rates(side), said=side.speed_source or "", strong=_measured(side),
            colour=number,
        )
        for number, side in enumerate(sides)
        if side.tokens_per_s
    )  # fmt: skip
    if len(ranks) < 2:
        return ()
    axis = Axis(Message("axis.speed"), "number")
    return (Ranks(Message("picture.compared_speed"), axis, ranks, Message("column.source"), source=_ranges()),)


def _ranges() -> Message:
    return Message("report.source_ranges")


def _measured(side: Side) -> bool:
    return bool(side.speed_source and side.speed_source.startswith("measured"))


def _rates(side: Side) -> tuple[float | None, float | None]:
    """The range of tokens/s that the range of step times is."""
    if not (side.step_s and side.tokens_per_s and side.step_low_s and side.step_high_s):
        return None, None
    return side.tokens_per_s * side.step_s / side.step_high_s, side.tokens_per_s * side.step_s / side.step_low_s


def _memory(sides: tuple[Side, ...], verdicts: dict[str, str | None]) -> tuple[Block, ...]:
    ranks = []
    for number, side in enumerate(sides):
        if side.memory_bytes is None:
            continue
        verdict = verdicts.get(side.label)
        said = " · ".join(
            part
            for part in (side.memory_source or "", Message(f"word.{verdict}").text() if verdict else "")
            if part
        )  # fmt: skip
        ranged = side.memory_low_bytes != side.memory_high_bytes
        low, high = (side.memory_low_bytes, side.memory_high_bytes) if ranged else (None, None)
        strong = side.memory_source == "measured"
        ranks.append(Rank(side.label, side.memory_bytes, low, high, said, strong=strong, colour=number))
    if len(ranks) < 2:
        return ()
    axis = Axis(Message("axis.memory_bytes"), "bytes")
    title = Message("picture.compared_memory")
    return (Ranks(title, axis, tuple(ranks), Message("column.source"), source=_ranges()),)

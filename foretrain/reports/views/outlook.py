"""Pictures of what a plan has beyond its own figures: roofline, throughput against memory, other cards."""

from collections.abc import Iterable

from foretrain.advice.outlook import CardOption, Frontier, FrontierPoint, Outlook
from foretrain.base.messages import has
from foretrain.predict.plan import Plan
from foretrain.predict.speed.limit import Roofline, RooflinePoint
from foretrain.reports.document import (
    Axis,
    Block,
    Cell,
    Cloud,
    Dot,
    Level,
    Message,
    Paragraph,
    Quantity,
    Rank,
    Ranks,
    Scatter,
    Section,
    Table,
    cell_text,
)
from foretrain.reports.views.memory import moments_picture
from foretrain.reports.views.shared import TONES, uneven

NAMED_SHARE = 0.04  # of the step's time: operations that are named in the picture


def sections(plan: Plan, found: Outlook) -> list[Section]:
    made: list[Section] = []
    if found.moments is not None:
        made.append(Section(Message("report.one_step"), moments_picture(plan, found.moments)))
    if found.roofline is not None and found.roofline.points:
        made.append(Section(Message("report.roof"), _roofline(plan, found.roofline)))
    if found.frontier is not None and len(found.frontier.points) > 1:
        made.append(Section(Message("report.trade"), _frontier(found.frontier)))
    if len(found.cards) > 1:
        made.append(Section(Message("report.others"), _cards(plan, found)))
    return made


# -- roofline ----------------------------------------------------------------------------------------------


def _roofline(plan: Plan, found: Roofline) -> tuple[Block, ...]:
    parts = tuple(dict.fromkeys(point.part for point in found.points))
    clouds = tuple(
        Cloud(Message(f"part.{part}"), tuple(_operation(p) for p in found.points if p.part == part), number)
        for number, part in enumerate(parts)
    )
    ridge, peak = found.ridge_flops_per_byte, found.peak_flop_per_s
    intensities = [point.flops_per_byte for point in found.points]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    roof = ((low, low * found.bandwidth_bytes_per_s), (ridge, peak), (high, peak))
    matmuls = 1 - found.other_share
    values = {
        "peak": peak, "bandwidth": found.bandwidth_bytes_per_s / 1e9, "ridge": ridge, "other": found.other_share,
        "matmuls": matmuls, "gpu": plan.gpu.name, "dtype": plan.dtype,
    }  # fmt: skip
    picture = Scatter(
        Message("picture.roofline"), Axis(Message("axis.intensity"), "number", True),
        Axis(Message("axis.flop_rate"), "rate", True), clouds, ((Message("report.roof_line", values), roof),),
        note_label=Message("column.time_share"), source=Message("report.source_roofline", {"source": found.source}),
    )  # fmt: skip
    means: tuple[Block, ...] = (Paragraph(Message("report.roof_means", values)),)
    if any(point.flop_per_s > peak for point in found.points):
        means += (Paragraph(Message("report.above_roof")),)
    return *means, picture


def _operation(point: RooflinePoint) -> Dot:
    what = Message(f"operation.{point.name}") if has(f"operation.{point.name}") else point.name
    id = f"operation_of.{point.kind}"
    label = Message(id if has(id) else "operation_of.matmul", {"what": what})
    return Dot(
        label, point.flops_per_byte, point.flop_per_s, note=Quantity(point.share, "percent"), size=point.share,
        strong=point.share >= NAMED_SHARE,
    )  # fmt: skip


# -- throughput against memory -----------------------------------------------------------------------------


def _frontier(found: Frontier) -> tuple[Block, ...]:
    ways = tuple(dict.fromkeys(point.way for point in found.points))
    clouds = tuple(
        Cloud(Message(f"way.{way}"), tuple(_way(p) for p in found.points if p.way == way), number)
        for number, way in enumerate(ways)
    )
    best = tuple((float(p.needed_bytes), p.tokens_per_s) for p in found.points if p.best)
    line = ((Message("report.frontier_line"), best),) if len(best) > 1 else ()
    levels: tuple[Level, ...] = ()
    room = found.available_bytes
    if room is not None and room < 4 * max(p.needed_bytes for p in found.points):
        levels = (Level(Message("axis.limit"), room, "x"),)
    picture = Scatter(
        Message("picture.frontier"), Axis(Message("axis.needed"), "bytes"), Axis(Message("axis.speed"), "number"),
        clouds,
        line, levels=levels, note_label=Message("column.verdict"),
        source=Message("report.source_frontier", {"source": found.source}),
    )  # fmt: skip
    return (*_trade(found), *_uneven(found, ways), picture)


def _uneven(found: Frontier, ways: Iterable[str]) -> tuple[Block, ...]:
    lines = ([(p.batch_size, p.needed_bytes) for p in found.points if p.way == way and not p.setting] for way in ways)
    return next((blocks for line in lines if (blocks := uneven(line))), ())


def _way(point: FrontierPoint) -> Dot:
    values = {"batch": point.batch_size}
    label = point.setting or Message("report.frontier_own" if point.given else "report.frontier_point", values)
    note: Cell = Message(f"word.{point.verdict}") if point.verdict else ""
    return Dot(label, point.needed_bytes, point.tokens_per_s, note=note, strong=point.given)


def _trade(found: Frontier) -> tuple[Block, ...]:
    fits = [p for p in found.points if p.verdict in ("fits", None)]
    own = next((p for p in found.points if p.given), None)
    if own is None or not fits:
        return (Paragraph(Message("report.trade_none"), "warn"),) if not fits else ()
    best = max(fits, key=lambda p: p.tokens_per_s)
    values = {
        "own": own.tokens_per_s, "best": best.tokens_per_s, "batch": best.batch_size, "way": Message(f"way.{best.way}"),
        "needed": best.needed_bytes, "gain": best.tokens_per_s / own.tokens_per_s - 1,
    }  # fmt: skip
    own_fits = own in fits
    if own_fits and best.tokens_per_s <= 1.02 * own.tokens_per_s:
        return (Paragraph(Message("report.trade_own", values)),)
    return (Paragraph(Message("report.trade_best" if own_fits else "report.trade_instead", values)),)


# -- cards ---------------------------------------------------------------------------------------------------


def _cards(plan: Plan, found: Outlook) -> tuple[Block, ...]:
    options = found.cards
    shown = [option for option in options if option.usual or option.own]
    ranks = tuple(
        Rank(
            Message("report.own_card", {"name": option.name}) if option.own else option.name, option.total_s.expected_s,
            option.total_s.low_s, option.total_s.high_s, _word(option), TONES[option.verdict], option.own,
        )
        for option in shown
    )  # fmt: skip
    spread = max(rank.value for rank in ranks) > 30 * min(rank.value for rank in ranks)
    axis = Axis(Message("axis.run_time"), "duration", spread)
    columns = tuple(
        Message(f"column.{name}", {"currency": plan.config.currency})
        for name in ("gpu", "memory", "needed_short", "verdict", "hours", "energy", "cost", "dtype")
    )
    rows = tuple(_card_row(option) for option in options)
    tones = tuple("strong" if option.own else "plain" for option in options)
    table = Table(columns, rows, frozenset({1, 2, 4, 5, 6}), tones, (7, 6, 1))
    beside = plan.used_by_others_bytes and plan.gpu.kind == "cuda"
    counts = {"count": len(options), "step": Message(f"step.{found.step}"), "others": plan.used_by_others_bytes}
    source = Message("report.source_cards_beside" if beside else "report.source_cards", counts)
    verdict_label = Message("column.verdict")
    return (Ranks(Message("picture.cards"), axis, ranks, verdict_label, source=source, numbers=table),)


def _word(option: CardOption) -> Cell:
    return Message(f"word.{option.verdict}") if option.verdict else ""


def _card_row(option: CardOption) -> tuple[Cell, ...]:
    return (
        option.name, Quantity(option.memory_bytes, "bytes"), Quantity(option.needed_bytes, "bytes"),
        cell_text(_word(option)) or "–", Quantity(option.total_s.expected_s, "duration"),
        Quantity(option.energy_j, "energy"), Quantity(option.cost, "money"), option.dtype,
    )  # fmt: skip

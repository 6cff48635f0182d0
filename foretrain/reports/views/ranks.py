"""The ranks of a run: who they are, what each measured beside the forecast, who is slow."""

from foretrain.analysis.forecast_check import RankPart, RanksExplained
from foretrain.base.messages import listed
from foretrain.config.sharing import STRATEGIES
from foretrain.reports.document import Block, Cell, Message, Paragraph, Quantity, Section, Table
from foretrain.training.place import SLOW

MOST_ROWS = 16

HIGHEST = {"reserved": "highest_reserved", "process": "highest_process"}


def sections(found: RanksExplained | None, source: str) -> list[Section]:
    """`source`: of the forecast. None of a run that one rank has always trained."""
    if found is None:
        return []
    blocks: list[Block] = list(headline(found))
    if found.world > 1:
        blocks += _forecast(found, source)
        blocks += _table(found)
        blocks += _slow(found)
    return [Section(Message("ranks.section"), tuple(blocks))]


def headline(found: RanksExplained) -> tuple[Paragraph, ...]:
    said: list[Paragraph] = []
    if found.world > 1:
        values = {
            "world": found.world, "strategy": Message(f"cluster.strategy.{found.strategy}"),
            "tokens_per_s": found.tokens_per_s, "per_card": found.card_tokens_per_s, "machines": found.machines,
        }  # fmt: skip
        id = "untimed" if found.tokens_per_s is None else "on_cards" if found.card_tokens_per_s else "on_cpu"
        said.append(Paragraph(Message(f"ranks.{id}", values)))
    if found.stretches:
        each = [Message("ranks.stretch", {"world": s.world, "step": s.first_step}).text() for s in found.stretches]
        said.append(Paragraph(Message("ranks.history", {"stretches": listed(each)})))
    return tuple(said)


def _forecast(found: RanksExplained, source: str) -> list[Block]:
    values = {
        "source": source, "allocated": found.predicted_allocated_bytes, "expected": found.predicted_bytes,
        "low": found.low_bytes, "high": found.high_bytes, "what": Message(f"ranks.what.{found.what}"),
    }  # fmt: skip
    blocks: list[Block] = [Paragraph(Message("ranks.forecast", values))]
    most = next((part for part in found.parts if part.rank == found.most), None)
    if most is not None and most.highest_bytes:
        inside = found.low_bytes <= most.highest_bytes <= found.high_bytes
        error = found.predicted_bytes / most.highest_bytes - 1
        values |= {"rank": most.rank, "measured": most.highest_bytes, "error": error}
        id, tone = ("ranks.most_inside", "plain") if inside else ("ranks.most_outside", "warn")
        blocks.append(Paragraph(Message(id, values), tone))
    if found.predicted_tokens_per_s is not None:
        blocks.append(Paragraph(Message("ranks.predicted_speed", {"predicted": found.predicted_tokens_per_s})))
    elif found.card_tokens_per_s is None:
        blocks.append(Paragraph(Message("ranks.no_predicted_speed")))
    return blocks


def _table(found: RanksExplained) -> list[Block]:
    if not found.parts:
        return [Paragraph(Message("ranks.no_figures"))]
    first = sorted(found.parts, key=lambda part: (part.rank != found.most, part.rank not in found.slow, part.rank))
    shown = sorted(first[:MOST_ROWS], key=lambda part: part.rank)
    rows = tuple(_row(part) for part in shown)
    names = ("rank", "where", "allocated", HIGHEST[found.what], "step", "waits", "evaluates")
    columns = tuple(Message(f"ranks.column.{name}") for name in names)
    tones = tuple("warn" if part.rank in found.slow else "plain" for part in shown)
    table = Table(columns, rows, frozenset({0, 2, 3, 4, 5, 6}), tones, optional=(5, 1))
    hidden = len(found.parts) - len(shown)
    return [table, *([Paragraph(Message("ranks.more", {"count": hidden}))] if hidden else [])]


def _row(part: RankPart) -> tuple[Cell, ...]:
    rate = part.evaluates_tokens_per_s
    return (
        str(part.rank), f"{part.host} · {part.card}", Quantity(part.allocated_bytes, "bytes"),
        Quantity(part.highest_bytes, "bytes"), Quantity(part.step_s, "duration"),
        Quantity(part.data_wait_s, "duration"), f"{rate:,.0f}" if rate else "–",
    )  # fmt: skip


def _slow(found: RanksExplained) -> list[Block]:
    if not found.parts:
        return []
    if STRATEGIES[found.strategy].shards_weights:
        return [Paragraph(Message("ranks.all_wait", {"strategy": Message(f"cluster.strategy.{found.strategy}")}))]
    if not found.told:
        return [Paragraph(Message("ranks.too_short"))]
    slow = [part for part in found.parts if part.behind is not None]
    if not slow:
        return [Paragraph(Message("ranks.even", {"share": SLOW}))]
    return [Paragraph(Message("ranks.slow", part.model_dump()), "warn") for part in slow]

"""Lines of parts: which of them are left out where a line is too long, columns of equal width, and bars."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

GAP = 2
LEAST_BAR, MOST_BAR = 5, 60
FULL, EMPTY = "█", "░"
SECOND = "▒"  # of a bar with two parts, also where there are no colours


@dataclass(frozen=True)
class Part:
    """A piece of a line. `order`: the highest is left out first where the line is too long; 0 never. `right`: at the
    right end of its column. `share`: it is a bar, filled so far."""

    text: str
    style: str = ""
    order: int = 0
    right: bool = False
    share: float | None = None


def joined(parts: Sequence[Part], width: int) -> Text:
    """The parts one after the other, in no more than `width` columns."""
    kept = [part for part in parts if part.text]
    while _length(kept) > width and (last := max(kept, key=lambda part: part.order, default=None)) and last.order:
        kept.remove(last)
    line = Text(" " * GAP).join(Text(part.text, style=part.style) for part in kept)
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def _length(parts: Sequence[Part]) -> int:
    return sum(cell_len(part.text) for part in parts) + GAP * max(0, len(parts) - 1)


def columns(rows: Sequence[Sequence[Part]], width: int) -> list[Text]:
    """A line a row, the parts of a column as wide as its widest; a bar takes what is left."""
    count = max(map(len, rows), default=0)
    full = [[*row, *[Part("")] * (count - len(row))] for row in rows]
    kept = [i for i in range(count) if any(row[i].text or row[i].share is not None for row in full)]
    while True:
        wide = {i: max(cell_len(row[i].text) for row in full) for i in kept}
        bars = [i for i in kept if any(row[i].share is not None for row in full)]
        taken = sum(wide.values()) + GAP * (len(kept) - 1)
        room = (width - taken) // len(bars) if bars else 0
        if bars and room < LEAST_BAR:
            kept = [i for i in kept if i not in bars]
        elif taken > width and (order := max(max(row[i].order for row in full) for i in kept)):
            kept = [i for i in kept if max(row[i].order for row in full) < order]
        else:
            break
    wide |= dict.fromkeys(bars, min(room, MOST_BAR))
    return [_row([row[i] for i in kept], [wide[i] for i in kept], width) for row in full]


def _row(parts: Sequence[Part], wide: Sequence[int], width: int) -> Text:
    cells = []
    for part, room in zip(parts, wide, strict=True):
        text = Text(part.text, style=part.style)
        if part.share is not None:
            text = bar([(part.share, part.style)], 1.0, room)
        blanks = " " * max(0, room - text.cell_len)
        cells.append(Text(blanks).append_text(text) if part.right else text.append(blanks))
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def bar(shares: Sequence[tuple[float, str]], whole: float, width: int) -> Text:
    """One bar of parts (size, style), the rest of it empty."""
    drawn, edge, at = Text(), 0.0, 0
    for number, (size, style) in enumerate(shares):
        edge += size
        end = min(width, max(at, round(edge / whole * width)))
        drawn.append((FULL if number == 0 else SECOND) * (end - at), style=style)
        at = end
    return drawn.append(EMPTY * (width - at), style="dim")

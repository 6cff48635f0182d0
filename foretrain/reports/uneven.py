"""Why memory falls where a micro-batch grows, said wherever two such sizes stand side by side."""

from collections.abc import Iterable
from itertools import pairwise

from foretrain.reports.document import Message, Paragraph


def uneven(points: Iterable[tuple[int, int | None]]) -> tuple[Paragraph, ...]:
    """One sentence where a larger micro-batch needs less than a smaller one, else nothing.

    `points`: (batch_size, bytes) of settings that differ in nothing else that takes memory.
    """
    known = sorted({(size, needed) for size, needed in points if needed is not None})
    falls = any(small < large and after < before for (small, before), (large, after) in pairwise(known))
    return (Paragraph(Message("largest.uneven")),) if falls else ()

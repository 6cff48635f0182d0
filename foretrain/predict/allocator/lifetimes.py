"""What a program asks of the allocator, in its order: when each storage is born and when it dies. No torch.

The estimate (predict/timeline.py), the trace (predict/trace/record.py) and a recorded snapshot (predict/snapshot/) all
make lifetimes; replay.py runs them through the allocator. An event is a number: `id` is the birth of a storage, `~id`
(negative) its death. So forty thousand events are one small list.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Streams from here on: n * GRAPH_POOL + s is what a CUDA graph recorded on stream s takes for the n-th pool of its own.
GRAPH_POOL = 1 << 16


class Mark(NamedTuple):
    """From this position of the events on, this is the phase (or the moment of the step)."""

    position: int
    name: str


class Label(NamedTuple):
    """Where an event belongs: the moment of the step, the op and the module; '' where nobody knows."""

    moment: str = ""
    op: str = ""
    module: str = ""


class Lifetimes:
    """Births and deaths of storages in program order.

    `sizes`: bytes by id. `phases`: marks; a phase may come again. `streams`: of storages that are not on the default
    stream, 0, or are in a pool of graphs (GRAPH_POOL); `used_on`: other streams that use them (Tensor.record_stream).
    Both by id. `emptied`: positions of events (and of marks) before which the cache is emptied.
    """

    def __init__(
        self,
        events: Sequence[int] = (),
        sizes: Sequence[int] = (),
        phases: Sequence[Mark] = (),
        streams: dict[int, int] | None = None,
        used_on: dict[int, tuple[int, ...]] | None = None,
        emptied: Sequence[int] = (),
    ) -> None:
        self.events, self.sizes, self.phases = events, sizes, phases
        self.streams = {} if streams is None else streams
        self.used_on = {} if used_on is None else used_on
        self.emptied = frozenset(emptied)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(phase, position of its first event, position after its last) in order.

        What comes before the first mark is of the phase ''.
        """
        marks = list(self.phases)
        if not marks or marks[0].position > 0:
            marks.insert(0, Mark(0, ""))
        ends = [mark.position for mark in marks[1:]] + [len(self.events)]
        for mark, end in zip(marks, ends, strict=True):
            yield mark.name, mark.position, end

    def phase_at(self, position: int) -> str:
        return name_at(self.phases, position)

    def label(self, position: int) -> Label:
        return Label()


def name_at(marks: Sequence[Mark], position: int) -> str:
    """The name that holds at a position; '' before the first mark."""
    index = bisect_right(marks, position, key=lambda mark: mark.position) - 1
    return marks[index].name if index >= 0 else ""

"""The micro-batches that a trace leaves out, until the allocator's state repeats: requests are as in the third, but one
that found room there may find none in the fifth. No torch."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from foretrain.predict.allocator.blocks import Lifetimes, Mark
from foretrain.predict.allocator.replay import Player
from foretrain.predict.trace.record import Allocation, Trace

STEPS = ("first_step", "steady_step")


class _Span(NamedTuple):
    start: int
    end: int


def with_all_micro_batches(trace: Trace, traced: int, wanted: int, starts: Sequence[int] = ()) -> Trace:
    """Return the trace with all micro-batches per step, each begun in `starts` or where its batch is made; unchanged
    where a micro-batch does not leave what it found."""
    spans = _last_micro_batches(trace, traced, starts) if wanted > traced >= 3 else []
    if not spans:
        return trace
    return _Writer(trace, spans, wanted - traced).write()


def _last_micro_batches(trace: Trace, traced: int, starts: Sequence[int]) -> list[_Span]:
    """Return of each step the micro-batch before the last one: the last whose end is seen."""
    begins = starts or [a.allocated_at for a in trace.allocations if a.category == "batch"]
    found = []
    for phase, start, end in trace.spans():
        here = begins[bisect_left(begins, start) : bisect_left(begins, end)]
        if phase in STEPS and here and len(here) % traced == 0:
            firsts = here[:: len(here) // traced]
            found.append(_Span(firsts[-2], firsts[-1]))
    return found


class _Writer:
    def __init__(self, trace: Trace, spans: list[_Span], times: int) -> None:
        self.trace, self.times = trace, times
        self.repeated_at = {span.end: span for span in spans}
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.kept: list[Allocation] = []  # of the new events, with positions to be set
        self.now: dict[int, int] = {}  # an allocation's number in the trace -> its present number
        self.emptied: list[int] = []
        self.made = Lifetimes(self.events, self.sizes)
        self.player = Player(self.made)

    def write(self) -> Trace:
        trace = self.trace
        moved: list[int] = []  # events before each of the trace's, and at its end
        marks: list[Mark] = []
        for position in range(len(trace.events) + 1):
            span = self.repeated_at.get(position)
            if span is not None:
                marks += self._repeat(span)
            moved.append(len(self.events))
            self._empty(position)
            if position < len(trace.events):
                self._write(trace.events[position])
        phases = [Mark(moved[mark.position], mark.name) for mark in trace.phases]
        moments = [*(Mark(moved[mark.position], mark.name) for mark in trace.moments), *marks]
        moments.sort(key=lambda mark: mark.position)
        return Trace(self.events, self._allocations(), phases, moments, trace.facts, self.emptied)

    def _empty(self, position: int) -> None:
        if position in self.trace.emptied:
            self.emptied.append(len(self.events))
            self.player.allocator.empty_cache()

    def _write(self, event: int) -> None:
        if event >= 0:
            number = len(self.kept)
            allocation = self.trace.allocations[event]
            self.kept.append(allocation)
            self.now[event] = number
            self.sizes.append(allocation.nbytes)
            self.made.streams[number], self.made.used_on[number] = allocation.stream, allocation.used_on
            self.events.append(number)
        else:
            self.events.append(~self.now[~event])
        self.player.play(self.events[-1])

    def _repeat(self, span: _Span) -> list[Mark]:
        events = self.trace.events[span.start : span.end]
        allocated = {event for event in events if event >= 0}
        freed = {~event for event in events if event < 0}
        found, left = sorted(freed - allocated), sorted(allocated - freed)
        nbytes = lambda ids: [self.trace.allocations[id].nbytes for id in ids]  # noqa: E731
        if nbytes(found) != nbytes(left):
            return []
        moments = [mark for mark in self.trace.moments if span.start <= mark.position < span.end]
        first = Mark(span.start, self.trace.moment_at(span.start))
        marks = []
        seen, wanted, done = {self._layout(left): 0}, self.times, 0
        while done < wanted:
            start = len(self.events)
            self.now.update({old: self.now[heir] for old, heir in zip(found, left, strict=True)})
            marks += [Mark(start + mark.position - span.start, mark.name) for mark in [first, *moments]]
            for position, event in enumerate(events, span.start):
                self._empty(position)
                self._write(event)
            done += 1
            earlier = seen.setdefault(self._layout(left), done)
            if earlier < done:  # layouts alternate from here on, so the last one is known
                wanted, seen = done + (wanted - done) % (done - earlier), {}
        return [*marks, Mark(len(self.events), self.trace.moment_at(span.end))]

    def _layout(self, left: list[int]) -> tuple[object, ...]:
        """Return all that decides where the next request goes: free blocks, and places that it will free."""
        held = tuple(block.ptr if (block := self.player.blocks[self.now[id]]) else 0 for id in left)
        allocator = self.player.allocator
        return (held, tuple(allocator.small.order), tuple(allocator.large.order))

    def _allocations(self) -> list[Allocation]:
        allocated_at = {event: position for position, event in enumerate(self.events) if event >= 0}
        freed_at = {~event: position for position, event in enumerate(self.events) if event < 0}
        return [
            a._replace(id=id, allocated_at=allocated_at[id], freed_at=freed_at.get(id))
            for id, a in enumerate(self.kept)
        ]

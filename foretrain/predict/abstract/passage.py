"""The events of a pass, recorded from at most four layers of a kind and unrolled to all of them. No torch. Where two
layers of a kind differ, the pass is run with all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from foretrain.predict.abstract.dims import Dim, factors
from foretrain.predict.timeline import Passage, Timeline

MOST = 4  # layers of one kind that are run: the first, two alike, the last
OUTSIDE = -1  # the layer of what is in none


Factors = tuple[Any, ...]  # (coefficient, letters …)


class Allocated(NamedTuple):
    component: str
    item_bytes: int
    shape: tuple[int, ...]
    factors: Factors | None

    def sized(self, together: bool) -> Factors:
        return self.factors or factors(self.item_bytes, self.shape, together)


class Event(NamedTuple):
    """`serial`: an allocation's, or its complement (~) for its end. `layer`: the one that ran."""

    serial: int
    layer: int
    moment: str

    @property
    def tensor(self) -> int:
        return self.serial if self.serial >= 0 else ~self.serial


class Recorder:
    def __init__(self, symbols: dict[str, int]) -> None:
        self.symbols = symbols
        self.allocated: list[Allocated] = []
        self.events: list[Event] = []
        self.home: list[int] = []  # the layer that made each
        self.layer = OUTSIDE
        self.moment = "forward.embedding"
        self.ended = False  # later ends are not part of the pass
        # (events before it, gradient, its component until then) where a gradient becomes .grad
        self.taken: list[tuple[int, int, str]] = []
        self.split = 0  # the first event of the backward pass
        self.given = 0  # so many events at first are allocations from before
        self.streams: dict[int, int] = {}  # of allocations off the default one
        self.kernels: list[Any] = []  # kernels.py
        self.timed: list[tuple[int, tuple[int, ...]]] = []  # kernels that are timed at their first run (compiled)
        self.matmuls: list[tuple[tuple[int, ...], int]] = []  # matmuls of a compiled graph: sizes, bytes an element

    def allocate(
        self,
        component: str,
        item_bytes: int,
        shape: tuple[int, ...],
        factors: Factors | None = None,
        *,
        ours: bool = True,
    ) -> int:
        """Return the serial number of a new storage; `ours`: it belongs to the layer that runs."""
        serial = len(self.allocated)
        self.allocated.append(Allocated(component, item_bytes, shape, factors))
        self.events.append(Event(serial, self.layer, self.moment))
        self.home.append(self.layer if ours else OUTSIDE)
        return serial

    def free(self, serial: int) -> None:
        """Order storages that end together by age, as Python's versions differ, without effect on the allocator."""
        if self.ended:
            return
        event, at = Event(~serial, self.layer, self.moment), len(self.events)
        if at and self.events[-1].serial < event.serial:
            least = max(self.split, *(place[0] for place in (*self.taken[-1:], *self.timed[-1:])), 0)
            while at > least and (before := self.events[at - 1]).serial < event.serial and before[1:] == event[1:]:
                at -= 1
        self.events.insert(at, event)

    @property
    def any_size(self) -> bool:
        return all(isinstance(d, Dim) or d == 1 for each in self.allocated for d in each.shape)

    def take(self, serial: int) -> None:
        self.taken.append((len(self.events), serial, self.allocated[serial].component))
        self.allocated[serial] = self.allocated[serial]._replace(component="gradients")

    def later(self) -> "Recorder":
        """Return the same pass of a later micro-batch: gradients are added to existing ones, and end."""
        found = Recorder(self.symbols)
        found.allocated, found.home, found.split = list(self.allocated), self.home, self.split
        places = [position for position, *_ in self.taken]
        found.timed = [(at + sum(place <= at for place in places), changed) for at, changed in self.timed]
        found.matmuls = self.matmuls
        before = 0
        for position, serial, component in self.taken:
            found.allocated[serial] = found.allocated[serial]._replace(component=component)
            found.events += [*self.events[before:position], self.events[position - 1]._replace(serial=~serial)]
            before = position
        found.events += self.events[before:]
        return found


class Uneven(Exception):
    """Two layers of a kind differ; the pass has to be run with all of them."""


def copies_of(groups: Sequence[int], run: Sequence[int]) -> list[range]:
    copies: list[range] = []
    first = 0
    for count, ran in zip(groups, run, strict=True):
        if ran == count:
            copies += [range(first + i, first + i + 1) for i in range(count)]
        else:
            assert ran == MOST
            copies += [
                range(first, first + 1), range(first + 1, first + count - 2),
                range(first + count - 2, first + count - 1), range(first + count - 1, first + count),
            ]  # fmt: skip
        first += count
    return copies


class _Unroller:
    def __init__(self, recorder: Recorder, groups: Sequence[int], run: Sequence[int]) -> None:
        self.r = recorder
        self.copies = copies_of(groups, run)
        self.repeated = {i for i, copies in enumerate(self.copies) if len(copies) > 1}
        self.place: list[int] = []  # of each allocation among those of its layer
        counts: Counter[int] = Counter()
        for home in recorder.home:
            self.place.append(counts[home])
            counts[home] += 1

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (layer, first event, event after the last) of ranges of one layer, running or whose tensors end."""
        r = self.r
        found: list[tuple[int, int, int]] = []
        last = OUTSIDE  # the layer that ended just now
        for i, event in enumerate(r.events):
            own = layer = event.layer
            if layer == OUTSIDE and event.serial < 0:
                # A layer's inputs end when its result gets the name, between two layers.
                home = r.home[event.tensor]
                own = last if last != OUTSIDE and home in (last - 1, last) else home
            last = layer if layer != OUTSIDE else last if own == last else OUTSIDE
            if found and found[-1][0] == own:
                found[-1] = (own, found[-1][1], i + 1)
            else:
                found.append((own, i, i + 1))
        return found

    def order(self) -> list[tuple[int, int, int, int]]:
        """Return (layer of all, layer that was run, first event, event after the last) for ranges of the whole pass."""
        runs, found, i = self.runs(), [], 0
        while i < len(runs):
            layer, start, end = runs[i]
            if layer not in self.repeated:
                found.append((self.copies[layer][0] if layer != OUTSIDE else OUTSIDE, layer, start, end))
            else:
                neighbour = [runs[j][0] for j in (i - 1, i + 1) if 0 <= j < len(runs)]
                if layer - 1 not in neighbour or layer + 1 not in neighbour:
                    raise Uneven
                copies = self.copies[layer]
                upwards = i + 1 < len(runs) and runs[i + 1][0] == layer + 1
                other = next(r for r in (runs[i + 1], runs[i - 1]) if r[0] == layer + 1)
                self._compare(layer, (start, end), other)
                found += [(each, layer, start, end) for each in (copies if upwards else reversed(copies))]
            i += 1
        return found

    def _compare(self, layer: int, own: tuple[int, int], other: tuple[int, int, int]) -> None:
        if self._shape(layer, *own) != self._shape(layer + 1, *other[1:]):
            raise Uneven

    def _shape(self, layer: int, start: int, end: int) -> list[Any]:
        r, found = self.r, []
        for event in r.events[start:end]:
            home = r.home[event.tensor]
            if home == OUTSIDE:
                raise Uneven
            found.append((event.serial >= 0, home - layer, self.place[event.tensor], *r.allocated[event.tensor]))
        return found

    def unrolled(self) -> tuple[list[int], list[int], list[int]]:
        """Return (events, each allocation's recorded one, each event's recorded one)."""
        r = self.r
        serials: dict[tuple[int, int], int] = {}  # (layer of all, place) -> serial
        events: list[int] = []
        allocated: list[int] = []
        origin: list[int] = []
        made = [(event.serial >= 0, serial := event.tensor, r.home[serial], self.place[serial]) for event in r.events]
        for whole, small, start, end in self.order():
            for allocates, serial, home, place in made[start:end]:
                if home in (small, OUTSIDE):
                    layer = OUTSIDE if home == OUTSIDE else whole
                else:
                    layer = self.copies[home][0] if small == OUTSIDE else whole + home - small
                if allocates:
                    serials[layer, place] = len(allocated)
                    events.append(len(allocated))
                    allocated.append(serial)
                else:
                    events.append(~serials[layer, place])
            origin += range(start, end)
        return events, allocated, origin


class Structure(NamedTuple):
    """A pass for any sizes: events, components and factors of tensors, moments, split; the first `given` were there."""

    events: list[int]
    kinds: list[tuple[str, Factors]]
    moments: list[str]
    split: int
    any_size: bool  # whether all sizes follow from letters
    timed: list[tuple[int, tuple[int, ...]]]  # (event before it, allocations that are changed) of timed kernels
    matmuls: list[tuple[tuple[int, ...], int]]  # matmuls: (m, k, n, batch …), bytes an element
    given: int = 0
    streams: Mapping[int, int] = MappingProxyType({})  # of allocations off the default one

    def sized(self, timeline: Timeline) -> Passage:
        distinct = {id(kind): kind for kind in self.kinds}
        known = {at: (kind[0], timeline.size(*kind[1])) for at, kind in distinct.items()}
        kinds = [known[id(kind)] for kind in self.kinds]
        return Passage(self.events, kinds, self.moments, self.split, self.given, self.streams)


def unroll(recorder: Recorder, groups: Sequence[int], run: Sequence[int]) -> Structure:
    """Return the whole pass. Raises Uneven where layers of one kind differ."""
    events, allocated, origin = _Unroller(recorder, groups, run).unrolled()
    s = recorder.symbols
    together = s["H"] * s["D"] == s["C"]
    known = {n: (recorder.allocated[n].component, recorder.allocated[n].sized(together)) for n in set(allocated)}
    moments = [recorder.events[i].moment for i in origin]
    given, on = sum(i < recorder.given for i in origin), recorder.streams
    return Structure(
        events[given:],
        [known[serial] for serial in allocated],
        moments[given:],
        sum(i < recorder.split for i in origin) - given,
        recorder.any_size,
        [(at - given, changed) for at, changed in recorder.timed],
        recorder.matmuls,
        given,
        {n: on[serial] for n, serial in enumerate(allocated) if serial in on} if on else {},
    )

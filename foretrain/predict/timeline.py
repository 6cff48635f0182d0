"""A timeline of allocations: what is alive at the peak of each phase, by component, with its formula."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from foretrain.predict.allocator.blocks import Lifetimes, Mark


class Size(NamedTuple):
    """Bytes of one tensor with the formula that they follow from, such as '8·B·T·C'."""

    formula: str
    nbytes: int


class Kind:
    """What tensors have in common: the component they count for, and their size. `count` of them are alive."""

    __slots__ = ("component", "count", "size")

    def __init__(self, component: str, size: Size) -> None:
        self.component, self.size, self.count = component, size, 0

    def __repr__(self) -> str:
        return f"Kind({self.component!r}, {self.size!r})"


class Tensor(NamedTuple):
    """One allocation. `serial` is its place in the timeline's `sizes`."""

    kind: Kind
    serial: int

    @property
    def component(self) -> str:
        return self.kind.component

    @property
    def size(self) -> Size:
        return self.kind.size


class Peak(NamedTuple):
    """The highest moment of a phase: bytes, the moment's id, and how many tensors of each kind were alive."""

    nbytes: int
    moment: str
    alive: dict[Kind, int]


@dataclass
class Part:
    """A stretch of a passage, and its kinds `alive` at its highest moment and after (`change`)."""

    events: list[int]
    first: int  # of its allocations
    allocated_count: int
    top_bytes: int
    moment: str
    alive: dict[tuple[str, Size], int]
    change: dict[tuple[str, Size], int]
    change_bytes: int


@dataclass
class Passage:
    """A pass with serial numbers of its own, each event with its moment. It ends the first `given`, from before it; its
    second part begins at `split`."""

    events: list[int]
    kinds: list[tuple[str, Size]]
    moments: list[str]
    split: int
    given: int = 0
    streams: Mapping[int, int] = field(default_factory=dict)  # of allocations that are not on the default one

    @cached_property
    def left(self) -> list[int]:
        """Return allocations that outlive it."""
        ended = {~event for event in self.events if event < 0}
        return [serial for serial in range(len(self.kinds)) if serial not in ended]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        numbers: dict[tuple[str, Size], int] = {}
        of = {at: numbers.setdefault(kind, len(numbers)) for at, kind in {id(k): k for k in self.kinds}.items()}
        number, distinct = [of[id(kind)] for kind in self.kinds], list(numbers)
        nbytes = [size.nbytes for _, size in self.kinds]
        parts, first = [], self.given
        for start, end in ((0, self.split), (self.split, len(self.events))):
            own = self.events[start:end]
            running = list(accumulate([nbytes[e] if e >= 0 else -nbytes[~e] for e in own]))
            top = max(running, default=0)
            at = running.index(top) if running else 0
            allocated = [number[e] for e in own if e >= 0]
            alive, change = (_balance(some, number, distinct) for some in (own[: at + 1], own))
            moment, rest = (self.moments[start + at], running[-1]) if own else ("", 0)
            parts.append(Part(own, first, len(allocated), top, moment, alive, change, rest))
            first += len(allocated)
        return tuple(parts)

    def without(self, component: str, count: int) -> "Passage":
        """The same where the first so many of a component that live on were there before."""
        gone = set([serial for serial in self.left if self.kinds[serial][0] == component][:count]) if count else ()
        if not gone:
            return self
        kept = [i for i, event in enumerate(self.events) if event not in gone]
        number, numbers = 0, []
        for serial in range(len(self.kinds)):
            numbers.append(number)
            number += serial not in gone
        return Passage(
            [numbers[e] if e >= 0 else ~numbers[~e] for e in map(self.events.__getitem__, kept)],
            [kind for serial, kind in enumerate(self.kinds) if serial not in gone],
            [self.moments[i] for i in kept], sum(i < self.split for i in kept), self.given,
            {numbers[n]: on for n, on in self.streams.items()},
        )  # fmt: skip


def _balance(
    events: Sequence[int], number: Sequence[int], kinds: Sequence[tuple[str, Size]]
) -> dict[tuple[str, Size], int]:
    """Return how many more there are of each kind, by its number."""
    counts = Counter([number[e] for e in events if e >= 0])
    counts.subtract(Counter([number[~e] for e in events if e < 0]))
    return {kinds[each]: count for each, count in counts.items() if count}


class Timeline(Lifetimes):
    """Running total of live tensors. `granule`: sizes round up to it (512 in PyTorch's CUDA allocator, else 1)."""

    events: list[int]
    sizes: list[int]
    phases: list[Mark]

    def __init__(self, symbols: dict[str, int], granule: int) -> None:
        super().__init__([], [], [])
        self.symbols = symbols
        self.granule = granule
        self._kinds: dict[tuple[str, Size], Kind] = {}
        self.nbytes = 0
        self._living: dict[int, Tensor] = {}
        self.moment = ""
        self.stream = 0  # later allocations are on this one
        self._peaks: dict[str, Peak] = {}
        self._phase = ""
        self._top_bytes = -1  # the phase's highest moment so far
        self._top_moment = ""
        self._climbing = False  # whether that moment is now, so that what is alive has not been noted yet
        self._sizes: dict[tuple[int | float | str, ...], Size] = {}

    def size(self, coefficient: int | float, *factors: str) -> Size:
        """The size `coefficient`·factors, each factor a symbol: size(8, "B", "T", "C"); of halves a whole number."""
        key = (coefficient, *factors)
        known = self._sizes.get(key)
        if known is None:
            nbytes = math.ceil(coefficient * math.prod(self.symbols[f] for f in factors))  # half of a head may be one
            nbytes = self.rounded(nbytes)
            known = self._sizes[key] = Size("·".join([str(coefficient), *factors]), nbytes)
        return known

    def rounded(self, nbytes: int) -> int:
        """What the allocator gives for so many bytes."""
        return -(-nbytes // self.granule) * self.granule

    def use(self, symbols: dict[str, int]) -> None:
        """Go on with other symbols, as evaluation does with its own micro-batch."""
        if symbols != self.symbols:
            self.symbols = dict(symbols)
            self._sizes.clear()

    def phase(self, name: str) -> None:
        """Start a phase; its peak counts from what is alive now. A phase may be entered again."""
        self._settle()
        self._phase = name
        self.phases.append(Mark(len(self.events), name))
        self._top_bytes = self._peaks[name].nbytes if name in self._peaks else -1
        self._note()

    def packed(self) -> Lifetimes:
        """The lifetimes without what counts them: they take a tenth of the memory, and are kept."""
        return Lifetimes(array("i", self.events), self.sizes, self.phases, self.streams, emptied=self.emptied)

    @property
    def peaks(self) -> dict[str, Peak]:
        self._settle()
        return self._peaks

    def empty_cache(self) -> None:
        self.emptied |= {len(self.events)}

    def at(self, moment: str) -> None:
        """Name what happens from here on, for the peak's description."""
        self.moment = moment

    def alloc(self, component: str, size: Size) -> Tensor:
        kind, serial, nbytes = self._kind(component, size), len(self.sizes), size.nbytes
        kind.count += 1
        self.nbytes += nbytes
        self.sizes.append(nbytes)
        self.events.append(serial)
        if self.stream:
            self.streams[serial] = self.stream
        if self.nbytes > self._top_bytes:
            self._top_bytes, self._top_moment, self._climbing = self.nbytes, self.moment, True
        tensor = self._living[serial] = Tensor(kind, serial)
        return tensor

    def alloc_all(self, component: str, size: Size, parts: Iterable[int]) -> None:
        """Tensors that stay, shown as one: `size` is what `parts`, their bytes as allocated, sum up to."""
        self._kind(component, size).count += 1
        self.nbytes += size.nbytes
        for nbytes in parts:
            self.events.append(len(self.sizes))
            self.sizes.append(nbytes)
        self._note()

    def free(self, *tensors: Tensor | None) -> None:
        if self._climbing:
            self._settle()
        for tensor in tensors:
            if tensor is not None:
                kind, serial = tensor
                kind.count -= 1
                self.nbytes -= kind.size.nbytes
                self.events.append(~serial)
                del self._living[serial]

    def play(self, passage: Passage, number: int, before: int = 0, given: Sequence[Tensor] = ()) -> int:
        """Play a part of a passage; return what to add to its serials. `before`: that of the part before this one."""
        part, kinds = passage.parts[number], passage.kinds
        if self._climbing:
            self._settle()
        if self.nbytes + part.top_bytes > self._top_bytes and part.events:
            self._top_bytes, self._top_moment = self.nbytes + part.top_bytes, part.moment
            alive = {kind: kind.count for kind in self.living()}
            for (component, size), count in part.alive.items():
                kind = self._kind(component, size)
                alive[kind] = alive.get(kind, 0) + count
            self._peaks[self._phase] = Peak(self._top_bytes, self._top_moment, {k: n for k, n in alive.items() if n})
        first, shift = part.first, len(self.sizes) - part.first
        if given:
            self._end(part, given, first, shift, before)
        else:
            self.events += [e + shift if e >= 0 else e - shift if ~e >= first else e - before for e in part.events]
        allocated = part.allocated_count
        self.sizes += [size.nbytes for _, size in kinds[first : first + allocated]]
        if self.stream:
            self.streams |= dict.fromkeys(range(first + shift, first + shift + allocated), self.stream)
        self.streams |= {n + shift: on for n, on in passage.streams.items() if first <= n < first + allocated}
        self.nbytes += part.change_bytes
        for (component, size), count in part.change.items():
            self._kind(component, size).count += count
        return shift

    def _end(self, part: Part, given: Sequence[Tensor], first: int, shift: int, before: int) -> None:
        for event in part.events:
            serial = event if event >= 0 else ~event
            if serial < len(given):
                serial = given[serial].serial
                del self._living[serial]
            else:
                serial += shift if serial >= first else before
            self.events.append(serial if event >= 0 else ~serial)

    def adopt(self, component: str, size: Size, serial: int) -> Tensor:
        """What a passage left, to be freed one by one."""
        tensor = self._living[serial] = Tensor(self._kind(component, size), serial)
        return tensor

    @property
    def room(self) -> int:
        """Bytes that can be taken now without a new highest moment of the phase."""
        return self._top_bytes - self.nbytes

    def now(self) -> tuple[int, int]:
        return len(self.events), len(self.sizes)

    def repeat(self, since: tuple[int, int]) -> dict[int, Tensor] | None:
        """Repeat all since a `now()`, none of it higher; return what lives on, by serial, with its successor. None, and
        nothing done, where sizes differ."""
        events, first = self.events[since[0] :], since[1]
        found = sorted(~event for event in events if event < 0 and ~event < first)
        left = sorted(serial for serial in self._living if serial >= first)
        if [self.sizes[serial] for serial in found] != [self.sizes[serial] for serial in left]:
            return None
        shift, heirs = len(self.sizes) - first, dict(zip(found, left, strict=True))
        self.events += [
            event + shift if event >= 0 else event - shift if ~event >= first else ~heirs[~event] for event in events
        ]
        self.streams |= {serial + shift: on for serial, on in self.streams.items() if serial >= first}
        self.sizes += self.sizes[first:]
        successors = {serial: Tensor(self._living.pop(serial).kind, serial + shift) for serial in left}
        self._living.update({tensor.serial: tensor for tensor in successors.values()})
        return successors

    def living(self) -> Iterator[Kind]:
        return (kind for kind in self._kinds.values() if kind.count)

    def _kind(self, component: str, size: Size) -> Kind:
        key = (component, size)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Kind(component, size)
        return found

    def _note(self) -> None:
        if self.nbytes > self._top_bytes:
            self._top_bytes, self._top_moment, self._climbing = self.nbytes, self.moment, True

    def _settle(self) -> None:
        """Note what is alive at the top, before the first tensor after it is freed."""
        if self._climbing:
            alive = {kind: kind.count for kind in self.living()}
            self._peaks[self._phase] = Peak(self._top_bytes, self._top_moment, alive)
            self._climbing = False

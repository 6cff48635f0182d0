"""A trace of a model with all of its layers, from two with fewer: what the longer one has more is a group's part in
each pass, which is repeated; sizes that grow with the layers grow by as much for each group."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.initialization import no_init_weights

from foretrain.predict.allocator.blocks import Mark
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.record import Allocation, Trace

ALIKE = 24  # tokens after an inserted part that tell where it ends
Token = tuple[Any, ...]
MARKS = ("phase", "moment", "micro_batch", "emptied")


@dataclass(frozen=True)
class Cut:
    """A model whose `lists` of equal layers were cut. The longer trace has layers `first` to `first + group`, the
    shorter one does not, and the whole model has `times` groups in their place."""

    lists: tuple[str, ...]
    first: int
    group: int
    times: int

    @property
    def new(self) -> range:
        return range(self.first, self.first + self.group)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"((?:^|\.)(?:{'|'.join(map(re.escape, self.lists))})\.)(\d+)(?=\.|$)")

    def moved(self, name: str, layers: int) -> str:
        """Return the name of a module or weight whose layer is so much higher, unless it is before the first one."""
        layer = lambda found: str(int(found[2]) + (int(found[2]) >= self.first) * layers)  # noqa: E731
        return self.pattern.sub(lambda found: found[1] + layer(found), name)


class _Rank(NamedTuple):
    """How many living tensors of the same kind are younger and older: one of them is equal where passes repeat."""

    younger: int = 0
    older: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rank) and (self[0] == other[0] or self[1] == other[1])


class _Step(NamedTuple):
    """An event or a mark. `kind` has no layer; `layer` is that of the tensor, `rank` of one that is freed."""

    what: str
    kind: Token
    layer: int | None = None
    rank: _Rank = _Rank()
    allocation: Allocation | None = None

    def key(self, cut: Cut, *, longer: bool) -> Token:
        layer: Any = self.layer
        if longer and layer is not None and layer >= cut.first:
            layer = "new" if layer in cut.new else layer - cut.group
        return self.what, self.kind, layer, self.rank

    def alike(self) -> Token:
        return self.what, self.kind, self.rank, self.allocation and (self.allocation.nbytes, self.allocation.shape)


def grown(shorter: Trace, longer: Trace, cut: Cut) -> Trace | None:
    """Return the trace of the whole model; None where its layers do not repeat."""
    a, b = _steps(shorter, cut), _steps(longer, cut)
    keys = [step.key(cut, longer=False) for step in a], [step.key(cut, longer=True) for step in b]
    parts, facts = _aligned(*keys, [step.alike() for step in b]), _facts(shorter.facts, longer.facts, cut.times)
    return None if parts is None or facts is None else _Writer(cut).write(a, b, parts, facts)


def _steps(trace: Trace, cut: Cut) -> list[_Step]:
    kinds: list[tuple[Token, int | None]] = []
    last: Token = ()
    for a in trace.allocations:
        name, module = (cut.pattern.sub(r"\1*", text) for text in (a.name, a.module))
        layer = cut.pattern.search(a.name) or cut.pattern.search(a.module)
        shape = a.shape if len(a.shape) > 1 else len(a.shape)  # a list of one number per weight grows
        kind = (a.category, name, a.op, module, shape, a.dtype, a.stream, a.used_on)
        # What has no layer differs by what is allocated before it.
        kinds.append((kind, int(layer[2])) if layer else ((kind, last), None))
        last = kind
    marks: dict[int, list[_Step]] = defaultdict(list)
    micro = [Mark(position, "") for position in trace.facts["micro_batches"]]
    emptied = [Mark(position, "") for position in trace.emptied]
    for what, some in zip(MARKS, (trace.phases, trace.moments, micro, emptied), strict=True):
        for mark in some:
            marks[mark.position].append(_Step(what, (mark.name,)))
    living: dict[Token, list[int]] = defaultdict(list)
    found: list[_Step] = []
    for position, event in enumerate(trace.events):
        found += marks.get(position, ())
        id = event if event >= 0 else ~event
        kind, layer = kinds[id]
        if event >= 0:
            living[kind].append(id)
            found.append(_Step("alloc", kind, layer, allocation=trace.allocations[id]))
        else:
            older = living[kind].index(id)
            del living[kind][older]
            found.append(_Step("free", kind, rank=_Rank(len(living[kind]) - older, older)))
    return found + marks.get(len(trace.events), [])


class _Part(NamedTuple):
    """Steps of the longer trace that the shorter one lacks, how far that one is there, and where they stand again."""

    start: int
    end: int
    met: int
    again: int


def _aligned(a: list[Token], b: list[Token], alike: list[Token]) -> list[_Part] | None:
    """Return the parts that `b` has more than `a`; None where that is not all, or one has no equal beside it."""
    a, b = [*a, ("end",)], [*b, ("end",)]
    parts: list[_Part] = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        ends = {end: _again(alike, j, end) for end in range(j + 1, len(b)) if b[end : end + 1] == a[i : i + 1]}
        ends = {end: again for end, again in ends.items() if again is not None}
        if not ends:
            return None
        end = max(ends, key=lambda end: (_met(a[i : i + ALIKE], b[end : end + ALIKE]), -end))
        parts.append(_Part(j, end, i, ends[end]))
        j = end
    return parts


def _met(a: list[Token], b: list[Token]) -> int:
    """Return how many tokens are equal from the first one on."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _again(alike: list[Token], start: int, end: int) -> int | None:
    """Return where the same part stands before or after this one; None where it does not."""
    length = end - start
    others = (other for other in (start - length, end) if other >= 0 and alike[other : other + 1] == [alike[start]])
    return next((other for other in others if alike[other : other + length] == alike[start:end]), None)


class _Writer:
    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.events: list[int] = []
        self.allocations: list[Allocation] = []
        self.living: dict[Token, list[int]] = defaultdict(list)
        self.marks: dict[str, list[Mark]] = defaultdict(list)

    def write(self, a: list[_Step], b: list[_Step], parts: Iterable[_Part], facts: dict[str, Any]) -> Trace:
        cut, i, j = self.cut, 0, 0
        for start, end, met, again in (*parts, _Part(len(b), len(b), len(a), 0)):
            for before, step in zip(a[i:met], b[j:start], strict=True):
                self._add(step, cut.times - 1, before)
            layers = (step.layer for step in reversed(b[:start]) if step.layer is not None)
            falls = next((layer >= cut.first for layer in layers if layer not in cut.new), False)
            for copy in range(cut.times):
                for step, other in zip(b[start:end], b[again : again + end - start], strict=True):
                    self._add(step, cut.times - 1 - copy if falls else copy, other)
            i, j = met, end
        freed = {~event: position for position, event in enumerate(self.events) if event < 0}
        allocations = [x._replace(freed_at=freed.get(x.id)) for x in self.allocations]
        phases, moments, *others = (self.marks[what] for what in MARKS)
        micro, emptied = ([mark.position for mark in marks] for marks in others)
        return Trace(self.events, allocations, phases, moments, {**facts, "micro_batches": micro}, emptied)

    def _add(self, step: _Step, groups: int, other: _Step) -> None:
        """Add a step of the longer trace. `other`: the same one of the shorter trace, or of the group beside it."""
        cut, a, before, id = self.cut, step.allocation, other.allocation, len(self.allocations)
        if step.what == "free":
            younger = step.rank.younger == other.rank.younger
            self.events.append(~self.living[step.kind].pop(-1 - step.rank.younger if younger else step.rank.older))
        elif a is None or before is None:
            self.marks[step.what].append(Mark(len(self.events), *step.kind))
        else:
            more = cut.times - 1
            shape = tuple(n + more * (n - m) for n, m in zip(a.shape, before.shape, strict=True))
            name, module = (cut.moved(text, groups * cut.group) for text in (a.name, a.module))
            a = a._replace(shape=shape, nbytes=a.nbytes + more * (a.nbytes - before.nbytes), name=name, module=module)
            self.living[step.kind].append(id)
            self.allocations.append(a._replace(id=id, allocated_at=len(self.events)))
            self.events.append(id)


def _facts(a: dict[str, Any], b: dict[str, Any], times: int) -> dict[str, Any] | None:
    """Return the facts of the whole: counts grow by as much for each group of layers; None where that is not known."""
    if {"rms_norms", "compiled_norms"} & b.keys():  # which name events
        return None
    more = times - 1

    def grow(x: Any, y: Any) -> Any:
        if isinstance(x, dict):
            return {name: grow(x.get(name, 0), value) for name, value in y.items()}
        if isinstance(x, tuple):
            return tuple(grow(m, n) for m, n in zip(x, y, strict=True))
        return y + more * (y - x) if isinstance(y, int) else y

    runs = [{tuple(key): count for *key, count in facts["work"]} for facts in (a, b)]
    # Rows of one trace alone are of lists, which have a part for each layer.
    alone = [
        [row for row in facts["work"] if tuple(row[:-1]) not in other]
        for facts, other in zip((a, b), runs[::-1], strict=True)
    ]
    named = [[(part, kind, dtype, count) for part, kind, _, dtype, *_, count in rows] for rows in alone]
    if named[0] != named[1]:
        return None
    work = [[*key, grow(runs[0][tuple(key)], count)] for *key, count in b["work"] if tuple(key) in runs[0]]
    work += [list(map(grow, x, y)) for x, y in zip(*alone, strict=True)]
    return {**b, **{name: grow(a[name], b[name]) for name in ("counts", "matmul_dtypes", "paged_bytes")}, "work": work}


PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype)
LONGEST_GROUP = 8
LEAST_LAYERS = 3  # of the shorter model that repeat
WORTH = 0.65  # of all layers, that are in both traces together: each trace takes time for itself too
ATTEMPTS = 2


def cuts(kind: Any, config: Any, worth: float = WORTH) -> Iterator[tuple[Cut, int]]:
    """Return how a model can be cut, each with the number of layers of the shorter one, the fewest first."""
    with torch.device("meta"), no_init_weights():
        lists = {name: m for name, m in kind(config).named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        return
    longest = max(outer.values(), key=lambda layers: sum(p.numel() for p in layers.parameters()))
    count = len(longest)
    outer = {name: layers for name, layers in outer.items() if len(layers) == count}
    kinds = list(zip(*map(_kinds, outer.values()), strict=True))
    found = []
    for group in range(1, LONGEST_GROUP + 1):
        first = next((i + 1 for i in reversed(range(count - group)) if kinds[i] != kinds[i + group]), 0)
        rest = first + (count - first) % group
        found.append((rest + group * max(2, -(-LEAST_LAYERS // group)), group, first + group))
    fewest, group, first = min(found)
    for shorter in range(fewest, fewest + ATTEMPTS * group, group):
        if 2 * shorter + group <= worth * count:
            yield Cut(tuple(outer), first, group, (count - shorter) // group), shorter


def _kinds(layers: nn.ModuleList) -> list[Mapping[str, Any]]:
    """Return all that makes layers differ, but for their numbers."""
    found: list[dict[str, Any]] = []
    for layer in layers:
        kinds: dict[str, Any] = {name: (p.shape, p.dtype) for name, p in layer.named_parameters()}
        for path, module in layer.named_modules():
            kinds[path] = type(module)
            kinds |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, PLAIN)}
        found.append(kinds)
    numbers = {name for name in set().union(*found) if all(kinds.get(name, i) == i for i, kinds in enumerate(found))}
    return [{name: value for name, value in kinds.items() if name not in numbers} for kinds in found]


@contextmanager
def shortened(kind: Any, lists: tuple[str, ...], layers: int) -> Iterator[None]:
    """Make models of this kind with so many layers."""
    make = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name in lists:
            del self.get_submodule(name)[layers:]

    with Patches() as patches:
        patches.set(kind, "__init__", init)
        yield

"""How many rows a mask selects, which only values tell: the even share at the lower end, all possible at the upper.

A router gives each token `k` of `n` experts (topk, argmax …). The consequences of such a choice are known: its one-hot
form, masks of one expert, counts of tokens. The lower end gives each expert the same, the upper one gives the first
experts all that they can get, until no token is left. The ends of any other mask are one row and all.
"""

import math
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.predict.trace.kernels.values import COMPARED, storage_of

aten = torch.ops.aten
SPLIT = (
    "how many tokens each expert gets is a matter of values: the lower end is the even split, the upper end gives the "
    "first experts all that they can get"
)
PICKED = "how many rows a mask picks is a matter of values: the lower end is one, the upper end all"


@dataclass
class Source:
    total: int
    given: list[tuple[weakref.ref[Any], Any, int]] = field(default_factory=list)


class Chosen(NamedTuple):
    """What a storage holds of a choice among `parts`, of which each row makes `distinct` different ones. `share`: of
    its elements that name one part, or are true for it. `most`: of its elements that one part can have. `kind`: part
    numbers, a mask, counts per part, or their running sums."""

    source: Source
    parts: int
    distinct: int
    share: float
    most: float
    kind: str = "number"  # or mask, count, sum


class Choices:
    def __init__(self, upper: bool, ranges: set[str]) -> None:
        self.upper, self.ranges = upper, ranges
        self._known: dict[int, tuple[weakref.ref[Any], Chosen]] = {}
        self._answers: dict[int, tuple[weakref.ref[Any], int]] = {}  # of tensors of one element
        self._first: dict[int, tuple[weakref.ref[Any], int]] = {}  # masks that are true for the first so many parts
        self.selected: dict[int, int] = {}  # elements of a mask -> how many are true, where the run knows
        self._numbered = weakref.WeakSet[Any]()  # rows that are 0, 1, 2, … as the first elements of a mask were true

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name in CHOOSE:
            tensor = out[1] if isinstance(out, list | tuple) else out
            if isinstance(tensor, Tensor) and args[0].dim():
                self._choose(name, args, kwargs, tensor)
        elif name in FOLLOW and (self._known or self._answers) and args and isinstance(args[0], Tensor):
            self._follow(name, args, out)

    def _choose(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Tensor) -> None:
        position = CHOOSE[name]
        dim = kwargs.get("dim", args[position] if len(args) > position else None if name[:3] == "arg" else -1)
        if type(dim) is not int:
            return
        parts = args[0].shape[dim]
        distinct = args[1] if name in ("topk", "multinomial") else parts if name == "sort" else 1
        share = Chosen(Source(chosen.numel()), parts, distinct, 1 / max(1, parts), 1 / max(1, distinct))
        self.learn(chosen, share)

    def _follow(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        known = self.of(args[0])
        if name in COMPARED:
            self._compared(name, args, known, out)
        elif name in ("scatter", "scatter_"):
            _, dim, indices, *_ = args
            index = self.of(indices)
            if index is not None and index.kind == "number":
                along = indices.shape[dim]
                most = 1 / index.distinct if along == 1 else 1.0
                self.learn(out, index._replace(share=along * index.share, most=most, kind="mask"))
        elif known is None or not isinstance(out, Tensor):
            return
        elif name == "histc":
            if known.kind == "number" and out.numel() == known.parts:
                self.learn(out, known._replace(kind="count"))
        elif name == "cumsum":
            if known.kind == "count":
                self.learn(out, known._replace(kind="sum"))
        elif name in ("sum", "any"):
            self._reduced(name, known, args[0], out)
        else:
            self.learn(out, known)

    def _compared(self, name: str, args: tuple[Any, ...], known: Chosen | None, out: Tensor) -> None:
        """Note that `choice == expert` is a mask, `count > 0` true for each expert; one count is compared as it is."""
        number = self.counted(args[0]) if args[0].numel() == 1 else None
        if number is not None and not isinstance(args[1], Tensor):
            self._answer(out, bool(COMPARED[name](number, args[1])))
        elif known is None:
            return
        elif known.kind == "number" and name == "eq":
            self.learn(out, known._replace(kind="mask"))
        elif known.kind == "mask" and name in ("gt", "ne"):
            self.learn(out, known)
        elif known.kind == "count" and name in ("gt", "ne") and (storage := storage_of(out)) is not None:
            has = known.distinct if self.upper else known.parts
            self._first[storage._cdata] = (weakref.ref(storage), has)

    def _answer(self, tensor: Tensor, value: int) -> None:
        if (storage := storage_of(tensor)) is not None:
            self._answers[storage._cdata] = (weakref.ref(storage), value)

    def _reduced(self, name: str, known: Chosen, before: Tensor, out: Tensor) -> None:
        if known.kind != "mask":
            return
        if out.numel() == 1:  # the rows of an expert, or whether it has any
            picked = self.picked(before, None)
            self._answer(out, picked > 0 if name == "any" else picked)
            return
        if out.numel() == known.parts and round(before.numel() * known.share) == known.source.total:
            self.learn(out, known._replace(kind="count"))
        elif before.numel() == out.numel() * known.distinct:  # each row once, by any of its choices
            self.learn(out, known._replace(share=min(1.0, known.share * known.distinct), most=1.0))

    def learn(self, tensor: Tensor, chosen: Chosen) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self._known[storage._cdata] = (weakref.ref(storage), chosen)

    def of(self, tensor: Any) -> Chosen | None:
        storage = storage_of(tensor) if isinstance(tensor, Tensor) else None
        found = self._known.get(storage._cdata) if storage is not None else None
        return found[1] if found is not None and found[0]() is storage else None

    def picked(self, mask: Tensor, known_value: bool | None) -> int:
        """Return how many elements of it are true. `known_value`: of all of them, where that is known."""
        storage, count = storage_of(mask), mask.numel()
        if count == 0 or known_value is False:
            return 0
        if known_value:
            return count
        if count in self.selected:
            return self.selected[count]
        first = self._first.get(storage._cdata) if storage is not None else None
        if first is not None and first[0]() is storage:
            return min(count, first[1])
        chosen = self.of(mask)
        if chosen is not None and storage is not None and chosen.kind == "mask":
            self.ranges.add(SPLIT)
            if not self.upper:
                return min(count, math.ceil(count * chosen.share - 1e-9))
            return _given(chosen, mask, storage)
        self.ranges.add(PICKED)
        return count if self.upper else 1

    def rows(self, mask: Tensor, known_value: bool | None) -> Tensor:
        """Return what nonzero gives: a column for each dimension."""
        picked = self.picked(mask, known_value)
        found = torch.empty((mask.dim(), picked), dtype=torch.int64, device=mask.device).t()
        storage = storage_of(found)
        its = storage_of(mask)
        counts_up = known_value or (its is not None and its._cdata in self._first)
        if mask.dim() == 1 and counts_up and storage is not None:
            self._numbered.add(storage)
        return found

    def tally(self, chosen: Tensor, least: int) -> Tensor | None:
        """Return what bincount does, with at least so many bins; None where their number is unknown."""
        known = self.of(chosen)
        bins = max(least, 0 if known is None else known.parts)
        if not bins:
            return None
        found = chosen.new_empty(bins, dtype=torch.int64)
        if known is not None:
            self.learn(found, known._replace(kind="count"))
        return found

    def counted(self, tensor: Tensor) -> int | None:
        """Return the integer of a tensor: the tokens of a part, or the number of a row; None for any other."""
        storage = storage_of(tensor)
        if storage is not None and storage in self._numbered:
            return int(tensor.storage_offset())
        answer = self._answers.get(storage._cdata) if storage is not None else None
        if answer is not None and answer[0]() is storage:
            return answer[1]
        chosen = self.of(tensor)
        if chosen is None or chosen.kind not in ("count", "sum") or tensor.numel() != 1:
            return None
        self.ranges.add(SPLIT)
        number, total = tensor.storage_offset(), chosen.source.total
        most = math.ceil(total / chosen.distinct) if self.upper else -(-total // chosen.parts)
        up_to = [int(min(total, most * each)) for each in (number, number + 1)]
        return up_to[1] if chosen.kind == "sum" else up_to[1] - up_to[0]


def _given(chosen: Chosen, mask: Tensor, storage: torch.UntypedStorage) -> int:
    """Return the upper end's share of a mask: its earlier answer, else what is left."""
    given, view = chosen.source.given, (mask.storage_offset(), mask.shape, mask.stride())
    for ref, its, number in given:
        if ref() is storage and its == view:
            return number
    left = chosen.source.total - sum(number for _, _, number in given)
    number = max(0, min(math.ceil(mask.numel() * chosen.most - 1e-9), left))
    given.append((weakref.ref(storage), view, number))
    return number


# Where the dimension stands among the arguments of what chooses; and what a choice may pass through.
CHOOSE = {"topk": 2, "sort": 1, "argmax": 1, "argmin": 1, "max": 1, "min": 1, "multinomial": 9}
FOLLOW = {
    "_to_copy", "clone", "detach", "index", "index_select", *COMPARED, "any", "sum", "scatter", "scatter_", "histc",
    "cumsum",
}  # fmt: skip

"""Kernels of a pass as Inductor fuses them: connected ones with as many matmuls before them run as one. No torch. Sums
over all rows, matmuls, attention and scatters stay alone. What backward reads is saved or recomputed, whichever moves
fewer bytes."""

from collections import defaultdict
from collections.abc import Sequence

from foretrain.predict.abstract.dims import Kernel
from foretrain.predict.abstract.tensors import elements

KEPT = ("matmul", "attention", "scatter", "accumulate", "triton")
SHOWN = ("softmax_backward", "softmax", "gelu_backward", "gelu")  # kinds that a group is known by
Value = tuple[int, int]  # a tensor, and the kernel that made it as it is; -1: it was there before


def fused(kernels: Sequence[Kernel], outputs: set[int], softmax_reads: int, alone: str = "") -> list[Kernel]:
    """Return a compiled pass's kernels; `outputs`: read later, `softmax_reads`: of the logits, `alone`: not fused."""
    return _Fusion(kernels, outputs, softmax_reads, alone).kernels()


class _Fusion:
    """`group`: of each kernel, by its first; `stored`: in memory. `stays`, `sums`, `apart`: whether it stays alone."""

    def __init__(self, kernels: Sequence[Kernel], outputs: set[int], softmax_reads: int, alone: str) -> None:
        self.all, self.softmax_reads = kernels, softmax_reads
        self.stays = [each.kind.startswith(KEPT) or (alone != "" and each.name == alone) for each in kernels]
        self.sums = [_sums_rows(each) for each in kernels]
        self.apart = [a or b or _turns(each) for a, b, each in zip(self.stays, self.sums, kernels, strict=True)]
        self.size: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.inputs: list[list[Value]] = []
        self.readers: dict[Value, list[int]] = defaultdict(list)
        self.constant: list[bool] = []  # of each kernel: nothing is read for its result
        last: dict[int, int] = {}
        self.group = self._grouped(last)
        self.stored = {(t, last[t]) for t in outputs if t in last}
        for value, readers in self.readers.items():
            j = value[1]
            others = [i for i in readers if self.group[i] != self.group[j] and self.all[i].part == self.all[j].part]
            others = [] if self.constant[j] else [i for i in others if not self.sums[i]]
            if self.stays[j] or others or any(self.stays[i] or self.all[i].kind == "range" for i in readers):
                self.stored.add(value)

    def _grouped(self, last: dict[int, int]) -> list[int]:
        levels: list[int] = []
        parent: list[int] = []
        for i, kernel in enumerate(self.all):
            parent.append(i)
            ids = kernel.read_ids
            if kernel.kind == "gather":  # it reads as much as it writes, of a table
                ids = (-i - 1, *ids[1:])
            for t, size in zip((*ids, *kernel.write_ids), (*kernel.reads, *kernel.writes), strict=True):
                known = self.size.get(t)
                if known is None or (known != size and _nbytes(known) < _nbytes(size)):
                    self.size[t] = size
            own = [(t, last.get(t, -1)) for t in ids]
            self.inputs.append(own)
            makers = [j for _, j in own if j >= 0 and not self.constant[j]]
            alone = all(j >= 0 and self.constant[j] for _, j in own)
            self.constant.append(kernel.kind == "fill" or (alone and not self.stays[i]))
            levels.append(max([levels[j] + self.stays[j] for j in makers], default=0))
            for value in own:
                if value[1] >= 0:
                    self.readers[value].append(i)
            for j in makers:
                joins = kernel.part == self.all[j].part and not (self.apart[i] or self.apart[j])
                if levels[i] == levels[j] and joins and not self.constant[i]:
                    parent[_root(parent, i)] = _root(parent, j)
            last.update(dict.fromkeys(kernel.write_ids, i))
        return [_root(parent, i) for i in range(len(parent))]

    def _from_memory(self, value: Value, own: int) -> set[int]:
        t, j = value
        if j < 0 or value in self.stored:
            return {t}
        found: set[int] = set()
        for source in self.inputs[j]:
            if source[1] != j:
                found |= self._from_memory(source, own)
        return found

    def _bytes(self, tensors: set[int]) -> int:
        return sum(_nbytes(self.size[t]) for t in tensors)

    def kernels(self) -> list[Kernel]:
        members: dict[int, list[int]] = defaultdict(list)
        for i, own in enumerate(self.group):
            members[own].append(i)
        reads = {own: self._reads(own, members[own]) for own in sorted(members, reverse=True)}
        found = []
        for own in sorted(members):
            found.append(self._merged(members[own], reads[own]))
            for i in members[own]:
                if self.all[i].kind == "norm_backward" and len(self.all[i].writes) > 1:  # the gradient of its weight
                    again = self._reads(own, [i])
                    sizes = tuple(self.size[t] for t in sorted(again))
                    found.append(self.all[i]._replace(kind="fused", reads=sizes, writes=()))
        return [kernel for kernel in found if kernel.reads or kernel.writes]

    def _reads(self, own: int, members: list[int]) -> set[int]:
        found: set[int] = set()
        for i in members:
            for value in self.inputs[i]:
                t, j = value
                if j >= 0 and self.group[j] == own and len(members) > 1:
                    continue
                again = self._from_memory(value, own)
                if again != {t} and self._bytes(again - found) > 2 * self._bytes({t}):
                    self.stored.add(value)
                    again = {t}
                found |= again
        return found

    def _merged(self, members: list[int], reads: set[int]) -> Kernel:
        first = self.all[members[0]]
        if self.stays[members[0]]:
            return first
        kinds = [self.all[i].kind for i in members]
        kind = next((kind for kind in SHOWN if kind in kinds), kinds[0] if len(members) == 1 else "fused")
        kept = {t for i in members for t in self.all[i].write_ids if (t, i) in self.stored}
        writes = [self.size[t] for t in sorted(kept)]
        writes += [self.all[i].reads[0] for i in members if self._keeps_normalised(i)]
        times = self.softmax_reads if "softmax" in kinds else 1
        return first._replace(kind=kind, reads=tuple(self.size[t] for t in sorted(reads)) * times, writes=tuple(writes))

    def _keeps_normalised(self, i: int) -> bool:
        """Return whether a LayerNorm in fp32 saves its result before the weight, instead of its input."""
        kernel = self.all[i]
        if kernel.kind != "norm" or kernel.part != "forward" or kernel.item_bytes < 4:
            return False
        return any(self.all[j].part == "backward" for j in self.readers[kernel.write_ids[-1], i])


def _nbytes(tensor: tuple[int, tuple[int, ...]]) -> int:
    return tensor[0] * elements(tensor[1])


def _root(parent: list[int], i: int) -> int:
    while parent[i] != i:
        i = parent[i]
    return i


def _turns(kernel: Kernel) -> bool:
    return kernel.kind == "join" and len(kernel.reads) == 1 and len(kernel.reads[0][1]) == 2


def _sums_rows(kernel: Kernel) -> bool:
    if kernel.kind not in ("add", "range") or not kernel.reads or not kernel.writes:
        return False
    (_, given), (_, made) = kernel.reads[0], kernel.writes[0]
    return (
        len(made) <= len(given) and made == given[len(given) - len(made) :] and _nbytes((1, made)) < _nbytes((1, given))
    )

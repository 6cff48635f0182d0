"""Memory of Inductor's timing of kernels at their first run. No torch."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.passage import Structure
from foretrain.predict.timeline import Passage, Tensor, Timeline

# Padding: where a side of a matmul is not a multiple of 4 (fp32) or 8 (half precision), Inductor times both variants on
# matrices of its own while the step compiles, before a graph first runs, so beside little else. Both operands, their
# padded copies, a result, and a buffer as large as the card's cache (torch/_inductor/fx_passes/pad_mm.py, _should_pad;
# benchmarking.py, benchmark_gpu). It leaves out matmuls that the card's bandwidth bounds, by the driver's figures, so
# here, as in a trace, all are timed.

ALIGNED = {4: 4, 2: 8}  # elements, by their bytes


class Matmul(NamedTuple):
    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def backward(self) -> tuple["Matmul", "Matmul"]:
        m, k, n, batch = self
        return Matmul(m, n, k, batch), Matmul(k, m, n, batch)


def is_unaligned(matmul: Matmul, width: int) -> bool:
    """Return whether a side is not a multiple of the card's units. `width`: bytes of an element."""
    return any(side % ALIGNED[width] and side > 1 for side in matmul[:3])


def time_padding(t: Timeline, matmuls: Iterable[Matmul], width: int) -> None:
    """Write the timing into a timeline, once for each matmul with an unaligned side. `width`: bytes of an element."""
    for matmul in dict.fromkeys(matmuls):
        if is_unaligned(matmul, width):
            _time(t, matmul, width)


def _time(t: Timeline, matmul: Matmul, width: int) -> None:
    m, k, n, batch = matmul
    wider_m, wider_k, wider_n = (
        side if side == 1 else -(-side // ALIGNED[width]) * ALIGNED[width] for side in (m, k, n)
    )
    take = lambda rows, columns: t.alloc("workspace", t.size(width * batch * rows * columns))  # noqa: E731
    held = [take(m, k), take(k, n)]
    held += [take(wider_m, wider_k)] if (m, k) != (wider_m, wider_k) else []
    held += [take(wider_k, wider_n)] if (k, n) != (wider_k, wider_n) else []
    for rows, columns in ((m, n), (wider_m, wider_n)):
        t.free(take(rows, columns))
        cache = t.alloc("measuring", t.size(1, "L2"))
        t.free(take(rows, columns), cache)
    t.free(*held)


BEFORE = -1  # no event of a passage


class Walk:
    """Writes a pass into a timeline event by event, with the timing of its kernels: a buffer as large as the card's
    cache, and copies of what a kernel changes, without room on the host (torch/_inductor/runtime/triton_heuristics.py,
    copy_args_to_cpu_if_needed)."""

    def __init__(
        self,
        t: Timeline,
        passage: Passage,
        timed: Sequence[tuple[int, tuple[int, ...]]],
        there: int,
        given: Sequence[Tensor] = (),
    ) -> None:
        self.t, self.passage, self.there = t, passage, there
        self.timed: dict[int, list[Sequence[int]]] = defaultdict(list)
        for at, changed in timed:
            self.timed[at].append(changed)
        self.alive = dict(enumerate(given))

    def part(self, number: int) -> None:
        t, passage = self.t, self.passage
        at = passage.split if number else 0
        for event in passage.parts[number].events:
            t.at(passage.moments[at])
            for changed in self.timed.get(at, ()):
                self._time(changed)
            at += 1
            if event >= 0:
                component, size = passage.kinds[event]
                if component == "workspace" and size.formula.endswith("cuBLAS") and self.there:
                    self.there -= 1
                else:
                    made = self.alive[event] = t.alloc(component, size)
                    if event in passage.streams:
                        t.streams[made.serial] = passage.streams[event]
            else:
                t.free(self.alive.pop(~event))

    def left(self, *components: str) -> list[Tensor]:
        return [tensor for tensor in self.alive.values() if tensor.component in components]

    def backward(self) -> list[Tensor]:
        self.part(1)
        return self.left("gradients")

    def _time(self, changed: Sequence[int]) -> None:
        t = self.t
        for _ in range(2 if changed else 1):
            room, copied = t.room, []
            for serial in changed:
                size = self.passage.kinds[serial][1]
                if size.nbytes <= room:
                    room -= size.nbytes
                    copied.append(size)
            t.free(*[t.alloc("measuring", size) for size in copied])
            buffer = t.alloc("measuring", t.size(1, "L2"))
            t.free(*[t.alloc("measuring", size) for size in copied])
            t.free(buffer)


def first_walk(
    t: Timeline, passage: Passage, structure: Structure, there: int, given: Sequence[Tensor] = (), *, cuda: bool
) -> Walk:
    """Return the walk of a pass's first run after forward. `there`: cuBLAS's workspaces; `given`: tensors it ends."""
    workspace = None
    matmuls = [(_matmul(t, sizes), width) for sizes, width in structure.matmuls]
    if any(is_unaligned(matmul, width) for matmul, width in matmuls):
        t.at("compile")
        if not there and cuda:
            workspace, there = t.alloc("workspace", t.size(1, "cuBLAS")), 1
        for matmul, width in dict.fromkeys(matmuls):
            time_padding(t, [matmul], width)
    walk = Walk(t, passage, structure.timed, there, given)
    if workspace is not None:
        walk.alive[BEFORE] = workspace
    walk.part(0)
    return walk


def _matmul(t: Timeline, sizes: Sequence[int]) -> Matmul:
    def count(size: int) -> int:
        if not isinstance(size, Dim):
            return int(size)
        return int(size.coefficient * math.prod(t.symbols[letter] for letter in size.letters))

    m, k, n, *batch = map(count, sizes)
    return Matmul(m, k, n, math.prod(batch))

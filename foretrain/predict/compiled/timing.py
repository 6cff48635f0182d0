"""What Inductor takes to find out how its kernels are fastest, when they first run. No torch."""

import math
from collections import defaultdict
from collections.abc import Sequence

from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.passage import Structure
from foretrain.predict.estimate.padding import Product, is_unaligned, time_padding
from foretrain.predict.timeline import Passage, Tensor, Timeline

BEFORE = -1  # no event of a passage


class Walk:
    """Writes a pass into a timeline event by event, with what timing its kernels takes.

    Each way to run a kernel is timed with a buffer as large as the card's cache, and a copy of each tensor that the
    kernel changes. A copy for which there is no room below the run's peak goes to the host. The first way's buffer is
    part of that peak for the second (torch/_inductor/runtime/triton_heuristics.py, copy_args_to_cpu_if_needed).
    """

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
        """One of the two parts of the pass."""
        t, passage = self.t, self.passage
        at = len(passage.parts[0].events) if number else 0
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
        """What is there of these."""
        return [tensor for tensor in self.alive.values() if tensor.component in components]

    def backward(self) -> list[Tensor]:
        """The second part. Returns the gradients."""
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
    """The walk of a pass that runs for the first time, with its forward part done. Matmuls of sizes that are not
    aligned are timed with padding before; `there`: how many workspaces of cuBLAS there are; `given`: what the pass ends
    of what was there before."""
    workspace = None
    products = [(_product(t, sizes), width) for sizes, width in structure.products]
    if any(is_unaligned(product, width) for product, width in products):
        t.at("compile")
        if not there and cuda:
            workspace, there = t.alloc("workspace", t.size(1, "cuBLAS")), 1
        for product, width in dict.fromkeys(products):
            time_padding(t, [product], width)
    walk = Walk(t, passage, structure.timed, there, given)
    if workspace is not None:
        walk.alive[BEFORE] = workspace
    walk.part(0)
    return walk


def _product(t: Timeline, sizes: Sequence[int]) -> Product:
    """A matmul in the present sizes."""

    def count(size: int) -> int:
        if not isinstance(size, Dim):
            return int(size)
        return int(size.coefficient * math.prod(t.symbols[letter] for letter in size.letters))

    m, k, n, *batch = map(count, sizes)
    return Product(m, k, n, math.prod(batch))

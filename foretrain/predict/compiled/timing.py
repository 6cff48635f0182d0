"""What Inductor takes to find out how its kernels are fastest, when they first run. No torch."""

from collections import defaultdict
from collections.abc import Sequence

from foretrain.predict.timeline import Passage, Tensor, Timeline


class Walk:
    """Writes a pass into a timeline event by event, with what timing its kernels takes.

    Each way to run a kernel is timed with a buffer as large as the card's cache, and a copy of each tensor that the
    kernel changes. A copy for which there is no room below the run's peak goes to the host. The first way's buffer is
    part of that peak for the second (torch/_inductor/runtime/triton_heuristics.py, copy_args_to_cpu_if_needed).
    """

    def __init__(self, t: Timeline, passage: Passage, timed: Sequence[tuple[int, tuple[int, ...]]], there: int) -> None:
        self.t, self.passage, self.there = t, passage, there
        self.timed: dict[int, list[Sequence[int]]] = defaultdict(list)
        for at, changed in timed:
            self.timed[at].append(changed)
        self.alive: dict[int, Tensor] = {}

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
                    self.alive[event] = t.alloc(component, size)
            else:
                t.free(self.alive.pop(~event))

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

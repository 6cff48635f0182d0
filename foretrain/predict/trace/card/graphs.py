"""CUDA graphs on a card that is not there: nothing is recorded or replayed, but a recording's memory is a pool's own.

What is allocated between capture_begin and capture_end is of the graph's pool, whichever thread asks for it
(c10/cuda/CUDACachingAllocator.cpp, beginAllocateToPool, whose filter looks at the stream).
"""

from collections.abc import Callable

from foretrain.predict.allocator.lifetimes import GRAPH_POOL
from foretrain.predict.trace.card.streams import Streams

SEEDS = 2  # the generator's seed and offset, which all graphs of a process read (CUDAGeneratorImpl.cpp, register_graph)


def graph_class(streams: Streams, alloc: Callable[[int], object]) -> type:
    """What stands for torch.cuda.CUDAGraph; `alloc`: so many bytes that stay."""
    made = [0]

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._pool, self._before = 0, 0

        def capture_begin(self, pool: tuple[int, int] | None = None, **_options: object) -> None:
            if not made[0]:
                for _ in range(SEEDS):
                    alloc(8)
            if pool is None:
                made[0] += 1
            self._pool = pool[1] if pool else made[0]
            self._before = streams.now()
            streams.choose_number(self._pool * GRAPH_POOL + self._before)

        def capture_end(self) -> None:
            streams.choose_number(self._before)

        def pool(self) -> tuple[int, int]:
            return (0, self._pool)

        def replay(self) -> None: ...

        instantiate = reset = replay

    return Graph

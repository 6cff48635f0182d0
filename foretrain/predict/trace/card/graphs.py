"""CUDA graphs on a card that is not there: nothing is recorded or replayed, but a recording's memory is a pool's own.

What is allocated between capture_begin and capture_end is of the graph's pool, whichever thread asks for it
(c10/cuda/CUDACachingAllocator.cpp, beginAllocateToPool, whose filter looks at the stream).
"""

from collections.abc import Callable

import torch

from foretrain.predict import software
from foretrain.predict.allocator.lifetimes import GRAPH_POOL
from foretrain.predict.trace.card.streams import Streams

SEEDS = 2  # the generator's seed and offset, 8 bytes each (CUDAGeneratorImpl.cpp)


def graph_class(streams: Streams, alloc: Callable[..., object]) -> type:
    """What stands for torch.cuda.CUDAGraph; `alloc(nbytes, stream=)`: bytes that stay."""
    made, of_each = [0], (software.parse(torch.__version__) or software.ASSUMED).seeds_each_graph

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._pool, self._before = 0, 0

        def capture_begin(self, pool: tuple[int, int] | None = None, **_options: object) -> None:
            for _ in range(SEEDS if of_each or not made[0] else 0):
                alloc(8, stream=0 if of_each else streams.now())
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

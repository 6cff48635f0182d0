import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch, to_batch
from foretrain.model.step import TrainState, build, evaluation_loss, run_as, train_step
from foretrain.training.device import TORCH_DTYPES, Placement
from foretrain.training.feed import Ahead

Call = Callable[[], Any]
Timer = Callable[[Call, int], list[float]]  # seconds of each of so many calls
# A card waits while its host launches the timed calls: for twice the expected launch time, and a while.
CLOCKS_PER_S, HEAD_START_S, SLACK, EVENTS_S = 2e9, 0.5e-3, 2.0, 20e-6
SHORTEST_S = 1e-7  # of a call, where a clock shows nothing


class Enough(NamedTuple):
    """Runs until they took so many seconds together. `long_s`: of a call that is steady by itself, so one is enough."""

    seconds: float
    fewest: int
    most: int
    long_s: float = math.inf

    def missing(self, samples: list[float]) -> int:
        if samples[0] > self.long_s:
            return 0
        left_s = self.seconds - sum(samples)
        more = math.ceil(left_s / max(min(samples), SHORTEST_S)) if left_s > 0 else 0
        return min(max(more, self.fewest - len(samples)), max(self.fewest, self.most) - len(samples))


def repeated(run: Call, timed: Timer, enough: Enough) -> list[float]:
    run()
    samples = timed(run, 1)
    while (more := enough.missing(samples)) > 0:
        samples += timed(run, more)
    return samples


def timer(device: torch.device) -> Timer:
    return on_card if device.type == "cuda" else on_host


def on_host(run: Call, count: int) -> list[float]:
    found = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


def on_card(run: Call, count: int) -> list[float]:
    """Time calls by events of the card. It sleeps until all are launched: to wait for each took ten times as long."""
    began = time.perf_counter()
    run()
    launched_s = time.perf_counter() - began
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    ahead_s = HEAD_START_S + SLACK * count * (launched_s + EVENTS_S)
    torch.cuda._sleep(int(CLOCKS_PER_S * ahead_s))
    for start, end in events:
        start.record()
        run()
        end.record()
    events[-1][1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


class Stepper:
    def __init__(
        self, config: RunConfig, placement: Placement, dtype: str, *, compiled: bool, like: TrainState | None = None
    ) -> None:
        device = placement.device
        self.config, self.dtype, self.compiled = config, dtype, compiled
        if like:
            self.state = run_as(like, TORCH_DTYPES[dtype], compile=compiled)
        else:
            self.state = build(config, device, TORCH_DTYPES[dtype], compile=compiled)
        tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1), device=device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.rows = tokens.cpu().numpy()
        self.times(2)

    def times(self, count: int) -> list[float]:
        samples, accumulation = [], self.config.gradient_accumulation_steps
        with self._batches() as batches:
            for _ in range(count):
                started = time.perf_counter()
                train_step(self.state, islice(batches, accumulation), 1e-4).loss.item()
                samples.append(time.perf_counter() - started)
        return samples

    @contextmanager
    def _batches(self) -> Iterator[Iterator[Batch]]:
        """Yield batches; on a CPU another thread makes them, as in training, where it takes its share of the cores."""
        if self.state.device.type != "cpu":
            yield repeat(self.batch)
            return
        ahead = Ahead((to_batch(rows, self.state.device) for rows in repeat(self.rows)), 2)
        try:
            yield iter(ahead.get, None)  # type: ignore[misc]
        finally:
            ahead.close()

    def forward_times(self, count: int) -> list[float]:
        samples = []
        for _ in range(count + 1):  # the first one compiles kernels of its own
            started = time.perf_counter()
            evaluation_loss(self.state, self.batch).item()
            samples.append(time.perf_counter() - started)
        return samples[1:]

"""How long calls take on a device: many at a time where it works beside its host, until enough of them were timed."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]
Timer = Callable[[Call, int], list[float]]  # seconds of each of so many calls
# A card waits while its host launches what is timed: for twice what the launches are expected to take, and a while.
CLOCKS_PER_S, HEAD_START_S, SLACK, EVENTS_S = 2e9, 0.5e-3, 2.0, 20e-6
SHORTEST_S = 1e-7  # of a call, where a clock shows nothing


class Enough(NamedTuple):
    """Runs until they took so many seconds together; at least and at most so many. `long_s`: of a call that is steady
    by itself, so that one run is enough."""

    seconds: float
    fewest: int
    most: int
    long_s: float = math.inf

    def missing(self, samples: list[float]) -> int:
        """How many runs more, if each takes what the quickest one took."""
        if samples[0] > self.long_s:
            return 0
        left_s = self.seconds - sum(samples)
        more = math.ceil(left_s / max(min(samples), SHORTEST_S)) if left_s > 0 else 0
        return min(max(more, self.fewest - len(samples)), max(self.fewest, self.most) - len(samples))


def repeated(run: Call, timed: Timer, enough: Enough) -> list[float]:
    """Seconds of a call, warmed up, again and again."""
    run()
    samples = timed(run, 1)
    while (more := enough.missing(samples)) > 0:
        samples += timed(run, more)
    return samples


def timer(device: torch.device) -> Timer:
    """What times calls on this device; on CUDA by events, so that launching is not in it."""
    return on_card if device.type == "cuda" else on_host


def on_host(run: Call, count: int) -> list[float]:
    """By the host's clock."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


def on_card(run: Call, count: int) -> list[float]:
    """By events of the card. It sleeps until all calls are launched: once for all of them, as to wait for it each time
    took ten times as long as the kernels do."""
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

"""How often something is timed, by a clock that tells what the test says."""

from collections.abc import Callable
from typing import Any

import pytest

from foretrain.measure.timer import Enough, repeated


class Clock:
    """Every call takes the next of these seconds; the last one again and again. Notes how many were timed at once."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.at_once, self.runs = list(seconds), list[int](), 0

    def run(self) -> None:
        self.runs += 1

    def timed(self, run: Callable[[], Any], count: int) -> list[float]:
        self.at_once.append(count)
        for _ in range(count):
            run()
        return [self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0] for _ in range(count)]


@pytest.mark.parametrize(
    ("seconds", "enough", "at_once"),
    [
        ((0.001,), Enough(0.02, 3, 100), [1, 19]),  # enough together
        ((0.00001,), Enough(0.02, 3, 100), [1, 99]),  # the most
        ((0.015,), Enough(0.02, 3, 100), [1, 2]),  # the fewest
        ((0.0,), Enough(0.02, 3, 100), [1, 99]),  # a clock too coarse to show anything
        ((0.5,), Enough(0.02, 3, 100, long_s=0.1), [1]),  # one long run
        ((0.01, 0.002), Enough(0.02, 3, 100), [1, 2, 3]),  # the first one was slow
        ((0.001,), Enough(0.0, 1, 100), [1]),
    ],
    ids=str,
)
def test_runs_until_enough(seconds: tuple[float, ...], enough: Enough, at_once: list[int]) -> None:
    clock = Clock(*seconds)
    found = repeated(clock.run, clock.timed, enough)
    assert clock.at_once == at_once
    assert len(found) == sum(at_once) == clock.runs - 1  # one more to warm up

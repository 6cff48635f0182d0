"""Gaps in the time of a run: the machine was suspended, or somebody set its clock.

Every duration of a run is of `time.monotonic`, which neither moves; and steps, not times of day, say what is newer. So
nothing is to be mended, but whoever reads the record has to know why its labels do not fit.
"""

import time
from collections.abc import Callable
from typing import Any

SUSPENDED_S, SET_S = 2.0, 60.0  # less is not told: NTP moves a clock by fractions of a second


def _with_suspends() -> float:
    """Seconds since the start of the machine, those in which it was suspended included; elsewhere without them."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(number) if number is not None else time.monotonic()


class Clocks:
    """The three clocks of a machine; the arguments are stand-ins for tests."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, boot: Callable[[], float] = _with_suspends,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._clocks = monotonic, boot, wall
        self._suspended_s, self._moved_s = self._gaps()

    def _gaps(self) -> tuple[float, float]:
        """How far the clock with suspends is ahead of the one without, and the wall's of the former."""
        monotonic, boot, wall = (clock() for clock in self._clocks)
        return boot - monotonic, wall - boot

    def look(self) -> list[tuple[str, dict[str, Any]]]:
        """What happened since the last look, as (event id, values)."""
        before, (suspended_s, moved_s) = (self._suspended_s, self._moved_s), self._gaps()
        self._suspended_s, self._moved_s = suspended_s, moved_s
        found: list[tuple[str, dict[str, Any]]] = []
        if (gap := suspended_s - before[0]) > SUSPENDED_S:
            found.append(("suspended", {"seconds": gap}))
        if abs(gap := moved_s - before[1]) > SET_S:
            found.append(("clock_set_on" if gap > 0 else "clock_set_back", {"seconds": abs(gap)}))
        return found

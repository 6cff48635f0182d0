"""The largest value of an option with which a run still fits: by the estimate at once, or by a search over traces."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.units import GIB
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import cluster_of
from foretrain.predict.forecast import Forecast, Placement, Probe, forecast
from foretrain.predict.search import bisect, search_outwards

MOST_LINES, NEAR = 5, 8  # a guess that is within an eighth of the one before is searched from


class Largest(Record):
    """The largest value that fits (None: not even 1), with all tried. `searched_all`: larger ones may fit, too."""

    option: str
    value: int | None
    searched_all: bool
    available_bytes: int
    probes: tuple[Probe, ...]
    source: Literal["estimated", "traced"] = "estimated"

    @property
    def found(self) -> Probe | None:
        return next((probe for probe in self.probes if probe.value == self.value), None)

    @property
    def beyond(self) -> Probe | None:
        return next((probe for probe in self.probes if probe.value > (self.value or 0)), None)


def largest(made: Forecast, option: str, trace: Callable[[int], Probe] | None = None) -> Largest:
    """Return the largest that fits, by `trace` outwards from the estimate; one beyond might fit. Raises UserError."""
    run, room = made.run, made.available_bytes
    if option not in run.ranges:
        raise UserError("usage.largest_knob", option=option, choices=sorted(run.ranges))
    run.check(made, f"--largest {option}")
    if room is None:
        raise UserError("usage.largest_unknown", gpu=made.where.card.name)
    estimates, traces = _Tried(lambda value: run.probe(made, option, value)), _Tried(trace) if trace else None
    tried = traces or estimates

    def search(granule: int, top: int) -> int:
        """Return the largest multiple of the granule that fits, up to `top` granules; 0 where none does."""
        found = search_outwards(lambda count: estimates.fits(count * granule), guess(granule, top), top)
        if traces is None:
            return granule * found
        return granule * search_outwards(lambda count: tried.fits(count * granule), max(1, found), top)

    def guess(granule: int, top: int) -> int:
        """Return how many granules meet the room, by lines from the run as it is."""

        def needed(count: int) -> int:
            return max(1, estimates.needed(count * granule))

        start = min(top, max(1, now // granule))
        found = [start, min(top, max(1, start * room // needed(start)))]
        while len(found) < MOST_LINES and abs(found[-1] - found[-2]) > found[-2] // NEAR:
            low, high = sorted(found[-2:])
            each = (needed(high) - needed(low)) / (high - low)
            found.append(min(top, max(1, low + int((room - needed(low)) / each))) if each > 0 else found[-1])
        return found[-1]

    granule, most, goes_on = run.ranges[option]
    now = next((getattr(each, option) for each in (run, *vars(run).values()) if hasattr(each, option)), granule)
    best = search(granule, most // granule) or (search(1, granule - 1) if granule > 1 else 0)
    if best < most < best + granule and tried.fits(most):  # which no granule ends at
        best = most
    if best == most and goes_on:
        tried.fits(best + granule)
    return Largest(
        option=option, value=best or None, searched_all=best == most, available_bytes=room,
        probes=tuple(tried.probes[value] for value in sorted(tried.probes)),
        source="traced" if trace else "estimated",
    )  # fmt: skip


class _Tried:
    def __init__(self, probe: Callable[[int], Probe]) -> None:
        self.probe, self.probes = probe, dict[int, Probe]()

    def fits(self, value: int) -> bool:
        if value not in self.probes:
            self.probes[value] = self.probe(value)
        return self.probes[value].fits

    def needed(self, value: int) -> int:
        self.fits(value)
        return self.probes[value].needed_expected_bytes


TRIED, SHOWN = 2, 4  # cards of a size that decide whether it fits there, and that are shown


class Tried(Record):
    """What a run needs on a card, and what that gives it. `place`: the card, or how many of it."""

    place: str
    memory_bytes: int
    needed_bytes: int
    available_bytes: int | None
    fits: bool


class SmallestCard(Record):
    """Cards with the least memory on which a run fits, the fastest first. `too_small`: with the next less memory."""

    fitting: tuple[Tried, ...]
    too_small: Tried | None


def smallest_card(
    made: Forecast, cards: Iterable[Gpu], listen: Callable[[str], None] = lambda name: None
) -> SmallestCard:
    """Return the cards with the least memory on which the run fits, as many of each. Raises UserError."""
    known = sorted((gpu for gpu in cards if gpu.memory_bytes), key=_size)
    sizes = [sorted(group, key=_speed, reverse=True) for _, group in groupby(known, key=_size)]
    tries: dict[str, Tried | None] = {}
    problems: list[UserError] = []

    def tried(gpu: Gpu) -> Tried | None:
        listen(gpu.name)
        try:
            found = forecast(made.run, placed(made.where, gpu))
        except UserError as error:  # a card that cannot run it
            problems.append(error)
            return None
        needed, room = found.peak_bytes, found.available_bytes
        return Tried(
            place=found.plan.place, memory_bytes=gpu.memory_bytes or 0, needed_bytes=needed, available_bytes=room,
            fits=found.fits,
        )  # fmt: skip

    def of_size(place: int, most: int) -> list[Tried]:
        for gpu in sizes[place][:most]:
            if gpu.name not in tries:
                tries[gpu.name] = tried(gpu)
        return [found for gpu in sizes[place][:most] if (found := tries[gpu.name]) is not None]

    def fits(count: int) -> bool:
        return any(each.fits for each in of_size(len(sizes) - count, TRIED))

    count = bisect(fits, 0, len(sizes) + 1) if sizes else 0
    place = len(sizes) - count
    if problems and not any(tries.values()):
        raise problems[0]
    fitting = [each for each in of_size(place, SHOWN) if each.fits] if count else []
    small = of_size(place - 1, TRIED) if place else []
    return SmallestCard(fitting=tuple(fitting), too_small=small[0] if small else None)


def _size(gpu: Gpu) -> int:
    return math.ceil((gpu.memory_bytes or 0) / GIB)


def _speed(gpu: Gpu) -> float:
    return gpu.bandwidth_bytes_per_s or 0.0


def placed(where: Placement, gpu: Gpu) -> Placement:
    """Return the same number of cards of another kind, over the links that such cards usually have."""
    cards = where.cluster
    if cards is not None:
        cards = cluster_of(gpu, cards.world, cards.per_node)
    return replace(where, card=gpu, cluster=cards)

"""The largest batch_size, block_size or n_layer that fits a card: by the estimate at once, or by a search over traces.

No torch here.
"""

from collections.abc import Callable
from typing import Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.memory import Verdict, predict, worst_verdict
from foretrain.predict.plan import Plan, plan
from foretrain.predict.spec import StepName
from foretrain.predict.trace.forecast import Listener, answers_for

# Granule and highest value of each option: contexts go in steps of 64, as attention's tiles do, and only below 64 in
# single steps.
RANGES = {name: option.largest for name, option in OPTIONS.items() if option.largest}


class Probe(Record):
    """One value that was tried: the verdict that a plan of it has, and what the process needs there.

    `smallest_limit_bytes`: the least that the allocator may reserve, which only a trace says.
    """

    value: int
    verdict: Verdict | None
    needed_expected_bytes: int
    smallest_limit_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


class Largest(Record):
    """The largest value of an option that fits (None: not even 1 does), with every value that was tried.

    `source`: estimated, or traced.
    `searched_all`: it is the largest that is looked at, so that larger ones may fit too.
    """

    option: str
    step: StepName
    value: int | None
    searched_all: bool
    available_bytes: int
    probes: tuple[Probe, ...]
    source: Literal["estimated", "traced"] = "traced"


def estimated(base: Plan, knob: str, step: StepName) -> Largest:
    """The same by the estimate, which takes a second. Raises UserError as `largest` does."""
    available_bytes = _room(base, knob)
    probes: dict[int, Probe] = {}

    def fits(value: int) -> bool:
        if value not in probes:
            changed = base.model_copy(update={"config": _changed(base, knob, value)})
            memory = predict(changed.spec(step), available_bytes)
            probes[value] = Probe(
                value=value, verdict=worst_verdict(memory), needed_expected_bytes=memory.needed_bytes
            )  # fmt: skip
        return probes[value].fits

    granule, highest = RANGES[knob]
    top = highest // granule
    best = granule * _bisect(lambda count: fits(count * granule), 0, top + 1)
    if not best and granule > 1:
        best = _bisect(fits, 0, granule)
    return Largest(
        option=knob, step=step, value=best or None, searched_all=best == highest, available_bytes=available_bytes,
        probes=tuple(probes[value] for value in sorted(probes)), source="estimated",
    )  # fmt: skip


def _room(base: Plan, knob: str) -> int:
    """What the process may take. Raises UserError where nothing can be searched."""
    if knob not in RANGES:
        raise UserError("usage.largest_knob", option=knob, choices=sorted(RANGES))
    if base.available_bytes is None:
        raise UserError("usage.largest_unknown", gpu=base.gpu.name)
    return base.available_bytes


def largest(
    base: Plan,
    knob: str,
    step: StepName,
    settings: Settings | None = None,
    listen: Listener = lambda text: None,
) -> Largest:
    """Search from the ledger's guess outwards, then between what fits and what does not.

    Traces need not grow with a knob: the answer fits and its successor does not, but one beyond that might again.

    Raises UserError for a knob that is not one of RANGES or a card of unknown memory, and
    service.TraceUnavailable where nothing can be traced.
    """
    available_bytes = _room(base, knob)
    probes: dict[int, Probe] = {}

    def search(granule: int, top: int) -> int:
        """The largest multiple of the granule that fits, up to `top` granules; 0 where none does."""

        def fits(count: int) -> bool:
            value = count * granule
            if value not in probes:
                listen(f"{knob} = {value}")
                probes[value] = probe_of(_with(base, knob, value), step, value, settings, listen)
            return probes[value].fits

        def guess(count: int) -> bool:
            return worst_verdict(_with(base, knob, count * granule).memory_of(step)) == "fits"

        return granule * highest_that_fits(fits, max(1, _bisect(guess, 0, top + 1)), top)

    granule, highest = RANGES[knob]
    best = search(granule, highest // granule) or (search(1, granule - 1) if granule > 1 else 0)
    return Largest(
        option=knob, step=step, value=best or None, searched_all=best == highest, available_bytes=available_bytes,
        probes=tuple(probes[value] for value in sorted(probes)),
    )  # fmt: skip


def _changed(base: Plan, knob: str, value: int) -> RunConfig:
    """The config with one knob changed; evaluation keeps its own sizes where it has any."""
    config = base.config.model_copy(update={knob: value})
    if config.eval_block_size > config.block_size:
        config = config.model_copy(update={"eval_block_size": 0})
    return config


def _with(base: Plan, knob: str, value: int) -> Plan:
    """The estimated plan with one knob changed."""
    return plan(_changed(base, knob, value), base.gpu, name=base.name, used_by_others_bytes=base.used_by_others_bytes)


def probe_of(changed: Plan, step: StepName, value: int, settings: Settings | None, listen: Listener) -> Probe:
    """What a traced plan answers for one value."""
    (found,) = answers_for(changed, [step], settings, listen)
    return Probe(
        value=value,
        verdict=worst_verdict(found.memory),
        needed_expected_bytes=found.memory.needed_bytes,
        smallest_limit_bytes=found.smallest_limit_bytes,
    )


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number that fits, where `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def highest_that_fits(fits: Callable[[int], bool], guess: int, top: int) -> int:
    """Gallop from the guess until the answer is between two numbers; 0 where not even 1 fits."""
    if fits(guess):
        low, stride = guess, max(1, guess // 8)
        while low < top:
            high = min(top, low + stride)
            if not fits(high):
                return _bisect(fits, low, high)
            low, stride = high, stride * 2
        return top
    high, stride = guess, max(1, guess // 8)
    while high > 1:
        low = max(1, high - stride)
        if fits(low):
            return _bisect(fits, low, high)
        high, stride = low, stride * 2
    return 0

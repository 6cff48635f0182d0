"""Plans of changed runs, each made once, without what advice does not need. Memory does not depend on what other
programs use, and on the card only by its kind; so one estimate serves many states."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foretrain.advice.rules.base import Change, State
from foretrain.base.errors import UserError
from foretrain.config.checks import check
from foretrain.config.inference import Inference
from foretrain.config.sharing import HELD, STRATEGIES, Sharing, config_of_rank, sharing_problem
from foretrain.predict.memory import MemoryEstimate, RunMemory, Verdict, estimated
from foretrain.predict.plan import Timing, available, timing
from foretrain.predict.ranks import ALIKE, LEAST_GAIN, RankPlan, choose, rank_plan, rank_timing
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import sharings

MILLION = 1_000_000
Count = Callable[[object], None]  # hears of each estimate of memory, by what it is of


@dataclass(frozen=True)
class Outcome:
    """What a run of any kind takes. `state`: the run, a State or a PlannedState; `timed`: its time, where that is asked
    for. `rank`: how several cards share the step; their memory is that of one. `tensors`: their bytes in each phase,
    where they are known before the memory is."""

    state: Any
    found: Callable[[], MemoryEstimate | RunMemory] | RunMemory  # made, and judged, when it is first asked for
    available_bytes: int | None
    timed: Callable[[], Timing | None]
    rank: RankPlan | None = None
    tensors: Mapping[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def _made(self) -> MemoryEstimate | RunMemory:
        return self.found if isinstance(self.found, RunMemory) else self.found()

    @cached_property
    def memory(self) -> RunMemory:
        made = self._made
        return made if isinstance(made, RunMemory) else made.judged(self.available_bytes, self.state.gpu.memory_bytes)

    @property
    def least_bytes(self) -> int:
        return max(self.tensors.values(), default=0)

    @property
    def hopeless(self) -> bool:
        return self.available_bytes is not None and self.least_bytes > self.available_bytes

    @cached_property
    def verdict(self) -> Verdict | None:
        return self.memory.verdict

    @cached_property
    def fits(self) -> bool:
        """With the plan's margin; where nobody knows how much memory there is, nothing is refused."""
        if self.hopeless:
            return False
        if isinstance(self._made, RunMemory):
            return self.verdict in ("fits", None)
        return self._made.fits(self.available_bytes, self.state.gpu.memory_bytes)

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes

    @cached_property
    def timing(self) -> Timing | None:
        return self.timed()

    @property
    def token_s(self) -> float | None:
        return 1 / self.timing.tokens_per_s if self.timing else None

    @property
    def shards(self) -> bool:
        return self.rank is not None and STRATEGIES[self.rank.strategy].shards_weights

    @property
    def step_s(self) -> float | None:
        return self.timing.step_s.expected_s if self.timing else None

    @property
    def total_s(self) -> float | None:
        return self.timing.length_s.expected_s if self.timing else None

    @property
    def money(self) -> float | None:
        """What the run costs; of generating text a million tokens."""
        found = self.timing.money() if self.timing else None
        if found and isinstance(self.state.config, Inference):
            return found[1] * MILLION / self.state.tokens_per_step
        return found[1] if found else None


def outcome_of(state: State, count: Count, alone: Timing | None = None) -> Outcome | None:
    """The plan of a pretraining run: None where the config would be refused, or the cards cannot share its step.
    `alone`: the timing of the run as it is on one card, which that of several is compared with."""
    config = state.config
    if check(config.model_dump(), {})[0] is None:
        return None
    try:
        spec = StepSpec.checked(config, state.gpu, state.step)
    except UserError:
        return None
    room, _ = available(config, state.gpu, state.used_by_others_bytes)
    if state.world > 1:
        rank = _rank(spec, state, room, count, alone)
        return Outcome(state, rank.memory, room, lambda: rank.timing, rank) if rank else None

    def estimate() -> MemoryEstimate:
        made = estimated(spec)
        count(made.key)
        return made

    return Outcome(state, estimate, room, lambda: timing(spec))


def _rank(spec: StepSpec, state: State, room: int | None, count: Count, alone: Timing | None) -> RankPlan | None:
    """How several cards share the step, as `choose` would of all ways: the fastest that fits, of those about as
    fast the plainest; else what is tight, else what needs least."""
    cluster = state.cluster
    assert cluster is not None
    try:
        micro_batches = config_of_rank(state.config, state.world).gradient_accumulation_steps
    except UserError:
        return None
    possible = [each for each in sharings(cluster, micro_batches) if _may(state, each, micro_batches)]
    if not possible:
        return None
    made: dict[str, RankPlan] = {}

    def plan_of(sharing: Sharing) -> RankPlan:
        if sharing.id not in made:
            count((state, sharing.id))
            made[sharing.id] = rank_plan(spec, cluster, sharing, available_bytes=room, alone=alone)
        return made[sharing.id]

    times = {s.id: rank_timing(spec, cluster, s)[0] if len(possible) > 1 else None for s in possible}
    steps = {id: time.step_s.expected_s if time else 0.0 for id, time in times.items()}
    for sharing in sorted(possible, key=lambda each: steps[each.id]):
        verdict = plan_of(sharing).verdict
        if verdict not in ("fits", None):
            continue
        alike = [each for each in possible if steps[each.id] <= ALIKE * steps[sharing.id]]
        return next(plan_of(each) for each in alike if plan_of(each).verdict == verdict)
    ranks = tuple(made[sharing.id] for sharing in possible)
    return choose(ranks) or min(ranks, key=lambda rank: (rank.memory.needed_bytes, steps[rank.id]))


class Planner:
    """Outcomes by what they are of, such as a state, each planned once. `plan`: by the kind of run. `planned` counts
    the different estimates of memory that they took."""

    def __init__(self, plan: Callable[[Any, Count], Outcome | None] = outcome_of) -> None:
        self._plan = plan
        self._asked: set[object] = set()
        self._outcomes: dict[Any, Outcome | None] = {}

    @property
    def planned(self) -> int:
        return len(self._asked)

    def outcome(self, state: Any) -> Outcome | None:
        """None where the changed run would be refused."""
        if state not in self._outcomes:
            self._outcomes[state] = self._plan(state, self._asked.add)
        return self._outcomes[state]

    def smallest_change(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
        """Return the first change that fits, of ones that need less and less, else the last; None where all would be
        refused."""

        def made(at: int) -> Outcome | None:
            return self.outcome(changes[at].applied(state))

        def fits(at: int) -> bool:
            found = made(at)
            return found is not None and found.fits

        last = len(changes) - 1
        if last < 0:
            return None
        strongest = made(last)
        at = last if strongest and not strongest.fits else bisect_left(range(last), True, key=fits)
        found = made(at)
        return (changes[at], found) if found else None

    def fastest(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
        """The one with the shortest run, of those that fit: the shorter ones' memory is asked for first."""
        found = [(change, made) for change in changes if (made := self.outcome(change.applied(state)))]
        timed = [pair for pair in found if pair[1].total_s is not None]
        timed.sort(key=lambda pair: pair[1].total_s or 0.0)
        return next((pair for pair in timed if pair[1].fits), None)

    def fastest_of_rising(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
        """The one with the least time for a token, of those that fit; a stronger change has to be clearly faster. They
        need more and more: what comes after one that does not fit is not looked at."""
        best: tuple[Change, Outcome] | None = None
        for change in changes:
            found = self.outcome(change.applied(state))
            if found is not None and not found.fits:
                return best or (change, found)
            if found is not None and (best is None or (found.token_s or 0) * LEAST_GAIN < (best[1].token_s or 0)):
                best = change, found
        return best


def _may(state: State, sharing: Sharing, micro_batches: int) -> bool:
    """Whether a way is among those that are looked at; one micro-batch has no gradients to hold back."""
    ways = state.ways if micro_batches > 1 else [way.removesuffix(HELD) for way in state.ways]
    return (not ways or sharing.id in ways) and sharing_problem(state.config, sharing) is None

"""Plans of changed runs, each made once: what `plan` would say of a state, without what advice does not need.

Memory does not depend on what other programs use, and on the card only by its kind; so one ledger serves many states.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from foretrain.advice.rules.base import Change, State
from foretrain.base.errors import UserError
from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.config.sharing import HELD, STRATEGIES, Sharing, config_of_rank, sharing_problem
from foretrain.predict.memory import MARGIN_BYTES, Asked, Ledger, RunMemory, Verdict, estimated
from foretrain.predict.plan import Timing, available, timing
from foretrain.predict.ranks import ALIKE, LEAST_GAIN, RankPlan, choose, rank_plan, rank_timing
from foretrain.predict.spec import TOLD_APART, StepSpec
from foretrain.predict.speed.ranks import sharings


@dataclass(frozen=True)
class Outcome:
    """What a run takes in one state. `rank`: how several cards share the step; their memory is that of one."""

    state: State
    found: Callable[[], Ledger] | RunMemory  # an estimate is made, and judged, when it is first asked for
    available_bytes: int | None
    rank: RankPlan | None = None

    @property
    def is_known(self) -> bool:
        """Whether an estimate has been made."""
        return "_ledger" in vars(self) and self._ledger is not None

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None
        return self._ledger

    @cached_property
    def _ledger(self) -> Ledger | None:
        return None if isinstance(self.found, RunMemory) else self.found()

    @cached_property
    def memory(self) -> RunMemory:
        if isinstance(self.found, RunMemory):
            return self.found
        return self.ledger.judged(self.available_bytes, self.state.gpu.memory_bytes)

    @cached_property
    def verdict(self) -> Verdict | None:
        return self.memory.verdict

    @cached_property
    def fits(self) -> bool:
        """With the plan's margin; where nobody knows how much memory there is, nothing is refused."""
        if self._ledger is None:
            return self.verdict in ("fits", None)
        return self._ledger.fits(self.available_bytes, self.state.gpu.memory_bytes)

    @property
    def needed_bytes(self) -> int:
        """What the worst phase is expected to need."""
        return self.memory.needed_bytes

    def part_to_give_up(self, least: "Outcome") -> float:
        """How far it is from this need to that of `least`, by a line, until it fits; 0 to 1.

        On a card by what is allocated: before the allocator fails, it frees what it only keeps.
        """
        room = self.available_bytes or 0
        if self.memory.worst.reserved_bytes is None:
            now, then = self.needed_bytes, least.needed_bytes
        else:
            now, then = self.memory.worst.allocated_bytes, least.memory.worst.allocated_bytes
            room -= self.memory.context.expected_bytes + MARGIN_BYTES
        return min(max((now - room) / (now - then), 0.0), 1.0) if now > then else 1.0

    @cached_property
    def timing(self) -> Timing | None:
        return self.rank.timing if self.rank else timing(self.state.spec)

    @property
    def token_s(self) -> float | None:
        """The time for a token."""
        return 1 / self.timing.tokens_per_s if self.timing else None

    @property
    def shards(self) -> bool:
        """Whether weights are cut among the cards."""
        return self.rank is not None and STRATEGIES[self.rank.strategy].shards_weights

    @property
    def step_s(self) -> float | None:
        return self.timing.step_s.expected_s if self.timing else None

    @property
    def total_s(self) -> float | None:
        return self.timing.length_s.expected_s if self.timing else None

    @property
    def money(self) -> float | None:
        found = self.timing.money() if self.timing else None
        return found[1] if found else None


class Planner:
    """Outcomes by state. `planned` counts the different estimates of memory that they took. `alone`: the timing of the
    run as it is on one card, which that of several is compared with."""

    def __init__(self, alone: Timing | None = None) -> None:
        self._alone = alone
        self._asked: set[object] = set()
        self._outcomes: dict[State, Outcome | None] = {}

    @property
    def planned(self) -> int:
        return len(self._asked)

    def outcome(self, state: State) -> Outcome | None:
        """None where the config would be refused, or the cards cannot share its step."""
        if state not in self._outcomes:
            self._outcomes[state] = self._made(state)
        return self._outcomes[state]

    def _made(self, state: State) -> Outcome | None:
        config = state.config
        if check(config.model_dump(), {})[0] is None:
            return None
        try:
            spec = StepSpec.checked(config, state.gpu, state.step)
        except UserError:
            return None
        room, _ = available(config, state.gpu, state.used_by_others_bytes)
        if state.world == 1:
            return Outcome(state, partial(self._estimated, spec), room)
        rank = self._rank(spec, state, room)
        return Outcome(state, rank.memory, room, rank) if rank else None

    def _rank(self, spec: StepSpec, state: State, room: int | None) -> RankPlan | None:
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
                self._asked.add((state, sharing.id))
                made[sharing.id] = rank_plan(spec, cluster, sharing, available_bytes=room, alone=self._alone)
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

    def _estimated(self, spec: StepSpec) -> Ledger:
        ledger = estimated(spec)
        self._asked.add(ledger.key)
        return ledger

    def mildest(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
        """The first change that fits, of changes that need less and less; the last one where none does.

        None where there is none, or all would be refused.
        """
        if not changes:
            return None
        last = len(changes) - 1
        found = self.outcome(changes[last].applied(state))
        if found is not None and not found.fits:
            return changes[last], found
        best = (changes[last], found) if found else None
        # The changes at `low` and before do not fit, the one at `high` does: it lies where the need, as a line, meets
        # what there is; in the middle where three such guesses took off less than half each.
        low, above = -1, self._outcomes.get(state)
        high, below = last + (found is None), found
        timid = 0
        while high - low > 1:
            at, before = (low + high) // 2, high - low
            if timid < 3 and above is not None and below is not None:
                at = min(max(low + math.ceil(before * above.part_to_give_up(below)), low + 1), high - 1)
            found = self.outcome(changes[at].applied(state))
            if found is not None and found.fits:
                best, high, below = (changes[at], found), at, found
            else:
                low, above = at, found
            timid = timid + 1 if timid < 3 and 2 * (high - low) > before else 0
        return best

    def quickest(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
        """The one with the shortest run, of those that fit: the shorter ones' memory is asked for first."""
        found = [(change, made) for change in changes if (made := self.outcome(change.applied(state)))]
        timed = [pair for pair in found if pair[1].total_s is not None]
        timed.sort(key=lambda pair: pair[1].total_s or 0.0)
        beyond = self._beyond(state, [made for _, made in timed])
        for change, made in timed:
            if beyond is not None and is_larger(made, beyond):
                self._asked.add(Asked(made.state.spec).key)
            elif made.fits:
                return change, made
        return None

    def quickest_of_rising(self, state: State, changes: Sequence[Change]) -> tuple[Change, Outcome] | None:
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

    def _beyond(self, start: State, found: Sequence[Outcome]) -> Outcome | None:
        """One whose tensors alone are too large, so that those of every larger micro-batch are, too: the least of which
        a line through what is known of the start says so."""
        now = self._outcomes.get(start)
        if now is None or not now.is_known or now.available_bytes is None or start.gpu.kind != "cuda":
            return None
        alike = sorted((o for o in found if is_larger(o, now)), key=lambda o: o.state.config.batch_size)
        tensors, fixed = now.ledger.tensors_bytes, now.ledger.peaks["resume"].nbytes
        for each in alike:
            times = each.state.config.batch_size / start.config.batch_size
            if fixed + (tensors - fixed) * times > now.available_bytes:
                beyond = estimated(each.state.spec).is_beyond(now.available_bytes, start.gpu.memory_bytes)
                return each if beyond else None
        return None


def _may(state: State, sharing: Sharing, micro_batches: int) -> bool:
    """Whether a way is among those that are looked at; one micro-batch has no gradients to hold back."""
    ways = state.ways if micro_batches > 1 else [way.removesuffix(HELD) for way in state.ways]
    return (not ways or sharing.id in ways) and sharing_problem(state.config, sharing) is None


def is_larger(one: Outcome, other: Outcome) -> bool:
    """Whether it is the same run with a larger micro-batch, whose every tensor is as large or larger."""
    a, b = one.state, other.state
    if a == b or a.spec.variant.auto_chunker or (a.gpu, a.step) != (b.gpu, b.step):
        return a == b
    larger = a.config.batch_size >= b.config.batch_size and a.config.eval_batch >= b.config.eval_batch
    return larger and one.available_bytes == other.available_bytes and _uncut(a.config) == _uncut(b.config)


def _uncut(config: RunConfig) -> RunConfig:
    """The config without what a micro-batch is."""
    accumulation = min(TOLD_APART, config.gradient_accumulation_steps)
    uncut = {
        "batch_size": 0, "eval_batch_size": 0, "eval_iters": 0, "eval_sequences": 0, "total_batch_size": 0,
        "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    return config.model_copy(update=uncut)

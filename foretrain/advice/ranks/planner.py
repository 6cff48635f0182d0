"""Plans of changed runs on several cards, each made once: what `plan --gpus` would say of the way that is meant.

Times are quick to make, memory is not: of ways that are slower than one that fits none is estimated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.advice.ranks.rules.base import Change, State
from foretrain.base.errors import UserError
from foretrain.config.checks import check
from foretrain.config.sharing import HELD, Sharing, config_of_rank, sharing_problem
from foretrain.predict.memory import StepMemory, Verdict, predict, worst_verdict
from foretrain.predict.plan import Timing, available, timing
from foretrain.predict.ranks.plan import ALIKE, LEAST_GAIN, choose, rank_plan, rank_timing
from foretrain.predict.ranks.record import RankPlan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import sharings


@dataclass(frozen=True)
class Outcome:
    """What a run takes in one state. `rank`: the way that is meant; None on one card."""

    state: State
    memory: StepMemory
    timing: Timing | None
    available_bytes: int | None
    rank: RankPlan | None = None

    @property
    def verdict(self) -> Verdict | None:
        return worst_verdict(self.memory)

    @property
    def fits(self) -> bool:
        """With the plan's margin; where nobody knows how much memory there is, nothing is refused."""
        return self.verdict in ("fits", None)

    @property
    def needed_bytes(self) -> int:
        """What the worst phase is expected to need."""
        return self.memory.needed_bytes

    @property
    def money(self) -> float | None:
        found = self.timing.money() if self.timing else None
        return found[1] if found else None


class Planner:
    """Outcomes by state. `alone`: the timing of the run as it is on one card, which others are compared with."""

    def __init__(self, alone: Timing | None) -> None:
        self._alone = alone
        self._outcomes: dict[State, Outcome | None] = {}
        self.planned = 0

    def outcome(self, state: State) -> Outcome | None:
        """None where the config would be refused, or the cards cannot share its step."""
        if state not in self._outcomes:
            self._outcomes[state] = self._made(state)
        return self._outcomes[state]

    def _made(self, state: State) -> Outcome | None:
        config, gpu = state.config, state.cluster.gpu
        if check(config.model_dump(), {})[0] is None:
            return None
        room, _ = available(config, gpu, state.used_by_others_bytes)
        try:
            spec = StepSpec.checked(config, gpu)
            if state.cluster.world == 1:
                self.planned += 1
                return Outcome(state, predict(spec, room), timing(spec), room)
            mine = config_of_rank(config, state.cluster.world)
        except UserError:
            return None
        known = sharings(state.cluster, mine.gradient_accumulation_steps)
        possible = [each for each in known if _may(state, each, mine.gradient_accumulation_steps)]
        if not possible:
            return None
        rank = self._meant(spec, state, possible, room)
        return Outcome(state, rank.memory, rank.timing, room, rank)

    def _meant(self, spec: StepSpec, state: State, possible: list[Sharing], room: int | None) -> RankPlan:
        """As `choose` would of all: the quickest that fits, of those about as quick the plainest; else what is tight,
        else what needs least."""
        made: dict[str, RankPlan] = {}

        def row(sharing: Sharing) -> RankPlan:
            if sharing.id not in made:
                self.planned += 1
                made[sharing.id] = rank_plan(spec, state.cluster, sharing, available_bytes=room, alone=self._alone)
            return made[sharing.id]

        times = {s.id: rank_timing(spec, state.cluster, s)[0] if len(possible) > 1 else None for s in possible}
        steps = {id: time.step_s.expected_s if time else 0.0 for id, time in times.items()}
        for sharing in sorted(possible, key=lambda each: steps[each.id]):
            verdict = row(sharing).verdict
            if verdict not in ("fits", None):
                continue
            alike = [each for each in possible if steps[each.id] <= ALIKE * steps[sharing.id]]
            return next(row(each) for each in alike if row(each).verdict == verdict)
        ranks = tuple(made[sharing.id] for sharing in possible)
        return choose(ranks) or min(ranks, key=lambda rank: (rank.memory.needed_bytes, steps[rank.id]))

    def mildest(self, state: State, changes: Sequence[Change]) -> Outcome | None:
        """The first change that fits, of changes that need less and less; the last where none does."""
        low, high = 0, len(changes) - 1
        best = self.outcome(changes[high].applied(state))
        if best is None or not best.fits:
            return best
        while low < high:
            middle = (low + high) // 2
            found = self.outcome(changes[middle].applied(state))
            if found is not None and found.fits:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def quickest(self, state: State, changes: Sequence[Change]) -> Outcome | None:
        """The one with the least time for a token, of those that fit; a stronger change has to be clearly quicker. They
        need more and more: what comes after one that does not fit is not looked at."""
        best: Outcome | None = None
        for change in changes:
            found = self.outcome(change.applied(state))
            if found is None:
                continue
            if not found.fits:
                return best or found
            if best is None or _token_s(found) * LEAST_GAIN < _token_s(best):
                best = found
        return best


def _may(state: State, sharing: Sharing, micro_batches: int) -> bool:
    """Whether a way is among those that are looked at; one micro-batch has no gradients to hold back."""
    ways = state.ways if micro_batches > 1 else [way.removesuffix(HELD) for way in state.ways]
    return (not ways or sharing.id in ways) and sharing_problem(state.config, sharing) is None


def _token_s(outcome: Outcome) -> float:
    return 1 / outcome.timing.tokens_per_s if outcome.timing else 0.0

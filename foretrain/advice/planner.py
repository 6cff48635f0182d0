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
from foretrain.predict.memory import MARGIN_BYTES, Asked, Ledger, StepMemory, Verdict, estimated, worst_verdict
from foretrain.predict.plan import Timing, available, timing
from foretrain.predict.spec import TOLD_APART, StepSpec


@dataclass(frozen=True)
class Outcome:
    """What a run takes in one state."""

    state: State
    found: Callable[[], Ledger] | StepMemory  # an estimate is made, and judged, when it is first asked for
    available_bytes: int | None

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
        return None if isinstance(self.found, StepMemory) else self.found()

    @cached_property
    def memory(self) -> StepMemory:
        if isinstance(self.found, StepMemory):
            return self.found
        return self.ledger.judged(self.available_bytes, self.state.gpu.memory_bytes)

    @cached_property
    def verdict(self) -> Verdict | None:
        return worst_verdict(self.memory)

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
        return timing(self.state.spec)

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
    """Outcomes by state. `planned` counts the different estimates of memory that they took."""

    def __init__(self) -> None:
        self._asked: set[tuple[object, ...]] = set()
        self._outcomes: dict[State, Outcome | None] = {}

    @property
    def planned(self) -> int:
        return len(self._asked)

    def outcome(self, state: State) -> Outcome | None:
        """None where the config would be refused."""
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
        return Outcome(state, partial(self._estimated, spec), room)

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

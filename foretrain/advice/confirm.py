"""Advice held against the trace (`foretrain advise --exact`): what the replay denies is no longer advised, and what
only a trace knows (the allocator's segments, Inductor's own savings) can be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretrain.advice.advisor import search_of, state_of
from foretrain.advice.planner import Outcome
from foretrain.advice.record import Advice, Advices, Confirmation, Idle
from foretrain.advice.rules import RULES
from foretrain.advice.rules.base import State
from foretrain.advice.search import WORTH, Search
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.plan import Plan, plan, timing
from foretrain.predict.trace.forecast import Listener, answers_for
from foretrain.predict.trace.memory import Exact

SettingsOf = Callable[[Plan], Settings]


@dataclass(frozen=True)
class Tracer:
    """Exact memory of states. `settings_of`: the allocator's settings of a plan's run."""

    settings_of: SettingsOf
    listen: Listener

    def exact(self, state: State, what: str) -> Exact:
        """Raises service.TraceUnavailable."""
        self.listen(what)
        changed = plan(state.config, state.gpu, used_by_others_bytes=state.used_by_others_bytes)
        settings = self.settings_of(changed)
        if "expandable_segments:True" in state.config.allocator_settings:  # nanoGPT has it from its environment
            settings = replace(settings, expandable_segments=True)
        (found,) = answers_for(changed, [state.step], settings, self.listen)
        return found


def traced(
    changes: Sequence[Advice], count: int, confirmation_of: Callable[[Advice], Confirmation]
) -> tuple[Advice, ...]:
    """The changes of any kind of run, the first `count` with what traces say of them."""
    first = (each.model_copy(update={"confirmation": confirmation_of(each)}) for each in changes[:count])
    return (*first, *changes[count:])


def confirm(
    made: Advices, base: Plan, settings_of: SettingsOf, count: int, listen: Listener = lambda text: None
) -> Advices:
    """The same with what traces say of the run as it is, of the first `count` advices, and of rules that need a trace.
    Raises service.TraceUnavailable."""
    tracer = Tracer(settings_of, listen)
    search = search_of(base, made.trainer, made.goal)
    now = tracer.exact(search.state, made.name)

    def confirmation_of(advice: Advice) -> Confirmation:
        return _confirmation(tracer.exact(state_of(advice, base), " + ".join(advice.rules)), now, made)

    first = traced(made.advised[:count], count, confirmation_of)
    kept = [advice for advice in first if advice.confirmation and advice.confirmation.holds]
    denied = [_denied(advice, advice.confirmation) for advice in first if advice.confirmation and advice not in kept]
    found, idle = _only_traced(made, search, now, tracer)
    answered = {each.rule for each in idle} | {each.rules[-1] for each in found}
    useless = [each for each in made.useless if each.rule not in answered]
    advised = sorted([*kept, *found], key=lambda each: (each.gpu != made.gpu and made.goal != "cost", each.price))
    return made.model_copy(
        update={
            "advised": (*advised, *made.advised[count:]), "useless": (*denied, *useless, *idle),
            "now_confirmation": _confirmation(now, None, made), "nothing_fits": made.nothing_fits and not advised,
        }
    )  # fmt: skip


def _denied(advice: Advice, exact: Confirmation) -> Idle:
    reason = "trace_tight" if exact.verdict in ("tight", "may_not_fit") else "trace_denies"
    values = {"needed": exact.needed_bytes, "available": advice.effect.available_bytes or 0}
    return Idle(rule="+".join(advice.rules), reason=reason, values=values)


def _confirmation(found: Exact, now: Exact | None, made: Advices) -> Confirmation:
    """It holds where the replay survives with its margin; and, where memory is the goal, less is needed than now."""
    verdict = found.memory.verdict
    saved = None if now is None else now.memory.needed_bytes - found.memory.needed_bytes
    to_save = made.goal == "fit" and made.now.verdict in ("fits", None)
    holds = verdict in ("fits", None) and (saved is None or not to_save or saved > 0)
    return Confirmation(verdict=verdict, needed_bytes=found.memory.needed_bytes, saved_bytes=saved, holds=holds)


def _only_traced(made: Advices, search: Search, now: Exact, tracer: Tracer) -> tuple[list[Advice], list[Idle]]:
    """The rules that only a trace knows, for the trainer that runs now, against the traced run as it is."""
    if made.goal != "fit":
        return [], []
    search = replace(search, base=replace(search.base, found=now.memory))
    found: list[Advice] = []
    idle: list[Idle] = []
    for rule in RULES:
        options = rule.changes(search.state) if rule.traced else ()
        if not options or (rule.ours and made.step == "nanogpt"):
            continue
        state = options[0].applied(search.state)
        exact = tracer.exact(state, rule.id)
        outcome = Outcome(state, exact.memory, search.base.available_bytes, lambda state=state: timing(state.spec))
        saved = search.saved(outcome)
        if outcome.fits and (search.must_fit or saved >= WORTH * search.base.needed_bytes):
            confirmation = _confirmation(exact, now, made)
            advice = search.advice(search.of((rule.id,), outcome))
            found.append(advice.model_copy(update={"confirmation": confirmation}))
        else:
            room = search.base.available_bytes or 0
            lives = exact.smallest_limit_bytes + exact.memory.context.expected_bytes
            values = {"saved": max(0, saved), "needed": lives, "available": room}
            reason = "traced_short" if search.must_fit else "traced_little"
            idle.append(Idle(rule=rule.id, reason=reason, values=values))
    return found, idle

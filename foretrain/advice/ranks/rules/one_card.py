"""What also helps on one card and leaves the model as it is: techniques, compilation, dtypes, the allocator."""

from collections.abc import Iterator, Sequence

from foretrain.advice.ranks.rules.base import Change, Kind, Rule, State
from foretrain.advice.rules import RULES as ALONE
from foretrain.advice.rules import base

# What has a rule of its own here, or is not of the config of foretrain's step, or several cards cannot do.
ELSEWHERE = {"foretrain_step", "free_others", "micro_batch", "larger_micro_batch", "optimizer_offload"}


def _of(rule: base.Rule, kind: Kind, place: int) -> Rule:
    def here(state: State) -> base.State:
        return base.State(state.config, state.cluster.gpu, "foretrain", state.used_by_others_bytes)

    def usual(found: Sequence[Change]) -> int:
        return rule.usual([base.Change(change.options) for change in found])

    return Rule(
        rule.id, kind, rule.exactness, rule.reference,
        lambda state, way: [Change(dict(change.knobs)) for change in rule.options(here(state))],
        lambda state, way: rule.idle(here(state)),
        keeps_way=True, redraws=rule.redraws, toll=rule.toll, usual=usual, place=place,
    )  # fmt: skip


def _rules() -> Iterator[Rule]:
    for number, rule in enumerate(ALONE):
        same = rule.exactness in ("exact", "rounding") and not rule.traced
        if same and rule.kind in ("memory", "speed", "both") and rule.id not in ELSEWHERE:
            yield _of(rule, rule.kind, 40 + number)


RULES = tuple(_rules())

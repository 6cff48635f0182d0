"""The options that make a change on several cards, so that a plan with them is the one that was promised."""

from typing import Any

from foretrain.advice.ranks.record import ClusterChange
from foretrain.advice.ranks.rules import BY_ID
from foretrain.config.sharing import STRATEGIES, of_one_strategy
from foretrain.predict.ranks.record import ClusterPlan


def options(plan: ClusterPlan, change: ClusterChange) -> dict[str, Any]:
    """Values by option. How the cards share a step is among them where a plan could pick another way by itself."""
    values: dict[str, Any] = {setting.option: setting.after for setting in change.settings}
    now, way = plan.best or plan.least, change.way
    if way.id == now.id and not any(BY_ID[rule].keeps_way for rule in change.rules if rule in BY_ID):
        return values
    if way.strategy != now.strategy or not of_one_strategy(plan.ways):
        values["strategy"] = way.strategy
    if STRATEGIES[way.strategy].shards_weights and plan.ways != (way.id,):
        values["hold_gradients"] = way.holds_gradients
    return values

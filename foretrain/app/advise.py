"""What to change in a run, each change planned. `foretrain.advise` for Python."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from foretrain.advice.advisor import advise as advise_plan
from foretrain.advice.record import Advices
from foretrain.advice.rules.base import Goal
from foretrain.app.limits import Limits, make_plans, priced, rents
from foretrain.app.plan import Config, resolved_of, targets
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.plan import Plan

if TYPE_CHECKING:
    from foretrain.advice import confirm
    from foretrain.app import exact
    from foretrain.predict.trace import service
else:  # advice without traces does not wait for what they add
    confirm, exact = Later("foretrain.advice.confirm"), Later("foretrain.app.exact")
    service = Later("foretrain.predict.trace.service")


def advise(
    config: Config = "gpt2-124m",
    gpu: str = "auto",
    *,
    used_by_others: str = "",
    goal: Goal | None = None,
    price: str | None = None,
    exact: int = 0,
    listen: Callable[[str], None] = lambda state: None,
    **options: object,
) -> Advices:
    """What to change, ranked by gain and cost: `foretrain.advise("gpt2-774m", "RTX 3060").advised[0].settings`.

    `config`, `options`: as in `plan`. `used_by_others`: memory that other programs use on the card, such as "2GB".
    `goal`: "fit", "speed", "cost" or "quality"; None: what the run needs most. `price`: rent per hour, "0.35" or by
    card "4090=0.35,A100=1.2". `exact`: how many of the changes are traced (seconds each, needs torch), of which
    `listen` hears. Bytes and seconds, as the names say.
    Raises UserError for what cannot be planned or traced.
    """
    base = base_plan(resolved_of(config, options), gpu, used_by_others, price)
    found = advices(base, goal, price)
    return confirmed(found, base, exact, listen) if exact else found


def base_plan(resolved: ResolvedConfig, gpu: str, used_by_others: str, price: str | None) -> Plan:
    found = targets(gpu, used_by_others, resolved.config)
    if len(found) > 1:
        raise UserError("usage.one_card_advise", count=len(found))
    by_card = price is not None and "=" in price
    resolved = priced(resolved, Limits(price=None if by_card else price))
    own = rents(price, resolved.config).get(found[0].gpu.name)
    if own is not None:
        resolved = replace(resolved, config=resolved.config.model_copy(update={"price_per_hour": own}))
    return make_plans(resolved, found, Limits())[0]


def advices(base: Plan, goal: Goal | None, price: str | None = None) -> Advices:
    return advise_plan(base, goal=goal, rents=rents(price, base.config))


def confirmed(
    found: Advices, base: Plan, count: int, listen: Callable[[str], None] = lambda state: None
) -> Advices:  # fmt: skip
    try:
        return confirm.confirm(found, base, exact.settings_of, count, listen)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None

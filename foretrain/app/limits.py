"""Money and limits of a plan: the rent of each card, and the inverse questions of --within, --tokens and --best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.app.plan import DataOf, make_plan
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.quantities import Limit, currency_code, parse_count, parse_limit, parse_price, read
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.writer import check_writable
from foretrain.data.corpus import data_of_config
from foretrain.hardware.catalogue import Gpu, find
from foretrain.hardware.devices import Target

if TYPE_CHECKING:
    from foretrain.advice import best as models
    from foretrain.advice.best import Best
    from foretrain.predict import plan as planner
    from foretrain.predict.plan import Plan
    from foretrain.predict.ranks import ClusterPlan
else:
    models, planner = Later("foretrain.advice.best"), Later("foretrain.predict.plan")


@dataclass(frozen=True)
class Limits:
    price: str | None = None
    co2: float | None = None
    within: str | None = None
    tokens: str | None = None
    best: bool = False
    data_tokens: str | None = None
    write: Path | None = None
    given: frozenset[str] = frozenset()  # options that the user set, in a file or on the command line

    @property
    def asks(self) -> bool:
        return self.best or self.within is not None or self.tokens is not None

    def limit(self) -> Limit:
        if self.tokens is not None:
            count = read(parse_count, self.tokens, _bad("usage.bad_count", "--tokens", self.tokens))
            return Limit(kind="tokens", amount=count, text=self.tokens)
        return read(parse_limit, self.within or "", _bad("usage.bad_limit", "--within", self.within or ""))


def _bad(id: str, option: str, typed: str) -> UserError:
    return UserError(id, option=option, value=typed[:80])


def check_limits(limits: Limits, targets: int, traces: bool) -> None:
    """Raise UserError for what is wrong with these options, before anything is computed."""
    if limits.asks and traces:
        raise UserError("usage.two_questions")
    if limits.within is not None and limits.tokens is not None:
        raise UserError("usage.two_limits")
    if limits.asks and targets > 1:
        raise UserError("usage.one_card_limits", count=targets)
    if limits.best and limits.within is None:
        raise UserError("usage.best_within")
    if limits.write is not None:
        if not limits.asks:
            raise UserError("usage.write_nothing")
        check_writable(limits.write)
    if limits.asks:
        limits.limit()


def priced(resolved: ResolvedConfig, limits: Limits) -> ResolvedConfig:
    """Put the price (where it is one for all cards), CO2 and tokens of data into the config's options."""
    update: dict[str, Any] = {}
    sources = dict(resolved.sources)
    if limits.price is not None and "=" not in limits.price:
        if resolved.sources.get("price_per_kwh", "").startswith("--"):
            raise UserError("usage.price_and_power")
        update["price_per_hour"] = _price(limits.price, limits.price, resolved.config.currency)
        sources["price_per_hour"] = f"--price {limits.price}"
    if limits.co2 is not None:
        if not 0 < limits.co2 <= 1e5:
            raise UserError("usage.bad_co2", value=limits.co2)
        update["co2_per_kwh"] = limits.co2
        sources["co2_per_kwh"] = f"--co2 {limits.co2:g}"
    if limits.data_tokens is not None:
        bad = _bad("usage.bad_count", "--data-tokens", limits.data_tokens)
        update["dataset_tokens"] = read(parse_count, limits.data_tokens, bad)
        sources["dataset_tokens"] = f"--data-tokens {limits.data_tokens}"
    return replace(resolved, config=resolved.config.model_copy(update=update), sources=sources)


def _price(text: str, typed: str, currency: str) -> float:
    money = read(parse_price, text, _bad("usage.bad_price", "--price", typed))
    if money.currency and money.currency != currency_code(currency):
        raise UserError("usage.currency", text=f"--price {typed[:80]}", typed=money.currency, currency=currency)
    return money.amount


def _is(name: str, gpu: Gpu) -> bool:
    if name.lower() == "cpu":
        return gpu.kind == "cpu"
    try:
        found = find(name)
        return gpu.name in (found.name, *found.choices)
    except UserError as error:
        return gpu.name in error.values.get("choices", ())


def prices_of(limits: Limits, config: RunConfig, gpus: list[Gpu]) -> list[float]:
    """Return the rent of each card, from --price "4090=0.35,A100=1.2"; the config's own where none is given."""
    found = [config.price_per_hour] * len(gpus)
    if limits.price is None or "=" not in limits.price:
        return found
    for part in limits.price.split(","):
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise UserError("usage.bad_price", option="--price", value=limits.price[:80])
        hit = [i for i, gpu in enumerate(gpus) if _is(name.strip(), gpu)]
        if not hit:
            raise UserError("usage.price_of_no_card", name=name.strip()[:80], cards=[gpu.name for gpu in gpus])
        for i in hit:
            found[i] = _price(text.strip(), limits.price, config.currency)
    return found


def rents(price: str | None, config: RunConfig) -> dict[str, float]:
    """Return the hourly rent of each card that a price names. Raises UserError."""
    if price is None or "=" not in price:
        return {}
    gpus = [find(part.partition("=")[0].strip()) for part in price.split(",")]
    return {gpu.name: rent for gpu, rent in zip(gpus, prices_of(Limits(price=price), config, gpus), strict=True)}


def make_plans(
    resolved: ResolvedConfig,
    found: Sequence[Target],
    limits: Limits,
    step_time: float | None = None,
    logged_mfu: float | None = None,
    data_of: DataOf = data_of_config,
) -> "list[Plan]":
    prices = prices_of(limits, resolved.config, [target.gpu for target in found])
    plans = []
    for target, rent in zip(found, prices, strict=True):
        own = replace(resolved, config=resolved.config.model_copy(update={"price_per_hour": rent}))
        plans.append(make_plan(own, target, step_time, logged_mfu, data_of))
    return plans


def best_of(
    plan: "Plan | ClusterPlan", limits: Limits, listen: Callable[[int, int], None] = lambda done, of: None
) -> "Best":
    if plan.timing is not None and plan.timing.source.startswith("measured"):
        raise UserError("usage.best_speed")
    step = plan.step if isinstance(plan, planner.Plan) else "foretrain"
    return models.best(plan, limits.limit(), step, limits.given, listen)

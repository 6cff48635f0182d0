"""A plan for several cards: `foretrain plan CONFIG --gpus "2 x RTX 4090"`, and `foretrain.plan_cluster` for Python."""

from dataclasses import replace
from functools import partial
from typing import Any

from foretrain.advice.advisor import advise
from foretrain.advice.record import Advices
from foretrain.advice.rules.base import Goal
from foretrain.app.exact import Listen, settings_of
from foretrain.app.limits import Limits, check_limits, priced, prices_of
from foretrain.app.plan import Cards, Config, DataOf, check_speed, make_plan, resolved_of, target_of
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.sharing import micro_batch_choices
from foretrain.data.corpus import data_of_config
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.predict.ranks import ClusterPlan, share, timed, traced, with_pays


def plan_cluster(
    config: Config = "gpt2-124m",
    gpus: str | Cluster = "",
    *,
    gpu: str | Gpu = "auto",
    link: str = "",
    network: str = "",
    used_by_others: str | int = 0,
    **options: Any,
) -> ClusterPlan:
    """The forecast of a run on several cards: `foretrain.plan_cluster("gpt2-124m", "2 x RTX 4090")`.

    `config` and `options` as for `plan`. `gpus`: such as "2 x RTX 4090", "8 x H100 SXM5", "2 nodes x 8 x A100", or a
    count alone, of the card `gpu`. `link`, `network`: names of hardware/links.toml, or "nvlink"; by default what such
    cards usually have. The option `strategy` names how they share a step; by default it is the fastest that fits.
    `used_by_others`: memory that other programs use on each card. `print(plan)` shows what the command line shows.
    Raises UserError for what cannot be planned; ConfigError names every problem of a config.
    """
    resolved = resolved_of(config, options)
    stated = stated_bytes(used_by_others, "used_by_others") if isinstance(used_by_others, str) else used_by_others
    if not isinstance(gpus, Cluster):
        gpus = cluster(str(gpus), link, network, lambda: _card(gpu, resolved.config))
    return make_cluster_plan(resolved, gpus, stated)


def _card(gpu: str | Gpu, config: RunConfig) -> Gpu:
    return gpu if isinstance(gpu, Gpu) else target_of(gpu, None, config).gpu


def answers(
    resolved: ResolvedConfig, cards: Cards, limits: Limits, step_s: float | None, data_of: DataOf
) -> list[ClusterPlan]:
    """Return the plan for the count of each card of --gpu; a rent is that of one card. Raises UserError."""
    check_speed("--step-time", step_s)
    resolved = priced(resolved, limits)
    named = cards.gpu.split(",")
    check_limits(limits, len(named), traces=False)
    if len(named) > 1 and step_s is not None:
        raise UserError("usage.one_speed", option="--step-time", count=len(named))
    found = [cluster(cards.gpus, cards.link, cards.network, partial(_card, name, resolved.config)) for name in named]
    others = stated_bytes(cards.others, "--used-by-others") if cards.others else 0
    made = []
    for each, rent in zip(found, prices_of(limits, resolved.config, [each.gpu for each in found]), strict=True):
        config = resolved.config.model_copy(update={"price_per_hour": rent})
        made.append(make_cluster_plan(replace(resolved, config=config), each, others, data_of))
    return made if step_s is None else [timed(made[0], step_s)]


def make_cluster_plan(
    resolved: ResolvedConfig, cards: Cluster, used_by_others_bytes: int = 0, data_of: DataOf = data_of_config
) -> ClusterPlan:
    _check(resolved, cards)
    resolved = replace(resolved, trainer="foretrain")  # whose step ranks share
    target = devices.checked(cards.gpu, used_by_others_bytes)
    if not resolved.config.auto_batch_size:
        return with_pays(share(make_plan(resolved, target, data_of=data_of), cards, resolved.sources))
    found = None
    for config in micro_batch_choices(resolved.config, cards.world):
        plan = make_plan(replace(resolved, config=config), target, data_of=data_of)
        found = share(plan, cards, resolved.sources)
        if found.best is not None and found.verdict == "fits":
            break
    assert found is not None  # one sequence at a time is always among them
    return with_pays(found)


def _check(resolved: ResolvedConfig, cards: Cluster) -> None:
    """Raise UserError for what cannot be planned on these cards."""
    if resolved.config.eval_only:
        raise UserError("usage.cluster_eval_only")
    hybrid = "strategy" in resolved.sources and resolved.config.strategy == "hsdp"
    if hybrid and (cards.nodes == 1 or cards.per_node == 1):
        raise UserError("usage.hsdp_of_one_node", cluster=cards.text)


def traced_cluster(plan: ClusterPlan, listen: Listen, alloc_conf: str = "") -> ClusterPlan:
    """Trace the plan's memory. Raises UserError."""
    return with_pays(traced(plan, settings_of(plan.one_card, alloc_conf), listen))


def advise_cluster(
    config: Config = "gpt2-124m", gpus: str | Cluster = "", *, goal: Goal | None = None, **options: Any
) -> Advices:
    """What to change, ranked by gain and cost: `foretrain.advise_cluster("gpt2-774m", "2 x RTX 4090").advised[0]`.

    `counts` of the answer says what 1, 2, 4 and 8 cards would give. `goal`: "fit", "speed" or "cost"; None: what the
    run needs most. The others are as in `plan_cluster`. Raises UserError for what cannot be planned.
    """
    return advise(plan_cluster(config, gpus, **options), goal=goal)

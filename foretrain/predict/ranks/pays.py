"""Whether more cards pay, and what would make them pay: each change is planned, none is a rule of thumb.

Tokens a step are what divides the cost of summing gradients, so more accumulation comes first, which changes what a
step learns from; a larger micro-batch leaves that as it is and gathers weights less often; NVLink costs money.
"""

from collections.abc import Iterator

from foretrain.config.microbatches import accumulations, divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import REFUSED, estimated
from foretrain.predict.plan import Plan
from foretrain.predict.ranks.plan import rank_spec, speed_up
from foretrain.predict.ranks.record import Change, ClusterPlan, Factor, Pays, RankPlan, What, Word
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import rank_time
from foretrain.predict.speed.time import step_time

PAYS, HARDLY = 0.8, 1.1  # efficiency from which on cards pay; times as fast below which they do not
WORTH = 1.1  # a change that does not make them pay is worth telling from so many times the efficiency on
MOST_TIMES = 64  # as much accumulation is tried at most


def with_pays(found: ClusterPlan) -> ClusterPlan:
    """The plan with what the way that is meant brings against one card."""
    return found.model_copy(update={"pays": _pays(found)})


def _pays(found: ClusterPlan) -> Pays:
    best, one = found.best, found.one_card
    alone = one.timing
    if best is None:
        return Pays(word="unknown")
    needed = one.verdict_of("foretrain") in REFUSED
    if best.timing is None or best.speed_up is None or best.efficiency is None or alone is None:
        return Pays(word="needed" if needed else "unknown")
    changes = tuple(_changes(found, best))
    if needed:
        return Pays(word="needed", changes=changes)
    money = alone.money(), best.timing.money()
    more = money[1][1] - money[0][1] if money[0] and money[1] else None
    saved_s = alone.total_s.expected_s - best.timing.total_s.expected_s
    return Pays(word=_word(best.speed_up, best.efficiency), saved_s=saved_s, more_money=more, changes=changes)


def _word(factor: Factor, efficiency: float) -> Word:
    if factor.expected < HARDLY:
        return "no"
    if efficiency < PAYS:
        return "little"
    return "pays" if factor.low > 1 else "link_decides"


def _changes(found: ClusterPlan, best: RankPlan) -> Iterator[Change]:
    if best.efficiency is None or best.speed_up is None or _word(best.speed_up, best.efficiency) == "pays":
        return
    config, cluster = found.config, found.cluster
    tries: tuple[tuple[What, Iterator[RunConfig]], ...] = (
        ("micro_batch", _larger(config, cluster.world)),
        ("accumulation", (config.model_copy(update=more) for more in accumulations(config, MOST_TIMES))),
    )  # fmt: skip
    for what, configs in tries:
        tried: Change | None = None
        for changed in configs:
            now = _planned(found, changed, cluster, what)
            if now is None:
                break  # more of it does not fit either
            if tried is None or now.speed_up.low > tried.speed_up.low:
                tried = now
            if _word(now.speed_up, now.efficiency) == "pays":
                break
        if tried is not None and _is_worth(tried, best):
            yield tried
    if (bridge := cluster.nvlink_to_add) is not None:
        now = _planned(found, config, cluster.but(bridge), "nvlink")
        if now is not None and _is_worth(now, best):
            yield now


def _is_worth(change: Change, best: RankPlan) -> bool:
    if _word(change.speed_up, change.efficiency) == "pays":
        return True
    return best.efficiency is not None and change.efficiency >= WORTH * best.efficiency


def _larger(config: RunConfig, world: int) -> Iterator[RunConfig]:
    """The same tokens a step in fewer, larger micro-batches, the smallest change first."""
    for batch in divisors(sequences_of(config) // world):
        if batch > config.batch_size:
            yield with_micro_batch(config, batch)


def _planned(found: ClusterPlan, config: RunConfig, cluster: Cluster, what: What) -> Change | None:
    """A change as it would be on these cards; None where nothing fits.

    More accumulation takes no more memory, nor does a link; for a micro-batch the quickest are judged until one fits.
    """
    one = found.one_card
    alone = one.timing.step_s if one.timing else None
    if what == "accumulation":  # against one card that runs as much
        alone = step_time(StepSpec.of(config, one.gpu, dtype=one.dtype, compiled=one.compiled))
    fitting = [rank for rank in found.ranks if rank.verdict not in REFUSED]
    timed: list[tuple[float, Factor, RankPlan]] = []
    for rank in fitting:
        spec, sharing = rank_spec(one, config, cluster, rank)
        time = rank_time(spec, sharing, cluster)
        if time is not None and alone is not None:
            timed.append((time.step_s.expected_s, speed_up(alone, time.step_s), rank))
    for _, faster, rank in sorted(timed, key=lambda each: each[0]):
        if what == "micro_batch" and not _fits(one, rank_spec(one, config, cluster, rank)[0], rank):
            continue
        return Change(
            what=what, batch_size=config.batch_size, accumulation=config.gradient_accumulation_steps,
            tokens_per_step=config.tokens_per_step, link=cluster.link.name, strategy=rank.strategy, speed_up=faster,
            efficiency=faster.expected / cluster.world,
        )  # fmt: skip
    return None


def _fits(one: Plan, spec: StepSpec, rank: RankPlan) -> bool:
    room = one.available_bytes
    return room is None or estimated(spec).fits(room - rank.nccl.expected_bytes, one.gpu.memory_bytes)

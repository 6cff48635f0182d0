"""A run on several cards, with each way to share its step: memory of a rank, time, energy, money. No torch."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import computed_field

from foretrain.base.records import Note, Record
from foretrain.config.microbatches import accumulations, divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, StrategyName, config_of_rank, of_one_strategy, sharing_problem, way_id
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.hardware.devices import Context
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.memory import REFUSED, RunMemory, Verdict, estimated
from foretrain.predict.plan import Plan, PlanRecord, Timing, whole_run
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import RankTime, rank_time, sharings
from foretrain.predict.speed.time import Range, compile_time, evaluation_time, is_calibrated, step_time
from foretrain.predict.trace.forecast import Listener, RanksExact, trace_ranks

LEAST_GAIN = 1.02  # a step that is less shorter is as good
# Times of several cards are off by 10% in the median of 134 published runs (benchmarks/results/cluster_measured.json):
# of strategies that differ by less the plainer one is taken.
ALIKE = 1.10

# NCCL's memory beside PyTorch's allocator, for each communicator: a published range, nothing of it is measured here.
# PCIe: 0.3 to 0.7 GB (NVIDIA/nccl#964 has 544 MB for two ranks, 688 MB for more). NVLink: 544 MB for two A100 (#964) to
# 1.6 GB (#864). A switch that sums (NVLS): 1.06 GB on eight H100, 4.34 GB after the first all-to-all (#1685).
PCIE_BYTES = 300_000_000, 700_000_000
NVLINK_BYTES, SWITCH_BYTES = (544_000_000, 1_600_000_000), (1_060_000_000, 4_340_000_000)
LEAST_SWITCHED = 3  # ranks: two have nothing to gain from a sum in the switch


class NcclMemory(Record):
    """Bytes of all communicators of a rank. An estimated range: published, not measured on these cards."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int

    @classmethod
    def of(cls, cluster: Cluster, sharing: Sharing) -> "NcclMemory":
        """Estimate one communicator for all ranks; HSDP has one more between nodes, which is as large at most."""
        low, high = PCIE_BYTES
        if cluster.link.kind == "nvlink":
            switched = cluster.link.switch_share and cluster.per_node >= LEAST_SWITCHED
            low, high = SWITCH_BYTES if switched else NVLINK_BYTES
        most = 2 if sharing.way.replicates else 1
        return cls(low_bytes=low, expected_bytes=(low + most * high) // 2, high_bytes=most * high)

    def beside(self, context: Context) -> Context:
        names = ("low_bytes", "expected_bytes", "high_bytes")
        return context.model_copy(update={name: getattr(context, name) + getattr(self, name) for name in names})


def context_beside(cards: Cluster | None, strategy: StrategyName, gpu: Gpu) -> Context:
    """Return what a rank takes beside the allocator: the CUDA context, and with several cards NCCL's memory."""
    context = Context.of(gpu)
    return NcclMemory.of(cards, Sharing(strategy, cards.world, cards.per_node)).beside(context) if cards else context


# needed: one card cannot run it. pays, link_decides (a poor link makes it slower than one card), little, no: less than
# 1.1 times as fast. unknown: the card's speed is, or nothing fits.
Word = Literal["needed", "pays", "link_decides", "little", "no", "unknown"]
What = Literal["micro_batch", "accumulation", "nvlink"]


class Factor(Record):
    low: float
    expected: float
    high: float


class RankPlan(Record):
    """One way to share the step; memory is a rank's, with NCCL's, all else of all cards. `syncs_each`: FSDP sums
    gradients in every micro-batch; `efficiency`: the speed-up by the number of cards; `untraced`: why not traced."""

    strategy: StrategyName
    syncs_each: bool
    memory: RunMemory
    nccl: NcclMemory
    time: RankTime | None
    timing: Timing | None
    speed_up: Factor | None
    efficiency: float | None
    traced_ranks: tuple[int, ...] = ()
    untraced: str = ""

    @property
    def verdict(self) -> Verdict | None:
        return self.memory.verdict

    @property
    def beside_nccl(self) -> RunMemory:
        return self.memory.model_copy(update={"context": self.nccl.beside(self.memory.context)})

    @property
    def id(self) -> str:
        return way_id(self.strategy, syncs_each=self.syncs_each)


class Change(Record):
    """A planned change, and its speed against one card that runs the same tokens; sizes are of all ranks."""

    what: What
    batch_size: int
    accumulation: int
    tokens_per_step: int
    link: str
    strategy: StrategyName
    speed_up: Factor
    efficiency: float


class Pays(Record):
    """What cards bring against one. `more_money`: electricity or rent; `changes`: what helps, or the best tried."""

    word: Word
    saved_s: float | None = None
    more_money: float | None = None
    changes: tuple[Change, ...] = ()


class ClusterPlan(PlanRecord):
    """The forecast of one config on several cards. `ranks`: every way that can run, the plainest first; `refused`: why
    others cannot; `chosen`: the `id` of the meant way, None: none fits; `ways`: what options leave, empty for all."""

    kind: Literal["pretraining"] = "pretraining"
    name: str
    cluster: Cluster
    one_card: Plan
    micro_batches: int  # of one rank in a step
    ranks: tuple[RankPlan, ...]
    refused: tuple[Note, ...] = ()
    chosen: str | None = None
    ways: tuple[str, ...] = ()
    pays: Pays = Pays(word="unknown")

    @property
    def config(self) -> RunConfig:
        """The config; its tokens of a step are those of all ranks together."""
        return self.one_card.config

    def options_of(self, rank: RankPlan) -> tuple[str, ...]:
        """The options of a run that shares its step so, where the config does not say them."""
        strategy = () if rank.strategy == self.config.strategy else (f"--strategy={rank.strategy}",)
        held = () if rank.syncs_each or self.config.hold_gradients else ("--hold_gradients=true",)
        return (*strategy, *held)

    @property
    def best(self) -> RankPlan | None:
        return next((rank for rank in self.ranks if rank.id == self.chosen), None)

    @property
    def least(self) -> RankPlan:
        """The way that needs least memory; of several the fastest."""

        def order(rank: RankPlan) -> tuple[int, float]:
            return rank.memory.needed_bytes, rank.time.step_s.expected_s if rank.time else 0.0

        return min(self.ranks, key=order)

    @property
    def needs(self) -> RunMemory:
        return (self.best or self.least).memory

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @property
    def place(self) -> str:
        return self.cluster.text

    @computed_field
    @property
    def available_bytes(self) -> int | None:
        return self.one_card.available_bytes

    @computed_field
    @property
    def timing(self) -> Timing | None:
        return (self.best or self.least).timing

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.one_card.notes


def share(plan: Plan, cluster: Cluster, given: Collection[str] = ()) -> ClusterPlan:
    """Share the plan of one card's run; the fastest that fits and that `given` leaves is meant. Raises UserError."""
    micro_batches = config_of_rank(plan.config, cluster.world).gradient_accumulation_steps
    known = sharings(cluster, micro_batches)
    meant = [sharing for sharing in known if _is_meant(plan.config, given, sharing, micro_batches)]
    found = {sharing.id: sharing_problem(plan.config, sharing) for sharing in known}
    if (problem := found[meant[0].id]) is not None and all(found[sharing.id] for sharing in meant):
        raise problem
    possible = [sharing for sharing in known if found[sharing.id] is None]
    problems = {problem.id: problem for problem in found.values() if problem is not None}
    ways = tuple(sharing.id for sharing in meant) if len(meant) < len(known) else ()
    notes = tuple(Note(id=each.id, values=each.values) for each in problems.values())
    whole, room = plan.spec("foretrain"), plan.available_bytes
    ranks = tuple(
        rank_plan(whole, cluster, sharing, available_bytes=room, alone=plan.foretrain_timing) for sharing in possible
    )
    best = choose(ranks, ways)
    return ClusterPlan(
        name=plan.name, cluster=cluster, one_card=plan, micro_batches=micro_batches, ranks=ranks,
        refused=notes, chosen=best.id if best else None, ways=ways,
    )  # fmt: skip


def of_run(plan: Plan, world: int, per_node: int) -> Plan:
    """Return the plan of one device's run as ranks share it: the largest memory, times of all over the usual links, on
    a CPU none. Raises UserError where they cannot share a step equally."""
    per_node = per_node if world % per_node == 0 else world
    made = plan.model_copy(
        update={"world": world, "per_node": per_node, "foretrain_timing": None, "nanogpt_timing": None, "exact": ()}
    )
    spec, room, timing = made.spec("foretrain"), plan.available_bytes, None
    if plan.gpu.kind == "cuda" and spec.sharing is not None:
        cards = cluster(f"{world // per_node} nodes x {per_node}", here=lambda: plan.gpu)
        whole = plan.spec("foretrain")
        found = rank_plan(whole, cards, spec.sharing, available_bytes=room, alone=plan.foretrain_timing)
        memory, timing = found.beside_nccl, found.timing
    else:
        memory = estimated(spec).judged(room // per_node if room is not None else None, plan.gpu.memory_bytes)
    memories = tuple(memory if each.step == memory.step else each for each in plan.memory)
    note = Note(id="of_ranks", values={"world": world, "strategy": plan.config.strategy})
    return made.model_copy(
        update={"memory": memories, "foretrain_timing": timing, "notes": (note, *notes_of_ranks(plan))}
    )


def rank_of(plan: ClusterPlan) -> Plan:
    """Return the plan of one rank of the way that is meant, or of the one that needs least."""
    rank, one = plan.best or plan.least, plan.one_card
    config = one.config.model_copy(update={"strategy": rank.strategy, "hold_gradients": not rank.syncs_each})
    memory = rank.beside_nccl
    found: dict[str, Any] = {
        "config": config, "world": plan.cluster.world, "per_node": plan.cluster.per_node, "exact": (),
        "memory": tuple(memory if each.step == memory.step else each for each in one.memory),
        "foretrain_timing": rank.timing, "nanogpt_timing": None,
    }  # fmt: skip
    if rank.untraced:
        found["notes"] = (*one.notes, Note(id="trace_unavailable", values={"reason": rank.untraced}))
    return one.model_copy(update=found)


def timed(plan: ClusterPlan, step_s: float) -> ClusterPlan:
    """Return the plan with the seconds of a step in a log, of the way that is meant."""
    rank, one = plan.best or plan.least, plan.one_card
    whole, alone = one.spec("foretrain"), one.foretrain_timing
    each = Range(low_s=step_s, expected_s=step_s, high_s=step_s)
    compiling, evaluation = compile_time(whole.compiled), _evaluation(whole, plan.cluster)
    timing = whole_run(whole, "measured (log)", each, evaluation, compiling, plan.cluster.world)
    time = rank.time.model_copy(update={"step_s": each}) if rank.time else None
    measured = rank.model_copy(update={"time": time, "timing": timing, **_gain(alone, timing, plan.cluster.world)})
    ranks = tuple(measured if each.id == rank.id else each for each in plan.ranks)
    return with_pays(plan.model_copy(update={"ranks": ranks}))


def notes_of_ranks(plan: Plan) -> tuple[Note, ...]:
    """The notes of one card's plan that hold of several cards, too: their steps are never one graph."""
    kept = tuple(note for note in plan.notes if note.id != "one_graph")
    if plan.config.cuda_graph != "on" or plan.gpu.kind != "cuda":
        return kept
    return (*kept, Note(id="no_effect_here", values={"option": "cuda_graph", "reason": "several ranks share the run"}))


def _is_meant(config: RunConfig, given: Collection[str], sharing: Sharing, micro_batches: int) -> bool:
    """Whether the options that the user set leave a way. With one micro-batch there is nothing to hold back."""
    if "strategy" in given and sharing.strategy != config.strategy:
        return False
    held = config.hold_gradients and sharing.way.shards_weights and micro_batches > 1
    return "hold_gradients" not in given or sharing.syncs_each != held


def choose(ranks: tuple[RankPlan, ...], ways: Collection[str] = ()) -> RankPlan | None:
    """Return the fastest that fits (of equals the first), else of the tight ones; of `ways` alone, if given."""
    meant = [rank for rank in ranks if not ways or rank.id in ways]
    for verdict in ("fits", "tight", None, *(("may_not_fit", "does_not_fit") if of_one_strategy(ways) else ())):
        fitting = [rank for rank in meant if rank.verdict == verdict]
        if not fitting:
            continue
        timed = [rank for rank in fitting if rank.time is not None]
        if not timed:
            return fitting[0]
        fastest_s = min(rank.time.step_s.expected_s for rank in timed if rank.time)
        return next(rank for rank in timed if rank.time and rank.time.step_s.expected_s <= ALIKE * fastest_s)
    return None


def rank_plan(
    whole: StepSpec, cluster: Cluster, sharing: Sharing, *, available_bytes: int | None, alone: Timing | None
) -> RankPlan:
    """Plan one way to share a step. `whole`: of all ranks, on one card; `alone`: its timing. Raises UserError."""
    spec = of_one_rank(whole, cluster, sharing)
    nccl = NcclMemory.of(cluster, sharing)
    time, timing = rank_timing(whole, cluster, sharing)
    return RankPlan(
        strategy=sharing.strategy, syncs_each=sharing.syncs_each, memory=rank_memory(spec, available_bytes, nccl),
        nccl=nccl, time=time, timing=timing, **_gain(alone, timing, cluster.world),
    )  # fmt: skip


def _gain(alone: Timing | None, shared: Timing | None, world: int) -> dict[str, Any]:
    faster = speed_up(alone.step_s, shared.step_s) if alone and shared else None
    return {"speed_up": faster, "efficiency": faster.expected / world if faster else None}


def rank_timing(whole: StepSpec, cluster: Cluster, sharing: Sharing) -> tuple[RankTime | None, Timing | None]:
    """(a step, the whole run) of all ranks; None where nothing is known of the card's speed."""
    spec = of_one_rank(whole, cluster, sharing)
    time = rank_time(spec, sharing, cluster)
    if time is None:
        return None, None
    source = "calibrated" if is_calibrated(spec) else "estimated"
    compiling = compile_time(spec.compiled)
    return time, whole_run(whole, source, time.step_s, _evaluation(whole, cluster), compiling, cluster.world)


def of_one_rank(whole: StepSpec, cluster: Cluster, sharing: Sharing) -> StepSpec:
    config = config_of_rank(whole.config, cluster.world)
    return StepSpec.of(config, cluster.gpu, dtype=whole.dtype, compiled=whole.compiled, sharing=sharing)


def _evaluation(spec: StepSpec, cluster: Cluster) -> Range | None:
    """Each rank does every so many-th batch of it, so the first ones do the most."""
    alone, batches = evaluation_time(spec), math.ceil(spec.config.eval_rows / spec.config.eval_batch)
    return alone.scaled(math.ceil(batches / cluster.world) / batches) if alone else None


def sharing_of(cluster: Cluster, rank: Sharing | RankPlan) -> Sharing:
    return Sharing(strategy=rank.strategy, world=cluster.world, per_node=cluster.per_node, syncs_each=rank.syncs_each)


def rank_spec(plan: Plan, config: RunConfig, cluster: Cluster, rank: Sharing | RankPlan) -> tuple[StepSpec, Sharing]:
    """One rank's step of a config of all, shared as `rank` is, and how that is."""
    sharing = sharing_of(cluster, rank)
    return of_one_rank(replace(plan.spec("foretrain"), config=config), cluster, sharing), sharing


def speed_up(alone: Range, shared: Range) -> Factor:
    """One card's step over that of all, quick with quick and slow with slow: both have the same card."""
    ends = ((getattr(alone, name), getattr(shared, name)) for name in ("low_s", "expected_s", "high_s"))
    factors = [one / several for one, several in ends]
    return Factor(low=min(factors), expected=factors[1], high=max(factors))


def rank_memory(spec: StepSpec, available_bytes: int | None, nccl: NcclMemory) -> RunMemory:
    estimate = estimated(spec)
    return estimate.judged(available_bytes, spec.gpu.memory_bytes, nccl.beside(estimate.context))


# Tokens a step are what divides the cost of summing gradients, so more accumulation is planned first, which changes
# what a step learns from; a larger micro-batch leaves that as it is and gathers weights less often; NVLink costs money.
PAYS, HARDLY = 0.8, 1.1  # efficiency from which on cards pay; times as fast below which they do not
WORTH = 1.1  # a change that does not make them pay is worth telling from so many times the efficiency on
MOST_TIMES = 64  # as much accumulation is tried at most


def with_pays(found: ClusterPlan) -> ClusterPlan:
    return found.model_copy(update={"pays": _pays(found)})


def _pays(found: ClusterPlan) -> Pays:
    best, one = found.best, found.one_card
    alone = one.timing
    if best is None:
        return Pays(word="unknown")
    needed = one.verdict_of("foretrain") in REFUSED
    if best.timing is None or best.speed_up is None or best.efficiency is None or alone is None:
        return Pays(word="needed" if needed else "unknown")
    word = "needed" if needed else _word(best.speed_up, best.efficiency)
    return with_savings(found, Pays(word=word, changes=tuple(_changes(found, best))))


def with_savings(found: ClusterPlan, pays: Pays) -> Pays:
    """Return it with the time and money that the way that is meant saves, where one card could run it, too."""
    alone, shared = found.one_card.timing, found.best.timing if found.best else None
    if pays.word in ("needed", "unknown") or alone is None or shared is None:
        return pays
    money = alone.money(), shared.money()
    more = money[1][1] - money[0][1] if money[0] and money[1] else None
    return pays.model_copy(
        update={"saved_s": alone.length_s.expected_s - shared.length_s.expected_s, "more_money": more}
    )


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
    """Plan a change on these cards; None where nothing fits. Of micro-batches the fastest that fits."""
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


def traced(plan: ClusterPlan, settings: Settings, listen: Listener) -> ClusterPlan:
    """Return the plan with each strategy's exact memory, of the largest rank, and the choice; else the estimate."""
    one = plan.one_card

    def asked(rank: RankPlan) -> tuple[StepSpec, RunMemory]:
        spec, _ = rank_spec(one, plan.config, plan.cluster, rank)
        return spec, rank.beside_nccl

    found = trace_ranks(
        [asked(rank) for rank in plan.ranks],
        one.available_bytes,
        capped=one.available_reason == "memory_limit",
        settings=settings,
        listen=listen,
    )
    ranks = tuple(_rank(rank, exact) for rank, exact in zip(plan.ranks, found, strict=True))
    best = choose(ranks, plan.ways)
    return plan.model_copy(update={"ranks": ranks, "chosen": best.id if best else None})


def _rank(rank: RankPlan, found: RanksExact) -> RankPlan:
    worst = found.worst
    if worst is None:
        return rank.model_copy(update={"untraced": found.reason})
    memory = worst.memory.model_copy(update={"context": rank.memory.context})
    return rank.model_copy(update={"memory": memory, "traced_ranks": found.ranks})

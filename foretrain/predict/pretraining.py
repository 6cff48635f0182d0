"""`Pretraining`: a config of foretrain's or nanoGPT's trainer as a run that can be forecast."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.shape import ModelShape
from foretrain.predict import plan as plans
from foretrain.predict.forecast import Forecast, Placement, Probe, Range
from foretrain.predict.memory import RunMemory, predict
from foretrain.predict.plan import Plan, Reading, Timing
from foretrain.predict.ranks import ClusterPlan, rank_memory, rank_spec, share, with_pays, with_savings
from foretrain.predict.spec import STEP_NAMES, StepName, StepSpec
from foretrain.predict.timing import NO_TIME, Prices
from foretrain.predict.within import spent_of

RANGES = {name: Range(*option.largest) for name, option in OPTIONS.items() if option.largest}
MOST_WARMUP = 1 / 20  # of a run


@dataclass(frozen=True)
class Pretraining:
    """A config, the trainer that runs it, and its data. `given`: options that the user set."""

    kind = "pretraining"
    config: RunConfig
    step: StepName = "foretrain"
    name: str = "run"
    dataset_tokens: int | None = None
    dataset_source: str = "unknown"
    logged_step_s: float | None = None
    given: frozenset[str] = field(default_factory=frozenset)

    @property
    def tokens_per_step(self) -> int:
        return self.config.tokens_per_step

    @property
    def steps(self) -> int:
        return self.config.max_iters

    @property
    def prices(self) -> Prices:
        return Prices.of(self.config)

    @property
    def ranges(self) -> Mapping[str, Range]:
        return RANGES

    def but(self, **options: Any) -> "Pretraining":
        """Return the same run with other options; an evaluation keeps its own sizes where the context has them."""
        config = self.config.model_copy(update=options)
        if config.eval_block_size > config.block_size:
            config = config.model_copy(update={"eval_block_size": 0})
        return replace(self, config=config)

    def on(self, where: Placement) -> Forecast:
        made = plans.plan(
            self.config, where.card, name=self.name, used_by_others_bytes=where.used_by_others_bytes,
            dataset_tokens=self.dataset_tokens, dataset_source=self.dataset_source, logged_step_s=self.logged_step_s,
        ).run_by(self.step)  # fmt: skip
        if where.cluster is None:
            return Forecast(self, where, made)
        return Forecast(self, where, with_pays(share(made, where.cluster, self.given)))

    def with_steps(self, found: Forecast, steps: int) -> tuple[Plan | ClusterPlan, tuple[str, ...]]:
        config, changed = adjusted(self.config, steps)
        if isinstance(found.plan, ClusterPlan):
            return cluster_with_steps(found.plan, config), changed
        assert isinstance(found.plan, Plan)
        return plan_with_steps(found.plan, config), changed

    def spent(self, found: Forecast, limit: Limit, reading: Reading) -> Callable[[int], float]:
        assert isinstance(found.timing, Timing)
        spec = StepSpec.of(self.config, found.where.card, self.step)
        return spent_by_steps(found.timing, spec, limit, reading, found.where.world)

    def check(self, found: Forecast, text: str, *, steps: bool = False) -> None:
        if steps and self.config.eval_only:
            raise UserError("usage.eval_only", text=text)

    def probe(self, found: Forecast, option: str, value: int) -> Probe:
        config = self.but(**{option: value}).config
        if isinstance(found.plan, ClusterPlan):
            memory = least_memory(found.plan, config)
        else:
            assert isinstance(found.plan, Plan)
            spec = found.plan.model_copy(update={"config": config}).spec(self.step)
            memory = predict(spec, found.available_bytes)
        return Probe(value=value, verdict=memory.verdict, needed_expected_bytes=memory.needed_bytes)


def least_memory(made: ClusterPlan, config: RunConfig) -> RunMemory:
    """Return a rank's memory with the way that fits, of those that are meant, else with the one that needs least."""
    least: RunMemory | None = None
    meant = [rank for rank in made.ranks if not made.ways or rank.id in made.ways]
    for rank in sorted(meant, key=lambda rank: rank.memory.needed_bytes):
        spec, _ = rank_spec(made.one_card, config, made.cluster, rank)
        memory = rank_memory(spec, made.available_bytes, rank.nccl)
        if memory.verdict == "fits":
            return memory
        least = memory if least is None or memory.needed_bytes < least.needed_bytes else least
    assert least is not None  # a plan has a way
    return least


def of_plan(made: Plan) -> Forecast:
    run = Pretraining(made.config, made.step, made.name, made.work.dataset_tokens, made.work.dataset_source)
    return Forecast(run, Placement(made.gpu, made.used_by_others_bytes), made)


def of_cluster(made: ClusterPlan) -> Forecast:
    alone = of_plan(made.one_card)
    return Forecast(alone.run, replace(alone.where, cluster=made.cluster), made)


def with_steps(timing: Timing, spec: StepSpec, steps: int, cards: int = 1) -> Timing:
    parts = timing.step_s, timing.evaluation_s, timing.compile_s or NO_TIME
    return plans.whole_run(spec.but(max_iters=steps), timing.source, *parts, cards)


def spent_by_steps(
    timing: Timing, spec: StepSpec, limit: Limit, reading: Reading = "expected", cards: int = 1
) -> Callable[[int], float]:
    """Return how much of the limit's kind the run of a timing takes, by its number of steps."""
    if limit.kind == "time":
        return plans.seconds_by_steps(timing, spec, reading)

    def spent(steps: int) -> float:
        made = with_steps(timing, spec, steps, cards)
        return spent_of(made.length_s, made, limit, reading)

    return spent


def plan_with_steps(made: Plan, config: RunConfig) -> Plan:
    ours, nanos = (
        timing and with_steps(timing, made.spec(step), config.max_iters)
        for step in STEP_NAMES
        for timing in [made.timing_of(step)]
    )
    work = plans.work_of(config, ModelShape.of(config), made.work.dataset_tokens, made.work.dataset_source)
    where = made.gpu, made.used_by_others_bytes, made.work.dataset_tokens
    others = made.notes[len(plans.notes_of(made.config, *where)) :]  # of the step's time and of the trainer
    notes = plans.notes_of(config, *where)
    timings = {"foretrain_timing": ours, "nanogpt_timing": nanos}
    return made.model_copy(update={"config": config, "work": work, "notes": (*notes, *others), **timings})


def cluster_with_steps(made: ClusterPlan, config: RunConfig) -> ClusterPlan:
    spec, world = made.one_card.spec("foretrain"), made.cluster.world
    ranks = tuple(
        rank.model_copy(update={"timing": rank.timing and with_steps(rank.timing, spec, config.max_iters, world)})
        for rank in made.ranks
    )
    found = made.model_copy(update={"one_card": plan_with_steps(made.one_card, config), "ranks": ranks})
    return found.model_copy(update={"pays": with_savings(found, found.pays)})


def adjusted(config: RunConfig, steps: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return (the config with this many steps, the changed options): the decay ends there, the warm-up is capped."""
    update = {"max_iters": steps}
    if config.decay_lr:
        update["lr_decay_iters"] = steps
        update["warmup_iters"] = min(config.warmup_iters, int(_warmup_share(config) * steps))
    changed = tuple(name for name, value in update.items() if getattr(config, name) != value)
    return config.model_copy(update=update), changed


def _warmup_share(config: RunConfig) -> float:
    """Return the largest share of a run that its warm-up may be: a twentieth, or what it was."""
    asked = config.warmup_iters / config.max_iters
    return max(MOST_WARMUP, asked) if asked < 1 else MOST_WARMUP

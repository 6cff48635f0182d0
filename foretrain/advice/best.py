"""The GPT of lowest estimated loss that fits a card and a limit of time, energy or money: a search over shapes. Heads
of 64, and width / depth as in GPT-2 and the models of Chinchilla's law (arXiv:2203.15556, table A9)."""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.base.records import Record
from foretrain.config.options import RunConfig, named
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import estimated
from foretrain.predict.plan import Plan, Reading, Timing, no_time, timing
from foretrain.predict.pretraining import adjusted, spent_by_steps, with_steps
from foretrain.predict.ranks import ClusterPlan, RankPlan, of_one_rank, rank_timing, sharing_of
from foretrain.predict.scaling import BESIROGLU, FITS, MOST_EPOCHS, effective_tokens, good_tokens_per_step
from foretrain.predict.spec import DISTINCT_MICRO_BATCHES, StepName, StepSpec
from foretrain.predict.within import check_currency, most_steps

HEAD_DIM = 64
WIDTHS = (*range(128, 1024, 64), *range(1024, 2048, 128), *range(2048, 4097, 256))
DEPTHS = (*range(2, 13), *range(14, 33, 2), *range(36, 97, 4))
MOST_ASPECT, LEAST_ASPECT = 72, 40
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
LOOKED_AT = 16  # shapes that fit, before the search stops: neighbours of the best differ by thousandths of a nat
TIE = 0.002  # nats: less than any law can tell apart; of such shapes the smallest comes first
ALTERNATIVES = 5
APART = 0.08  # alternatives differ from each other by so much in size at least


class Candidate(Record):
    """One model with its settings; `loss` by the corrected fit, the range between the fits."""

    config: RunConfig
    n_params: int
    steps: int
    steps_cautious: int
    tokens: int
    tokens_worth: int
    epochs: float | None
    loss: float
    loss_low: float
    loss_high: float
    needed_bytes: int
    timing: Timing


# Sizes that follow from the shape again, which a recipe's own options would else hold at the base's.
_FOLLOW = dict.fromkeys(named(lambda option: option.from_weights and option.least == 0 and option.type == "int"), 0)


class Best(Record):
    """The answer: `candidates`, the best first, and what `binds`: the limit's kind, epochs where data end before it,
    memory, data where repeating them costs a tenth of their worth, or grid, where the best shape is at its end."""

    limit: Limit
    step: StepName
    dataset_tokens: int | None
    candidates: tuple[Candidate, ...]
    binds: tuple[str, ...]
    shapes: int
    too_large: int


def shapes() -> Iterator[dict[str, int]]:
    for width in WIDTHS:
        for depth in DEPTHS:
            if LEAST_ASPECT <= width / depth <= MOST_ASPECT:
                yield {"n_layer": depth, "n_head": width // HEAD_DIM, "n_embd": width}


class _Search:
    def __init__(
        self,
        base: Plan,
        limit: Limit,
        step: StepName,
        given: frozenset[str],
        cluster: Cluster | None = None,
        rank: RankPlan | None = None,
    ) -> None:
        self.base, self.limit, self.given = base, limit, given
        self.step: StepName = step
        self.cluster, self.world, self.room = cluster, cluster.world if cluster else 1, base.available_bytes
        self.sharing = sharing_of(cluster, rank) if cluster and rank else None
        self.nccl_bytes = rank.nccl.expected_bytes if rank else 0
        if rank and self.room is not None:
            self.room -= rank.nccl.high_bytes
        self.gpu: Gpu = base.gpu
        self.data = base.work.dataset_tokens
        self.fitted: dict[bool, int] = {}  # micro-batches that fitted the last shape, by checkpointing
        self.too_large: list[dict[str, int]] = []  # shapes that did not fit with any setting
        # Sizes, with the micro-batch, whose tensors alone are too large, by what else decides: so are larger ones.
        self.beyond: dict[tuple[bool, int], list[tuple[int, ...]]] = {}
        self.sequences = 8 * self.world  # of one optimizer step; a first guess, by which the real one is found
        middle = {"n_layer": 8, "n_head": 8, "n_embd": 512}
        for _ in range(2):  # the guess decides how much is computed only slightly; a second round is steady
            config = self.configured(middle, 8)
            steps = self.steps(config, self.timing(config))
            flops = 6 * ModelShape.of(config).n_params * steps * config.tokens_per_step
            wanted = good_tokens_per_step(flops) / config.block_size / self.world
            self.sequences = self.world * max(8 // self.world, 1, 2 ** round(wanted - 1).bit_length())

    def configured(self, shape: dict[str, int], batch: int, checkpointing: bool = False) -> RunConfig:
        """The config with this shape and micro-batch, the tokens of a step and of an evaluation kept."""
        c = self.base.config
        batch = min(batch, self.sequences // self.world)
        update: dict[str, Any] = {
            **shape, **_FOLLOW, "init_from": "scratch", "batch_size": batch, "activation_checkpointing": checkpointing,
            "gradient_accumulation_steps": self.sequences // batch, "total_batch_size": 0, "auto_batch_size": False,
        }  # fmt: skip
        # An evaluation sees as many sequences as the user asked for; where nobody asked, as many as a step does.
        if "eval_sequences" not in self.given:
            asked = c.eval_rows if "eval_iters" in self.given else self.sequences
            update["eval_iters"] = max(1, asked // batch)
        if self.sharing:
            update |= {"strategy": self.sharing.strategy, "hold_gradients": not self.sharing.syncs_each}
        return c.model_copy(update=update)

    def spec(self, config: RunConfig) -> StepSpec:
        return StepSpec.of(config, self.gpu, self.step, dtype=self.base.dtype)

    def timing(self, config: RunConfig) -> Timing:
        spec = self.spec(config)
        found = rank_timing(spec, self.cluster, self.sharing)[1] if self.cluster and self.sharing else timing(spec)
        if found is None:
            raise no_time(self.base, self.limit.as_option)
        return found

    def steps(self, config: RunConfig, found: Timing, reading: Reading = "expected") -> int:
        """Return as many as fit in the limit, and as the data are good for."""
        spent = spent_by_steps(found, self.spec(config), self.limit, reading, self.world)
        steps = most_steps(self.limit, config.tokens_per_step, spent)
        return min(steps, max(1, MOST_EPOCHS * self.data // config.tokens_per_step)) if self.data else steps

    def loss(self, config: RunConfig, steps: int) -> float:
        return BESIROGLU.loss(ModelShape.of(config).n_params, steps * config.tokens_per_step, self.data)

    def needed_bytes(self, config: RunConfig) -> int | None:
        """What the worst phase is expected to need, or None where one does not fit safely."""
        room, card = self.room, self.gpu.memory_bytes
        sizes = config.n_layer, config.n_head, config.n_embd, config.batch_size
        alike = config.activation_checkpointing, min(DISTINCT_MICRO_BATCHES, config.gradient_accumulation_steps)
        beyond = self.beyond.setdefault(alike, [])
        larger = (all(a >= b for a, b in zip(sizes, each, strict=True)) for each in beyond)
        if not config.auto_chunker and any(larger):  # which makes less of much
            return None
        spec = self.spec(config)
        if self.cluster and self.sharing:
            spec = of_one_rank(spec, self.cluster, self.sharing)
        estimate = estimated(spec)
        if estimate.fits(room, card):
            return estimate.memory.needed_bytes + self.nccl_bytes
        if estimate.spec.cuda and room is not None and estimate.is_beyond(room, card):
            beyond.append(sizes)
        return None

    def n_params(self, shape: dict[str, int]) -> int:
        return ModelShape.of(self.configured(shape, 1)).n_params

    def is_too_large(self, shape: dict[str, int]) -> bool:
        """Whether the memory need not be estimated: weights, gradients and both moments alone are too much, or a shape
        that is neither deeper nor wider did not fit."""
        shards = self.world if self.sharing and self.sharing.strategy != "ddp" else 1
        if 16 * self.n_params(shape) / shards > (self.room or 0):
            return True
        return any(all(shape[name] >= size for name, size in each.items()) for each in self.too_large)

    def fitting(self, shape: dict[str, int]) -> tuple[RunConfig, int] | None:
        """The fastest settings of a shape that fit the memory, and what they need."""
        if self.is_too_large(shape):
            return None
        batches = [batch for batch in MICRO_BATCHES if batch <= self.sequences]
        for checkpointing in (False, True) if self.step == "foretrain" else (False,):
            configs = [self.configured(shape, batch, checkpointing) for batch in batches]
            needs = cache(lambda i, configs=configs: self.needed_bytes(configs[i]) or 0)
            count = self.that_fit(needs, len(batches), checkpointing)
            if count:
                fastest = min(range(count), key=lambda i: self.timing(configs[i]).step_s.expected_s)
                return configs[fastest], needs(fastest)
        self.too_large.append(shape)
        return None

    def that_fit(self, needs: Callable[[int], int], count: int, checkpointing: bool) -> int:
        """Count the first settings that fit; needs grow (0: does not fit). The last shape's answer is tried first."""
        fit = min(self.fitted.get(checkpointing, count), count)
        while fit and not needs(fit - 1):
            fit -= 1
        while fit < count and needs(fit):
            fit += 1
        self.fitted[checkpointing] = fit
        return fit

    def candidate(self, config: RunConfig, needed: int) -> Candidate | None:
        found = self.timing(config)
        steps = self.steps(config, found)
        if not steps:
            return None
        n_params, tokens = ModelShape.of(config).n_params, steps * config.tokens_per_step
        losses = [fit.loss(n_params, tokens, self.data) for fit in FITS]
        final, _ = adjusted(config, steps)
        return Candidate(
            config=final, n_params=n_params, steps=steps, tokens=tokens, loss=losses[0], loss_low=min(losses),
            steps_cautious=self.steps(config, found, "high"),
            tokens_worth=round(effective_tokens(tokens, self.data)), epochs=tokens / self.data if self.data else None,
            loss_high=max(losses), needed_bytes=needed,
            timing=with_steps(found, self.spec(config), steps, self.world),
        )  # fmt: skip


def _ranked(
    search: _Search, grid: list[dict[str, int]], listen: Callable[[int, int], None]
) -> list[tuple[float, dict[str, int]]]:
    """(loss, shape) of every shape that makes a step within the limit, the lowest loss first, whatever it needs."""
    found = []
    for number, shape in enumerate(grid):
        listen(number, 2 * len(grid))
        config = search.configured(shape, 8)
        if steps := search.steps(config, search.timing(config)):
            found.append((search.loss(config, steps), shape))
    return sorted(found, key=lambda pair: pair[0])


def best(
    base: Plan | ClusterPlan,
    limit: Limit,
    step: StepName = "foretrain",
    given: frozenset[str] = frozenset(),
    listen: Callable[[int, int], None] = lambda done, of: None,
) -> Best:
    """Return the best models for a plan's cards, vocabulary, context and prices within a limit. `given`: options that
    the user set. Raises UserError 'check.best_nothing'."""
    if base.available_bytes is None:
        raise UserError("usage.best_memory", text=limit.as_option, gpu=base.gpu.name)
    check_currency(limit, base.config.currency)
    if isinstance(base, Plan):
        return _best(_Search(base, limit, step, given), listen)
    found, problem, lowest = [], None, math.inf
    ranks = [rank for rank in base.ranks if not base.ways or rank.id in base.ways]
    for number, rank in enumerate(ranks):
        search = _Search(base.one_card, limit, step, given, base.cluster, rank)
        try:
            tell = partial(_part, listen, number, len(ranks))
            found.append(_best(search, tell, lowest))
            lowest = min(lowest, found[-1].candidates[0].loss)
        except UserError as error:
            problem = error
    if not found:
        raise problem or no_time(base, limit.as_option)
    return next(each for each in found if each.candidates[0].loss <= lowest + TIE)


def _part(listen: Callable[[int, int], None], number: int, parts: int, done: int, of: int) -> None:
    listen(number * of + done, parts * of)


def _best(search: _Search, listen: Callable[[int, int], None], known: float = math.inf) -> Best:
    """Search the shapes; `known`: a loss that is reached already. Raises UserError where none is lower."""
    base, limit, step = search.base, search.limit, search.step
    grid = list(shapes())
    ranked = [each for each in _ranked(search, grid, listen) if each[0] < known - TIE]
    found: list[Candidate] = []
    rejected: list[float] = []

    def look_at(loss: float, shape: dict[str, int]) -> Candidate | None:
        listen(len(grid) + len(found) + len(rejected), 2 * len(grid))
        fitting = search.fitting(shape)
        made = search.candidate(*fitting) if fitting else None
        if made is None:
            rejected.append(loss)
        else:
            found.append(made)
        return made

    rest = iter(ranked)
    while len(found) < LOOKED_AT and (pair := next(rest, None)):
        look_at(*pair)
    if not found:
        raise _nothing(base, search, limit, grid[0])
    # Of shapes that no law can tell apart the smallest is the answer: of those that are left it comes first.
    alike = min(candidate.loss for candidate in found) + TIE
    smallest = min(candidate.n_params for candidate in found if candidate.loss <= alike)
    left = [(loss, shape) for loss, shape in rest if loss <= alike and search.n_params(shape) < smallest]
    for loss, shape in sorted(left, key=lambda pair: search.n_params(pair[1])):
        made = look_at(loss, shape)
        if made and made.loss <= alike:
            break
    lowest = min(candidate.loss for candidate in found)
    found.sort(key=lambda c: (0.0, c.n_params) if c.loss <= lowest + TIE else (c.loss, 0))
    return Best(
        limit=limit, step=step, dataset_tokens=search.data, candidates=tuple(_apart(found)), shapes=len(grid),
        binds=_binds(found[0], rejected, limit), too_large=len(rejected),
    )  # fmt: skip


def _nothing(base: Plan, search: _Search, limit: Limit, smallest: dict[str, int]) -> UserError:
    params = search.n_params(smallest)
    available = base.available_bytes or 0
    return UserError(
        "check.best_nothing", text=limit.as_option, gpu=base.gpu.name, available=available, params=params
    )  # fmt: skip


def _apart(found: list[Candidate]) -> list[Candidate]:
    """The best, and the best of those that differ from all before them in size."""
    kept: list[Candidate] = []
    for candidate in found:
        if all(abs(candidate.n_params / other.n_params - 1) > APART for other in kept):
            kept.append(candidate)
    return kept[: 1 + ALTERNATIVES]


def _binds(winner: Candidate, rejected: list[float], limit: Limit) -> tuple[str, ...]:
    worn_out = winner.epochs is not None and winner.epochs > MOST_EPOCHS - 1
    binds: list[str] = ["epochs" if worn_out else limit.kind]
    if rejected and min(rejected) < winner.loss - TIE:
        binds.append("memory")
    if not worn_out and winner.tokens_worth < 0.9 * winner.tokens:
        binds.append("data")
    if winner.config.n_embd in (WIDTHS[0], WIDTHS[-1]):
        binds.append("grid")
    return tuple(binds)

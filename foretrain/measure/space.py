"""The settings that `foretrain tune` chooses among: other ways to carry out the same training. No torch. The order of
sums and an open dtype may differ. An option's values are its *levels*."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any, Literal

from foretrain.config.checks import check
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig, named
from foretrain.config.sharing import STRATEGIES, Sharing, sharing_problem
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.predict.memory import REFUSED, RunMemory, predict
from foretrain.predict.ranks import NcclMemory, rank_memory
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import rank_time
from foretrain.predict.speed.time import step_time, tuned_like

Level = bool | int | str
Learning = Literal["exact", "rounding", "sharding", "draws"]
# In the order of definition. activation_checkpointing is searched by its number of blocks.
TUNABLE = named(lambda option: option.tuned)
CHUNKS = (0, 512, 2048)
WAYS = ("ddp", "zero1", "fsdp_no_reshard", "fsdp")  # to share a step on one machine
MASTERS = "bfloat16 with fp32 masters"


@dataclass(frozen=True)
class Machine:
    cuda: bool
    can_compile: bool
    threads: tuple[int, ...] = ()
    world: int = 1


@dataclass(frozen=True)
class Setting:
    levels: tuple[Level, ...]
    config: RunConfig

    @property
    def named(self) -> dict[str, Level]:
        return dict(zip(TUNABLE, self.levels, strict=True))

    @property
    def but_batch(self) -> tuple[Level, ...]:
        """Return what decides its memory beside the micro-batch; threads take none."""
        return tuple(level for name, level in self.named.items() if name not in ("batch_size", "cpu_threads"))


def levels_of(config: RunConfig) -> tuple[Level, ...]:
    levels = {name: getattr(config, name) for name in TUNABLE}
    levels["activation_checkpointing"] = config.checkpointed
    if config.dtype == "bfloat16" and config.master_weights:
        levels["dtype"] = MASTERS
    return tuple(levels.values())


def options(
    asked: RunConfig, base: RunConfig, given: frozenset[str], wanted: Sequence[str], machine: Machine
) -> list[tuple[Level, ...]]:
    """Return the levels of each option in TUNABLE, the base's own first; only that of an option not `wanted`. `asked`:
    the user's config; `base`: with every open choice decided."""
    own = dict(zip(TUNABLE, levels_of(base), strict=True))
    free: dict[str, Sequence[Level]] = {
        "batch_size": divisors(sequences_of(base) // machine.world),
        "compile": (False, True) if machine.can_compile else (False,),
        "activation_checkpointing": (0, base.n_layer // 2, base.n_layer),
        "recompute_norm_gelu": (False, True) if base.recipe == "nanogpt" else (),
        "loss_chunk_size": CHUNKS,
        "attention": ("sdpa", "bmm") if not machine.cuda and not base.obstacle_to_bmm else (),
        "dtype": _dtypes(asked, given, machine),
        "cpu_threads": machine.threads,
        "strategy": WAYS if machine.world > 1 else (),
        "hold_gradients": (False, True) if machine.world > 1 else (),
    }
    found = []
    for name in TUNABLE:
        others = free[name] if name in wanted else ()
        found.append(tuple(dict.fromkeys((own[name], *others))))
    return found


def _dtypes(asked: RunConfig, given: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """Return the dtypes that the config leaves open; one on a card, where matmul asks for other arithmetic."""
    if asked.dtype != "auto" or machine.cuda or asked.matmul != "dtype":
        return ()
    if "master_weights" in given:
        return ("float32", MASTERS if asked.master_weights else "bfloat16")
    return ("float32", "bfloat16", MASTERS)


def default_options(asked: RunConfig, given: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """Return the options searched by default: all but the kernels, dtype, threads and strategy that the config sets."""
    closed = set()
    if asked.attention != "auto":
        closed.add("attention")
    if asked.dtype != "auto":
        closed.add("dtype")
    if asked.cpu_threads or machine.cuda:
        closed.add("cpu_threads")
    closed |= given & {"strategy", "hold_gradients"}
    return tuple(name for name in TUNABLE if name not in closed)


def apply(base: RunConfig, levels: Sequence[Level]) -> RunConfig:
    """Return the base with other levels. Its tokens per step, and its evaluation's sequences, stay."""
    named: dict[str, Any] = dict(zip(TUNABLE, levels, strict=True))
    blocks, dtype = named["activation_checkpointing"], named["dtype"]
    update = {
        "compile": named["compile"], "activation_checkpointing": blocks > 0,
        "checkpointed_blocks": 0 if blocks in (0, base.n_layer) else blocks,
        "recompute_norm_gelu": named["recompute_norm_gelu"], "loss_chunk_size": named["loss_chunk_size"],
        "attention": named["attention"], "cpu_threads": named["cpu_threads"],
        "strategy": named["strategy"], "hold_gradients": named["hold_gradients"],
        "dtype": "bfloat16" if dtype == MASTERS else dtype,
        "master_weights": dtype == MASTERS or (base.master_weights and dtype == base.dtype),
    }  # fmt: skip
    made = with_micro_batch(base, named["batch_size"]).model_copy(update=update)
    assert made.tokens_per_step == base.tokens_per_step
    return made


def settings(base: RunConfig, choices: Sequence[Sequence[Level]], world: int = 1) -> Iterator[Setting]:
    """Yield the base, then every other valid combination that `world` ranks can share."""
    own = levels_of(base)
    yield Setting(own, base)
    batches, *rest = choices
    valid = {}
    for others in product(*rest):
        config = apply(base, (own[0], *others))
        valid[others] = not check(config.model_dump(), {})[1] and _can_share(config, world)
    for others, batch in product(valid, batches):
        levels = (batch, *others)
        chunk = others[TUNABLE.index("loss_chunk_size") - 1]
        whole = chunk and chunk >= int(batch) * base.block_size and chunk != base.loss_chunk_size
        if valid[others] and not whole and levels != own:
            yield Setting(levels, apply(base, levels))


def _can_share(config: RunConfig, world: int) -> bool:
    sharing = Sharing.of(config, world, world)
    idle = config.hold_gradients and not sharing.way.shards_weights
    return world == 1 or (sharing_problem(config, sharing) is None and not idle)


def learning(base: RunConfig, config: RunConfig) -> Learning:
    """Return what differs in learning: the order of sums, the rounding of half precision, or dropout's draws."""
    if (config.dtype, config.master_weights) != (base.dtype, base.master_weights):
        return "rounding"
    if config.dtype != "float32" and _shards(config) != _shards(base):
        return "sharding"
    cut_differs = (config.batch_size, config.compile) != (base.batch_size, base.compile)
    return "draws" if base.dropout and cut_differs else "exact"


def _shards(config: RunConfig) -> bool:
    return STRATEGIES[config.strategy].shards_weights


FEWER_THREADS = 0.5  # a step on half the threads is assumed to be 2^0.5 times as long, until it is measured


def dtype_of(config: RunConfig, fallback: Dtype) -> Dtype:
    return fallback if config.dtype == "auto" else config.dtype


def spec_of(config: RunConfig, gpu: Gpu, fallback: Dtype, world: int = 1) -> StepSpec:
    """Return the step of a decided config, or the part of it that one of `world` ranks on this machine carries out."""
    dtype = dtype_of(config, fallback)
    if world == 1:
        return StepSpec.of(config, gpu, dtype=dtype)
    return StepSpec.of_rank(config, gpu, world, world, dtype=dtype, compiled=config.compile)


def _cards(gpu: Gpu, world: int) -> Cluster:
    return cluster(str(world), here=lambda: gpu)


def forecast_s(config: RunConfig, gpu: Gpu, dtype: Dtype, world: int = 1) -> float | None:
    """Forecast a step's seconds. predict/speed/time.py knows a CPU with all its threads only, and no ranks on one."""
    spec = spec_of(config, gpu, dtype, world)
    if spec.sharing is not None:
        shared = rank_time(spec, spec.sharing, _cards(gpu, world)) if gpu.kind == "cuda" else None
        return shared.step_s.expected_s if shared else None
    found = step_time(spec)
    if found is None:
        return None
    share = 1.0
    known = gpu.calibration and tuned_like(gpu.calibration, spec)
    if gpu.kind == "cpu" and config.cpu_threads and gpu.sm_count and not known:
        share = max(1.0, gpu.sm_count / config.cpu_threads) ** FEWER_THREADS
    return found.expected_s * share


def forecast_memory(config: RunConfig, gpu: Gpu, dtype: Dtype, room_bytes: int | None, world: int = 1) -> RunMemory:
    spec = spec_of(config, gpu, dtype, world)
    if spec.sharing is not None and gpu.kind == "cuda":
        return rank_memory(spec, room_bytes, NcclMemory.of(_cards(gpu, world), spec.sharing))
    return predict(spec, room_bytes)


def fitting(found: Sequence[Setting], gpu: Gpu, dtype: Dtype, room_bytes: int | None, world: int = 1) -> list[Setting]:
    """Return the settings that may fit: per combination of the other options, micro-batches up to the largest such,
    which a binary search finds, as the need grows with it."""
    groups: dict[tuple[Level, ...], list[Setting]] = {}
    for setting in found:
        groups.setdefault(setting.but_batch, []).append(setting)
    kept = []
    for members in groups.values():
        batches = sorted({int(setting.levels[0]) for setting in members})
        low, high = 0, len(batches)  # so many of them may fit: low at least, high at most
        while low < high:
            middle = high if low == 0 and high == len(batches) else (low + high + 1) // 2
            config = next(s.config for s in members if s.levels[0] == batches[middle - 1])
            if forecast_memory(config, gpu, dtype, room_bytes, world).verdict in REFUSED:
                high = middle - 1
            else:
                low = middle
        kept += [setting for setting in members if int(setting.levels[0]) in batches[:low]]
    order = {setting.levels: number for number, setting in enumerate(found)}
    return sorted(kept, key=lambda setting: order[setting.levels])


def log_forecasts(found: Sequence[Setting], gpu: Gpu, dtype: Dtype, world: int = 1) -> list[float]:
    """Return logarithms of the forecast step times; zeros where the device's speed is unknown."""
    times: list[float] = []
    for setting in found:
        seconds = forecast_s(setting.config, gpu, dtype, world)
        if seconds is None:
            return [0.0] * len(found)
        times.append(log(seconds))
    return times

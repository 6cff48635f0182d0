"""The settings that `foretrain tune` chooses among: other ways to carry out the same training. Pure, no torch.

Every setting has the tokens per step, the model, the optimizer and the arithmetic that the config asks for; what may
differ is the order of sums, and the rounding of half precision where the config leaves the dtype open. A knob's values
that are in the space are its *levels*; what the config itself says is always one of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any, Literal

from foretrain.config.checks import check
from foretrain.config.microbatches import cut, divisors, sequences_of
from foretrain.config.options import RunConfig, named
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.memory import StepMemory, predict, worst_verdict
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.predict.tuned_steps import tuned_like

Level = bool | int | str
Learning = Literal["exact", "rounding", "draws"]
# In the order of definition. activation_checkpointing is searched by its number of blocks.
TUNABLE = named(lambda option: option.tuned)
CHUNKS = (0, 512, 2048)
MASTERS = "bfloat16 with fp32 masters"
FEWER_THREADS = 0.5  # a step on half the threads is taken to be 2^0.5 times as long, until it is measured


@dataclass(frozen=True)
class Machine:
    """What of the space a machine can do. `threads`: numbers worth trying on its CPU, its own one first."""

    cuda: bool
    can_compile: bool
    threads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setting:
    """One point of the space: its level of each knob in TUNABLE, and the whole config."""

    levels: tuple[Level, ...]
    config: RunConfig

    @property
    def named(self) -> dict[str, Level]:
        return dict(zip(TUNABLE, self.levels, strict=True))


def levels_of(config: RunConfig) -> tuple[Level, ...]:
    """The levels that a config stands for."""
    levels = {name: getattr(config, name) for name in TUNABLE}
    levels["activation_checkpointing"] = config.checkpointed
    if config.dtype == "bfloat16" and config.master_weights:
        levels["dtype"] = MASTERS
    return tuple(levels.values())


def options(
    asked: RunConfig, base: RunConfig, given: frozenset[str], wanted: Sequence[str], machine: Machine
) -> list[tuple[Level, ...]]:
    """The levels of each knob in TUNABLE, the base's own first.

    `asked`: the config as the user wrote it; `base`: with everything decided that it leaves open. A knob that is not
    in `wanted` keeps its level.
    """
    own = dict(zip(TUNABLE, levels_of(base), strict=True))
    free: dict[str, Sequence[Level]] = {
        "batch_size": divisors(sequences_of(base)),
        "compile": (False, True) if machine.can_compile else (False,),
        "activation_checkpointing": (0, base.n_layer // 2, base.n_layer),
        "recompute_norm_gelu": (False, True) if base.recipe == "nanogpt" else (),
        "loss_chunk_size": CHUNKS,
        "attention": ("sdpa", "bmm") if not machine.cuda and not base.obstacle_to_bmm else (),
        "dtype": _dtypes(asked, given, machine),
        "cpu_threads": machine.threads,
    }
    found = []
    for knob in TUNABLE:
        others = free[knob] if knob in wanted else ()
        found.append(tuple(dict.fromkeys((own[knob], *others))))
    return found


def _dtypes(asked: RunConfig, given: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """What the config leaves open. On a card 'auto' means one dtype, and other arithmetic was asked for by matmul."""
    if asked.dtype != "auto" or machine.cuda or asked.matmul != "dtype":
        return ()
    if "master_weights" in given:
        return ("float32", MASTERS if asked.master_weights else "bfloat16")
    return ("float32", "bfloat16", MASTERS)


def default_knobs(asked: RunConfig, given: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """What is searched where nobody names knobs: all but the kernels, dtype and threads that the config sets."""
    closed = set()
    if asked.attention != "auto":
        closed.add("attention")
    if asked.dtype != "auto":
        closed.add("dtype")
    if asked.cpu_threads or machine.cuda:
        closed.add("cpu_threads")
    return tuple(knob for knob in TUNABLE if knob not in closed)


def apply(base: RunConfig, levels: Sequence[Level]) -> RunConfig:
    """The base with other levels. Its tokens per step, and its evaluation's sequences, stay."""
    named: dict[str, Any] = dict(zip(TUNABLE, levels, strict=True))
    blocks, dtype = named["activation_checkpointing"], named["dtype"]
    update = {
        "compile": named["compile"], "activation_checkpointing": blocks > 0,
        "checkpointed_blocks": 0 if blocks in (0, base.n_layer) else blocks,
        "recompute_norm_gelu": named["recompute_norm_gelu"], "loss_chunk_size": named["loss_chunk_size"],
        "attention": named["attention"], "cpu_threads": named["cpu_threads"],
        "dtype": "bfloat16" if dtype == MASTERS else dtype,
        "master_weights": dtype == MASTERS or (base.master_weights and dtype == base.dtype),
    }  # fmt: skip
    made = cut(base, named["batch_size"]).model_copy(update=update)
    assert made.tokens_per_step == base.tokens_per_step
    return made


def settings(base: RunConfig, choices: Sequence[Sequence[Level]]) -> Iterator[Setting]:
    """The base, then every other valid combination. A chunk as large as the micro-batch is no chunk, so it is left
    out, as is what config/checks.py calls a contradiction."""
    own = levels_of(base)
    yield Setting(own, base)
    batches, *rest = choices
    valid = {}
    for others in product(*rest):
        config = apply(base, (own[0], *others))
        valid[others] = not check(config.model_dump(), {})[1]
    for others, batch in product(valid, batches):
        levels = (batch, *others)
        chunk = others[TUNABLE.index("loss_chunk_size") - 1]
        whole = chunk and chunk >= int(batch) * base.block_size and chunk != base.loss_chunk_size
        if valid[others] and not whole and levels != own:
            yield Setting(levels, apply(base, levels))


def learning(base: RunConfig, config: RunConfig) -> Learning:
    """What of the learning differs: nothing but the order of sums, the rounding of half precision, or the draws of
    dropout, whose expectation stays."""
    if (config.dtype, config.master_weights) != (base.dtype, base.master_weights):
        return "rounding"
    cut_differs = (config.batch_size, config.compile) != (base.batch_size, base.compile)
    return "draws" if base.dropout and cut_differs else "exact"


# -- what is forecast of them ------------------------------------------------------------------------------


def dtype_of(config: RunConfig, fallback: Dtype) -> Dtype:
    """The dtype of a decided config."""
    return fallback if config.dtype == "auto" else config.dtype


def spec_of(config: RunConfig, gpu: Gpu, fallback: Dtype) -> StepSpec:
    """The step of a decided config."""
    return StepSpec.of(config, gpu, dtype=dtype_of(config, fallback))


def forecast_s(config: RunConfig, gpu: Gpu, dtype: Dtype) -> float | None:
    """Seconds of a step by predict/speed/time.py, which knows a CPU with all its threads only."""
    found = step_time(spec_of(config, gpu, dtype))
    if found is None:
        return None
    share = 1.0
    known = gpu.calibration and tuned_like(gpu.calibration, config, dtype_of(config, dtype), compiled=config.compile)
    if gpu.kind == "cpu" and config.cpu_threads and gpu.sm_count and not known:
        share = max(1.0, gpu.sm_count / config.cpu_threads) ** FEWER_THREADS
    return found.expected_s * share


def forecast_memory(config: RunConfig, gpu: Gpu, dtype: Dtype, room_bytes: int | None) -> StepMemory:
    """The ledger of a setting."""
    return predict(spec_of(config, gpu, dtype), room_bytes)


def fitting(found: Sequence[Setting], gpu: Gpu, dtype: Dtype, room_bytes: int | None) -> list[Setting]:
    """Those that are not forecast to fail: in each combination of the other knobs, the micro-batches up to the largest
    that may fit. The need grows with the micro-batch, so a few looks find it; threads take no memory."""
    groups: dict[tuple[Level, ...], list[Setting]] = {}
    for setting in found:
        groups.setdefault(setting.levels[1:-1], []).append(setting)
    kept = []
    for members in groups.values():
        batches = sorted({int(setting.levels[0]) for setting in members})
        low, high = 0, len(batches)  # so many of them may fit: low at least, high at most
        while low < high:
            middle = high if low == 0 and high == len(batches) else (low + high + 1) // 2
            config = next(s.config for s in members if s.levels[0] == batches[middle - 1])
            if worst_verdict(forecast_memory(config, gpu, dtype, room_bytes)) == "does_not_fit":
                high = middle - 1
            else:
                low = middle
        kept += [setting for setting in members if int(setting.levels[0]) in batches[:low]]
    order = {setting.levels: number for number, setting in enumerate(found)}
    return sorted(kept, key=lambda setting: order[setting.levels])


def log_forecasts(found: Sequence[Setting], gpu: Gpu, dtype: Dtype) -> list[float]:
    """Logarithms of the forecast step times; zeros where the device's speed is not known."""
    times: list[float] = []
    for setting in found:
        seconds = forecast_s(setting.config, gpu, dtype)
        if seconds is None:
            return [0.0] * len(found)
        times.append(log(seconds))
    return times

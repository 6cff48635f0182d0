"""What is forecast of the settings of `foretrain tune`: time and memory, alone or shared among ranks. No torch."""

from collections.abc import Sequence
from math import log

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.predict.memory import REFUSED, StepMemory, predict, worst_verdict
from foretrain.predict.ranks.plan import rank_memory
from foretrain.predict.ranks.record import NcclMemory
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import rank_time
from foretrain.predict.speed.time import step_time
from foretrain.predict.tuned_steps import tuned_like
from foretrain.tuning.space import Level, Setting

FEWER_THREADS = 0.5  # a step on half the threads is taken to be 2^0.5 times as long, until it is measured


def dtype_of(config: RunConfig, fallback: Dtype) -> Dtype:
    return fallback if config.dtype == "auto" else config.dtype


def spec_of(config: RunConfig, gpu: Gpu, fallback: Dtype, world: int = 1) -> StepSpec:
    """The step of a decided config, or the part of it that one of `world` ranks on this machine carries out."""
    dtype = dtype_of(config, fallback)
    if world == 1:
        return StepSpec.of(config, gpu, dtype=dtype)
    return StepSpec.of_rank(config, gpu, world, world, dtype=dtype, compiled=config.compile)


def _cards(gpu: Gpu, world: int) -> Cluster:
    """So many of these cards in one machine, with the link that they usually have."""
    return cluster(str(world), here=lambda: gpu)


def forecast_s(config: RunConfig, gpu: Gpu, dtype: Dtype, world: int = 1) -> float | None:
    """Seconds of a step by predict/speed/time.py, which knows a CPU with all its threads only, and no ranks on one."""
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


def forecast_memory(config: RunConfig, gpu: Gpu, dtype: Dtype, room_bytes: int | None, world: int = 1) -> StepMemory:
    """The ledger of a setting, of one process."""
    spec = spec_of(config, gpu, dtype, world)
    if spec.sharing is not None and gpu.kind == "cuda":
        return rank_memory(spec, room_bytes, NcclMemory.of(_cards(gpu, world), spec.sharing))
    return predict(spec, room_bytes)


def fitting(found: Sequence[Setting], gpu: Gpu, dtype: Dtype, room_bytes: int | None, world: int = 1) -> list[Setting]:
    """Those that are not forecast to fail: in each combination of the other knobs, the micro-batches up to the largest
    that may fit. The need grows with the micro-batch, so a few looks find it; threads take no memory."""
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
            if worst_verdict(forecast_memory(config, gpu, dtype, room_bytes, world)) in REFUSED:
                high = middle - 1
            else:
                low = middle
        kept += [setting for setting in members if int(setting.levels[0]) in batches[:low]]
    order = {setting.levels: number for number, setting in enumerate(found)}
    return sorted(kept, key=lambda setting: order[setting.levels])


def log_forecasts(found: Sequence[Setting], gpu: Gpu, dtype: Dtype, world: int = 1) -> list[float]:
    """Logarithms of the forecast step times; zeros where the device's speed is not known."""
    times: list[float] = []
    for setting in found:
        seconds = forecast_s(setting.config, gpu, dtype, world)
        if seconds is None:
            return [0.0] * len(found)
        times.append(log(seconds))
    return times

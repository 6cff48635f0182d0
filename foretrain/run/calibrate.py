"""`foretrain calibrate`: half a minute of measuring on the present device, kernel by kernel, then a few whole steps.

Each kernel runs until it has run for some tens of milliseconds, three times at least; the quicker runs count, as what
else the machine does can only slow one down. Whole steps then say by how much a step is slower than its kernels.
"""

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretrain.calibration import Calibration, KernelTime, StepTime, installed_torch
from foretrain.config import RunConfig
from foretrain.cpu import cpu_flags
from foretrain.lm.step import build, train_step
from foretrain.run import kernels, sensors
from foretrain.run.device import TORCH_DTYPES, Placement, obstacle_to_compile

Listen = Callable[[str, float], None]  # what is being measured, and the share that is done
SIZES = (16_384, 262_144, 4_194_304)  # elements
LARGE_SIZES = (262_144, 4_194_304, 67_108_864)
ENOUGH_S, FEWEST, MOST = 0.04, 3, 200
REFERENCE: dict[str, int | float | bool] = {
    "n_layer": 2, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 8192, "batch_size": 8,
    "gradient_accumulation_steps": 2, "dropout": 0.0,
}  # fmt: skip
LARGE_REFERENCE = {**REFERENCE, "n_layer": 6, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
REFERENCE_STEPS = 8


def usual_dtypes(device: torch.device, *, quick: bool) -> list[str]:
    """fp32 on a CPU, and bf16 where it has instructions for it; on a card bf16 and fp16 first."""
    if device.type == "cuda":
        half = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        # fp32 is always there, as half of a half-precision step's kernels are fp32.
        return [half, "float32"] if quick else list(dict.fromkeys([half, "float16", "float32"]))
    fast = bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
    return ["float32", "bfloat16"] if fast and not quick else ["float32"]


def modes_for(placement: Placement) -> list[bool]:
    """Eager, and compiled where torch.compile can work."""
    return [False] if obstacle_to_compile(placement.device) else [False, True]


def timer(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that times one call on this device; on CUDA by events, so that launching is not in it."""
    if device.type != "cuda":

        def on_cpu(run: Callable[[], Any]) -> float:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started

        return on_cpu

    def on_cuda(run: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # a millisecond of nothing, in which Python gets ahead of the card
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return on_cuda


def time_of(run: Callable[[], Any], timed: Callable[[Callable[[], Any]], float]) -> float:
    """Seconds of a call, warmed up: the value that a quarter of the runs stay below."""
    run()
    samples = [timed(run)]
    while len(samples) < FEWEST or (sum(samples) < ENOUGH_S and len(samples) < MOST):
        samples.append(timed(run))
    return sorted(samples)[len(samples) // 4]


def _kernels(device: torch.device, dtypes: list[str]) -> Iterator[kernels.Kernel]:
    large = device.type == "cuda"
    for dtype in dtypes:
        yield from kernels.products(device, dtype, large=large)
        yield from kernels.attention(device, dtype, large=large)
        for elements in LARGE_SIZES if large else SIZES:
            yield from kernels.element_kernels(device, dtype, elements)
            yield from kernels.rows_kernels(device, dtype, elements)


def kernel_times(device: torch.device, dtypes: list[str], listen: Listen) -> list[KernelTime]:
    """All of them. Attention's backward pass is both passes less the forward one."""
    timed, found = timer(device), list[KernelTime]()
    for done, kernel in enumerate(_kernels(device, dtypes)):
        listen(f"{kernel.kind} {kernel.dtype}", min(0.6, done / (200 * len(dtypes))))
        seconds, kind = time_of(kernel.run, timed), kernel.kind
        if kind == "attention_both":
            seconds, kind = max(seconds - found[-1].time_s, seconds / 2), "attention_backward"
        shape = tuple(round(size) for size in kernel.shape)
        found.append(KernelTime(kind=kind, dtype=kernel.dtype, shape=shape, time_s=seconds))
    return found


def launch_time(device: torch.device) -> float:
    """What an operation costs besides its kernel: a tiny one with gradients, forward and backward, per operation."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y * 1.0001
        y.sum().backward()

    def timed(run: Callable[[], Any]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return time_of(chain, timed) / 100


def step_times(config: RunConfig, placement: Placement, dtype: str, *, compiled: bool, count: int) -> list[float]:
    """Seconds of `count` steps of foretrain's trainer on random tokens, after the ones that compile and warm up."""
    device = placement.device
    state = build(config, device, TORCH_DTYPES[dtype], compile=compiled)
    tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    samples = []
    for _ in range(count + 2):
        started = time.perf_counter()
        train_step(state, [batch] * config.gradient_accumulation_steps, 1e-4).loss.item()
        samples.append(time.perf_counter() - started)
    return samples[2:]


def _reference(placement: Placement, dtype: str, *, compiled: bool) -> StepTime:
    """The small step that corrects all others."""
    knobs = LARGE_REFERENCE if placement.device.type == "cuda" else REFERENCE
    samples = step_times(RunConfig.model_validate(knobs), placement, dtype, compiled=compiled, count=REFERENCE_STEPS)
    return StepTime(knobs=knobs, dtype=dtype, compiled=compiled, time_s=sorted(samples)[len(samples) // 4])


def calibrate(placement: Placement, dtypes: list[str], modes: list[bool], listen: Listen) -> Calibration:
    """Measure everything for these dtypes; `modes`: which of eager (False) and compiled (True) steps to time.

    Nothing is written; an exception leaves no trace. Raises torch's own errors where the device vanishes.
    """
    device, started = placement.device, time.perf_counter()
    was = torch.get_rng_state()
    with sensors.Load(device) as load:
        found = kernel_times(device, dtypes, listen)
        launch_s = launch_time(device)
        steps = []
        for dtype in dtypes:
            for compiled in modes:
                share = 0.6 + 0.4 * len(steps) / (len(dtypes) * len(modes))
                listen(f"step {dtype}{' compiled' if compiled else ''}", share)
                steps.append(_reference(placement, dtype, compiled=compiled))
    torch.set_rng_state(was)
    return Calibration(
        device=placement.gpu.name, driver=load.driver, torch_version=installed_torch(),
        threads=torch.get_num_threads(), date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        took_s=time.perf_counter() - started, kernels=tuple(found), steps=tuple(steps), launch_s=launch_s,
        context_bytes=load.context_bytes(), clock_ghz=load.clock_ghz, power_w=load.power_w,
    )  # fmt: skip

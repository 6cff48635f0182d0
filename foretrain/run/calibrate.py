"""`foretrain calibrate`: half a minute of measuring on the present device, kernel by kernel, then a few whole steps.

Each kernel runs until it has run for some tens of milliseconds, three times at least; the quicker runs count, as what
else the machine does can only slow one down. Whole steps then say by how much a step is slower than its kernels.
"""

import datetime
import statistics
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
ENOUGH_S, FEWEST, MOST = 0.02, 3, 100
REFERENCE: dict[str, int | float | bool | str] = {
    "n_layer": 2, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 8192, "batch_size": 8,
    "gradient_accumulation_steps": 2, "dropout": 0.0,
}  # fmt: skip
LARGE_REFERENCE: dict[str, int | float | bool | str] = {
    **REFERENCE, "n_layer": 6, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304,
}  # fmt: skip
REFERENCE_STEPS, ROUNDS = 3, 2


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


def samples_of(run: Callable[[], Any], timed: Callable[[Callable[[], Any]], float]) -> list[float]:
    """Seconds of a call, warmed up, again and again."""
    run()
    samples = [timed(run)]
    while len(samples) < FEWEST or (sum(samples) < ENOUGH_S and len(samples) < MOST):
        samples.append(timed(run))
    return samples


def quick(samples: list[float]) -> float:
    """The value that a quarter of the runs stay below."""
    return sorted(samples)[len(samples) // 4]


def _kernels(device: torch.device, dtypes: list[str]) -> Iterator[kernels.Kernel]:
    large = device.type == "cuda"
    for dtype in dtypes:
        yield from kernels.products(device, dtype, large=large)
        yield from kernels.attention(device, dtype, large=large)
        for elements in LARGE_SIZES if large else SIZES:
            yield from kernels.element_kernels(device, dtype, elements)
            yield from kernels.rows_kernels(device, dtype, elements)


Samples = dict[tuple[str, str, tuple[int, ...]], list[float]]  # of (kind, dtype, shape)


def sample_kernels(
    device: torch.device, dtypes: list[str], found: Samples, listen: Callable[[str, float], None]
) -> None:
    """Run all of them once more and add what they took."""
    timed = timer(device)
    for done, kernel in enumerate(_kernels(device, dtypes)):
        listen(f"{kernel.kind} {kernel.dtype}", min(1.0, done / (100 * len(dtypes))))
        key = kernel.kind, kernel.dtype, tuple(round(size) for size in kernel.shape)
        found.setdefault(key, []).extend(samples_of(kernel.run, timed))


def kernel_times(found: Samples) -> tuple[list[KernelTime], float]:
    """The times, and their unsteadiness. Attention's backward pass is both passes less the forward one."""
    times, slower = list[KernelTime](), list[float]()
    for (kind, dtype, shape), samples in found.items():
        time_s = quick(samples)
        slower.append(statistics.median(samples) / time_s - 1)
        name = kind
        if kind == "attention_both":
            name, time_s = "attention_backward", max(time_s - quick(found["attention", dtype, shape]), time_s / 2)
        times.append(KernelTime(kind=name, dtype=dtype, shape=shape, time_s=time_s))
    return times, statistics.median(slower)


def launch_time(device: torch.device) -> float:
    """What an operation costs besides its kernel: a tiny one with gradients, forward and backward, per operation."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y * 1.0001
        y.sum().backward()

    return quick(samples_of(chain, timer(torch.device("cpu")))) / 100  # the host's clock: only what launching takes


class Stepper:
    """foretrain's trainer on random tokens, built, compiled and warmed up."""

    def __init__(self, config: RunConfig, placement: Placement, dtype: str, *, compiled: bool) -> None:
        device = placement.device
        self.config, self.dtype, self.compiled = config, dtype, compiled
        self.state = build(config, device, TORCH_DTYPES[dtype], compile=compiled)
        tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1), device=device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.times(2)

    def times(self, count: int) -> list[float]:
        """Seconds of so many steps."""
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            micro = [self.batch] * self.config.gradient_accumulation_steps
            train_step(self.state, micro, 1e-4).loss.item()
            samples.append(time.perf_counter() - started)
        return samples


def _reference(placement: Placement, dtype: str, *, compiled: bool) -> Stepper:
    """The small step that corrects all others."""
    knobs = LARGE_REFERENCE if placement.device.type == "cuda" else REFERENCE
    return Stepper(RunConfig.model_validate(knobs), placement, dtype, compiled=compiled)


def calibrate(placement: Placement, dtypes: list[str], modes: list[bool], listen: Listen) -> Calibration:
    """Measure everything for these dtypes; `modes`: which of eager (False) and compiled (True) steps to time.

    Nothing is written; an exception leaves no trace. Raises torch's own errors where the device vanishes.
    """
    device, started = placement.device, time.perf_counter()
    was = torch.get_rng_state()
    samples: Samples = {}
    with sensors.Load(device) as load:
        wanted = [(dtype, compiled) for dtype in dtypes for compiled in modes]
        references, steps_s = [], [list[float]() for _ in wanted]
        for dtype, compiled in wanted:
            listen(f"step {dtype}{' compiled' if compiled else ''}", 0.4 * len(references) / len(wanted))
            references.append(_reference(placement, dtype, compiled=compiled))
        for done in range(ROUNDS):  # a machine's speed drifts; what is compared has to be measured side by side
            for step, times in zip(references, steps_s, strict=True):
                times += step.times(REFERENCE_STEPS)
            base, width = 0.4 + 0.6 * done / ROUNDS, 0.6 / ROUNDS
            sample_kernels(device, dtypes, samples, lambda what, share: listen(what, base + width * share))  # noqa: B023
        for step, times in zip(references, steps_s, strict=True):
            times += step.times(REFERENCE_STEPS)
        launch_s = launch_time(device)
    found, unsteadiness = kernel_times(samples)
    knobs = LARGE_REFERENCE if device.type == "cuda" else REFERENCE
    steps = [
        StepTime(options=knobs, dtype=step.dtype, compiled=step.compiled, time_s=quick(times))
        for step, times in zip(references, steps_s, strict=True)
    ]
    torch.set_rng_state(was)
    return Calibration(
        device=placement.gpu.name, driver=load.driver, torch_version=installed_torch(),
        threads=torch.get_num_threads(), date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        took_s=time.perf_counter() - started, kernels=tuple(found), steps=tuple(steps), launch_s=launch_s,
        unsteadiness=unsteadiness,
        context_bytes=load.context_bytes(), clock_ghz=load.clock_ghz, power_w=load.power_w,
    )  # fmt: skip

"""A device's practical peaks: matmuls, bandwidth, pages, launches. The fastest run counts, or a step could beat it."""

import math
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from foretrain.hardware.calibration import Bandwidth, Calibration, Peaks, ProductPeak
from foretrain.measure import calibrate as calibrating
from foretrain.measure import calibrate as kernels
from foretrain.measure.timer import Enough, Timer, on_host, repeated, timer
from foretrain.training.device import TORCH_DTYPES, Placement

Listen = Callable[[str, float], None]
ENOUGH_S, FEWEST, MOST = 0.04, 3, 100_000
MOST_ON_CARD = 200  # the smallest kernels would otherwise run thousands of times
# (rows, out, in) of linear layers: narrow and wide ones, few and many rows, and a head.
SHAPES = ((768, 512, 128), (2048, 1536, 384), (2048, 384, 384), (512, 384, 384), (2048, 3072, 768), (1024, 8192, 384))
LARGE_SHAPES = ((16384, 3072, 768), (16384, 6144, 1536), (8192, 8192, 2048), (16384, 50304, 768))
# (batch x heads, context, width of a head) of attention as matmuls.
HEADS = ((48, 64, 32), (24, 256, 64), (12, 512, 64), (8, 256, 128), (4, 1024, 64))
LARGE_HEADS = ((192, 1024, 64), (64, 2048, 128))
SMALLEST_BYTES, SIZES, LARGE_SIZES = 1 << 18, 11, 13  # each size moves twice as much as the one before
PAGES_BYTES = 64 << 20
LAUNCHES = 200
OTHERS = 0.9  # of a calibration's time: its kernels and steps


def measure(device: torch.device, dtypes: list[str], timed: Timer, listen: Listen = lambda what, share: None) -> Peaks:
    started, most = time.perf_counter(), MOST_ON_CARD if device.type == "cuda" else MOST
    matmuls: list[ProductPeak] = []
    for number, dtype in enumerate(dtypes):
        listen(f"peak {dtype}", 0.8 * number / len(dtypes))
        matmuls += _best_kernels(device, dtype, timed, most)
    listen("bandwidth", 0.8)
    rates = [
        Bandwidth(access=access, moved_bytes=moved_bytes, bytes_per_s=moved_bytes / _best_s(run, timed, most))
        for access, moved_bytes, run in accesses(device)
    ]
    listen("launch", 0.95)
    launch_s, autograd_launch_s = (_best_s(run, on_host, most) for run in _launches(device))
    on_cpu = device.type == "cpu"
    return Peaks(
        matmuls=tuple(matmuls), bandwidths=tuple(rates), launch_s=launch_s / LAUNCHES,
        autograd_launch_s=autograd_launch_s / LAUNCHES, page_s=page_time() if on_cpu else None,
        page_bytes=mmap.PAGESIZE if on_cpu else None, took_s=time.perf_counter() - started,
    )  # fmt: skip


def calibrated(placement: Placement, dtypes: list[str], modes: list[bool], listen: Listen) -> Calibration:
    found = calibrating.calibrate(placement, dtypes, modes, lambda what, share: listen(what, OTHERS * share))
    timed = timer(placement.device)
    best = measure(placement.device, dtypes, timed, lambda what, share: listen(what, OTHERS + (1 - OTHERS) * share))
    return found.model_copy(update={"peaks": best, "took_s": found.took_s + best.took_s})


def _best_s(run: Callable[[], Any], timed: Timer, most: int) -> float:
    return min(repeated(run, timed, Enough(ENOUGH_S, FEWEST, most)))


def _best_kernels(device: torch.device, dtype: str, timed: Timer, most: int) -> list[ProductPeak]:
    best: dict[str, ProductPeak] = {}
    for kernel in (*_linear(device, dtype), *batched(device, dtype)):
        rate = 2 * math.prod(kernel.shape) / _best_s(kernel.run, timed, most)
        if kernel.kind not in best or rate > best[kernel.kind].flop_per_s:
            kind: Any = kernel.kind
            best[kind] = ProductPeak(kind=kind, dtype=dtype, shape=kernel.shape, flop_per_s=rate)
    return list(best.values())


def _linear(device: torch.device, dtype: str) -> Iterator[kernels.Kernel]:
    for shape in LARGE_SHAPES if device.type == "cuda" else SHAPES:
        yield from kernels.product(device, dtype, *shape)


def batched(device: torch.device, dtype: str) -> Iterator[kernels.Kernel]:
    """Yield attention's matmuls: q times k, probabilities times v, and both transposed, as in backward."""
    for n, t, d in LARGE_HEADS if device.type == "cuda" else HEADS:
        q, k, p = (kernels.numbers(shape, device, dtype) for shape in ((n, t, d), (n, t, d), (n, t, t)))
        scores, out = torch.empty_like(p), torch.empty_like(q)
        yield kernels.Kernel(
            "attention", dtype, (n, t, t, d), lambda q=q, k=k, s=scores: torch.bmm(q, k.transpose(1, 2), out=s)
        )
        yield kernels.Kernel("attention", dtype, (n, t, d, t), lambda p=p, k=k, o=out: torch.bmm(p, k, out=o))
        yield kernels.Kernel(
            "attention", dtype, (n, t, d, t), lambda p=p, k=k, o=out: torch.bmm(p.transpose(1, 2), k, out=o)
        )


def accesses(device: torch.device) -> Iterator[tuple[Any, int, Callable[[], Any]]]:
    sizes = [SMALLEST_BYTES << doubled for doubled in range(LARGE_SIZES if device.type == "cuda" else SIZES)]
    item = TORCH_DTYPES["float32"].itemsize
    source, target = (torch.ones(sizes[-1] // item, device=device) for _ in range(2))
    for moved in sizes:
        elements = moved // item
        all, half, other = target[:elements], target[: elements // 2], source[: elements // 2]
        yield "copy", moved, lambda x=other, y=half: y.copy_(x)
        yield "read", moved, lambda y=all: y.sum()
        yield "write", moved, lambda y=all: y.fill_(1.0)
        yield "in_place", moved, lambda y=half: y.mul_(1.0)


def _launches(device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x = torch.ones(1, device=device)
    weight = torch.ones(1, device=device, requires_grad=True)

    def plain() -> None:
        with torch.no_grad():
            for _ in range(LAUNCHES):
                x.mul_(1.0)

    def with_gradients() -> None:
        y = weight
        for _ in range(LAUNCHES):
            y = y * 1.0
        torch.autograd.grad(y, weight)

    return plain, with_gradients


def page_time() -> float:
    """Measure the first touch of a fresh page, above that of a page that is there."""
    found = []
    for _ in range(3):
        with mmap.mmap(-1, PAGES_BYTES) as block:
            pages = np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE]

            def touch(pages: np.ndarray = pages) -> None:
                pages[:] = 1

            first_s, again_s = on_host(touch, 2)
            found.append((first_s - again_s) / len(pages))
            del pages, touch
    return max(0.0, min(found))

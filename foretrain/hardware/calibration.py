"""Measurements of one device (measure/calibrate.py), cached, and loaded only for the same driver and torch version."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

from foretrain.base.cache import Cache
from foretrain.base.installation import installed_torch
from foretrain.base.records import Record

# A linear layer's three matmuls differ only in layout, so the best of them is a limit for each.
ProductKind = Literal["matmul", "matmul_input", "matmul_weight", "attention"]
Access = Literal["copy", "read", "write", "in_place"]


class ProductPeak(Record):
    """The best rate of one kind of matmul in one dtype, and its shape: (m, n, k), batched ones with their count first;
    (B, H, T, D) of an attention kernel, whose causal half counts.
    """

    kind: ProductKind
    dtype: str
    shape: tuple[int, ...]
    flop_per_s: float


class Bandwidth(Record):
    access: Access
    moved_bytes: int
    bytes_per_s: float


class Peaks(Record):
    """`page_s`: the first touch of a fresh page, on a CPU. `launch_s`: the smallest operation, also with backward."""

    matmuls: tuple[ProductPeak, ...]
    bandwidths: tuple[Bandwidth, ...]
    launch_s: float
    autograd_launch_s: float
    page_s: float | None = None
    page_bytes: int | None = None
    took_s: float = 0.0

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(each.dtype for each in self.matmuls if each.kind != "attention"))

    def best(self, dtype: str, *kinds: ProductKind) -> ProductPeak | None:
        found = [each for each in self.matmuls if each.dtype == dtype and each.kind in kinds]
        return max(found, key=lambda each: each.flop_per_s, default=None)

    def flop_per_s(self, dtype: str, *, attention: bool = False) -> float | None:
        found = self.best(dtype, "attention") if attention else None
        found = found or self.best(dtype, "matmul", "matmul_input", "matmul_weight")
        return found.flop_per_s if found else None

    def bytes_per_s(self, moved_bytes: float, *, in_place: bool = False) -> float | None:
        """Return the bandwidth for so many bytes: log-linear between sizes, and no less than of any larger one.
        `in_place`: writes where it read, so that half the room in a cache is enough."""
        best: dict[int, float] = {}
        for each in self.bandwidths:
            if (each.access == "in_place") == in_place:
                best[each.moved_bytes] = max(each.bytes_per_s, best.get(each.moved_bytes, 0.0))
        if not best:
            return self.bytes_per_s(moved_bytes) if in_place else None
        points = list[tuple[int, float]]()
        for size in sorted(best, reverse=True):
            points.append((size, max(best[size], points[-1][1] if points else 0.0)))
        points.reverse()
        return _between(points, moved_bytes)

    def cache_bytes_per_s(self, *, in_place: bool = False) -> float | None:
        return self.bytes_per_s(0, in_place=in_place)

    def memory_bytes_per_s(self, *, in_place: bool = False) -> float | None:
        return self.bytes_per_s(math.inf, in_place=in_place)


def _between(points: list[tuple[int, float]], size: float) -> float:
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if size < high:
            share = math.log(size / low) / math.log(high / low)
            return low_rate ** (1 - share) * high_rate**share
    return points[-1][1]


def best_of(*several: Peaks) -> Peaks:
    matmuls: dict[tuple[str, str], ProductPeak] = {}
    for each in (each for peaks in several for each in peaks.matmuls):
        key = each.kind, each.dtype
        if key not in matmuls or each.flop_per_s > matmuls[key].flop_per_s:
            matmuls[key] = each
    moved: dict[tuple[str, int], Bandwidth] = {}
    for rate in (rate for peaks in several for rate in peaks.bandwidths):
        at = rate.access, rate.moved_bytes
        if at not in moved or rate.bytes_per_s > moved[at].bytes_per_s:
            moved[at] = rate
    pages = [peaks for peaks in several if peaks.page_s is not None]
    page = min(pages, key=lambda peaks: peaks.page_s or 0.0) if pages else several[0]
    return Peaks(
        matmuls=tuple(matmuls.values()), bandwidths=tuple(moved.values()),
        launch_s=min(peaks.launch_s for peaks in several),
        autograd_launch_s=min(peaks.autograd_launch_s for peaks in several),
        page_s=page.page_s, page_bytes=page.page_bytes, took_s=sum(peaks.took_s for peaks in several),
    )  # fmt: skip


KEPT = Cache("calibrations")
SCHEMA = "foretrain.calibration/1"
MOST_TUNED = 200
OTHERS_DISTURB = 0.1  # of the processor


class KernelTime(Record):
    """One measured kernel: `shape` as in predict/speed/ops.py ((m, n, k) of a matmul, (B, H, T, D) of attention, else
    (bytes read and written,)); `time_s` is the median of its runs.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    time_s: float


class StepTime(Record):
    """A small step of foretrain's trainer, measured to correct others. `forward_s`: of an evaluation's micro-batch."""

    options: dict[str, int | float | bool | str]
    dtype: str
    compiled: bool
    time_s: float
    forward_s: float | None = None


class Calibration(Record):
    """`launch_s`: overhead of one eager operation beside its kernel. Clock, power and context: GPUs only.

    `unsteadiness`: by what share a kernel's median run was slower than its fast ones; `drift`: the slowest round of a
    reference step than its fastest. `others_share`: of the processor, used by other programs. `start_s`: on a CPU,
    before the first steady step.
    """

    device: str
    driver: str
    torch_version: str
    threads: int
    date: str
    took_s: float
    kernels: tuple[KernelTime, ...]
    steps: tuple[StepTime, ...] = ()
    launch_s: float
    unsteadiness: float = 0.0
    drift: float = 0.0
    others_share: float | None = None
    start_s: float | None = None
    context_bytes: int | None = None
    clock_ghz: float | None = None
    power_w: float | None = None
    peaks: Peaks | None = None
    tuned: tuple[StepTime, ...] = ()  # steps that `foretrain tune` timed here (predict/speed/time.py)

    @property
    def disturbed(self) -> bool:
        return self.unsteadiness > 0.25 or (self.others_share or 0.0) > OTHERS_DISTURB

    def steps_of(self, dtype: str, *, compiled: bool) -> list[StepTime]:
        return [s for s in self.steps if s.dtype == dtype and s.compiled == compiled]


def path_of(device: str, driver: str) -> Path:
    return KEPT.path(f"{device}\n{driver}\n{installed_torch()}")


def load(device: str, driver: str = "") -> Calibration | None:
    """Return the calibration of this device, driver and torch; None for a damaged file, too."""
    found = KEPT.record(path_of(device, driver), Calibration)
    if found is None or (found.device, found.driver, found.torch_version) != (device, driver, installed_torch()):
        return None
    return found.model_copy(update={"tuned": tuned_steps(device, driver)})


def tuned_path(device: str, driver: str) -> Path:
    return path_of(device, driver).with_suffix(".steps.json")


def tuned_steps(device: str, driver: str = "") -> tuple[StepTime, ...]:
    try:
        listed = KEPT.value(tuned_path(device, driver))["steps"]
        return tuple(StepTime.model_validate(step) for step in listed)
    except (ValueError, KeyError, TypeError):
        return ()


def save_tuned(device: str, driver: str, steps: tuple[StepTime, ...]) -> None:
    """Store these steps and the newest of the earlier ones, one for each set of options. Raises OSError."""
    new = {
        json.dumps([s.options, s.dtype, s.compiled], sort_keys=True): s for s in (*tuned_steps(device, driver), *steps)
    }
    kept = list(new.values())[-MOST_TUNED:]
    text = json.dumps({"schema": SCHEMA, "steps": [step.to_json() for step in kept]}, indent=1)
    KEPT.write(tuned_path(device, driver), text)


def save(found: Calibration) -> Path:
    path = path_of(found.device, found.driver)
    KEPT.write(path, found.model_dump_json(indent=1, exclude={"tuned"}))
    return path

"""What was measured on one device: times of single kernels, overheads, clock, power, CUDA context; kept in a cache.

A calibration belongs to a device, its driver and its torch version; `load` gives it only to these. `foretrain
calibrate` makes it (tuning/calibrate.py), predict/speed/rates.py reads it.
"""

import json
from pathlib import Path

from foretrain.base.cache import Cache
from foretrain.base.installation import installed_torch
from foretrain.base.records import Record
from foretrain.hardware.peaks import Peaks

KEPT = Cache("calibrations")
SCHEMA = "foretrain.calibration/2"
MOST_TUNED = 200
OTHERS_DISTURB = 0.1  # of the processor


class KernelTime(Record):
    """One kernel, measured: `shape` as in predict/speed/ops.py ((m, n, k) of a product, (B, H, T, D) of attention, else
    (bytes read and written,)); `time_s` is the median of its runs."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    time_s: float


class StepTime(Record):
    """A whole small step of foretrain's trainer, measured; against the sum of its kernels it corrects other steps.

    `forward_s`: of one micro-batch of an evaluation, which has other kernels and no gradients.
    """

    options: dict[str, int | float | bool | str]
    dtype: str
    compiled: bool
    time_s: float
    forward_s: float | None = None


class Calibration(Record):
    """All of it. `launch_s`: what one eager operation costs beside its kernel. Clock, power and context: GPUs only.

    `unsteadiness`: by what share a kernel's middle run was slower than its quick ones, in the middle of all kernels.
    `drift`: by what share the slowest round of a reference step was slower than its quickest, in the middle of them.
    `others_share`: of the processor, used by other programs meanwhile. `start_s`: on a CPU, what a run takes before its
    first steady step: to build the model, and longer first steps.
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
    peaks: Peaks | None = None  # None: of an older version
    tuned: tuple[StepTime, ...] = ()  # steps that `foretrain tune` timed here (predict/tuned_steps.py)

    @property
    def disturbed(self) -> bool:
        """Something else was running, so the figures are not this device's alone."""
        return self.unsteadiness > 0.25 or (self.others_share or 0.0) > OTHERS_DISTURB

    def steps_of(self, dtype: str, *, compiled: bool) -> list[StepTime]:
        """The timed steps in this dtype, compiled or not; empty where none was timed."""
        return [s for s in self.steps if s.dtype == dtype and s.compiled == compiled]


def path_of(device: str, driver: str) -> Path:
    """Where the calibration of a device lies."""
    return KEPT.path(f"{device}\n{driver}\n{installed_torch()}")


def load(device: str, driver: str = "") -> Calibration | None:
    """The calibration of this device, driver and torch, if one was made; None for a damaged file, too."""
    found = KEPT.record(path_of(device, driver), Calibration)
    if found is None or (found.device, found.driver, found.torch_version) != (device, driver, installed_torch()):
        return None
    return found.model_copy(update={"tuned": tuned_steps(device, driver)})


def tuned_path(device: str, driver: str) -> Path:
    """Where the steps that `foretrain tune` timed on a device lie: beside its calibration, which may come later."""
    return path_of(device, driver).with_suffix(".steps.json")


def tuned_steps(device: str, driver: str = "") -> tuple[StepTime, ...]:
    """The steps that were timed on this device; none where the file is damaged."""
    try:
        listed = KEPT.value(tuned_path(device, driver))["steps"]
        return tuple(StepTime.model_validate(step) for step in listed)
    except (ValueError, KeyError, TypeError):
        return ()


def save_tuned(device: str, driver: str, steps: tuple[StepTime, ...]) -> None:
    """Keep these steps, and the newest of those before: a step of the same knobs gives way. Raises OSError."""
    new = {
        json.dumps([s.options, s.dtype, s.compiled], sort_keys=True): s for s in (*tuned_steps(device, driver), *steps)
    }
    kept = list(new.values())[-MOST_TUNED:]
    text = json.dumps({"schema": SCHEMA, "steps": [step.to_json() for step in kept]}, indent=1)
    KEPT.write(tuned_path(device, driver), text)


def save(found: Calibration) -> Path:
    """Kept under its name only when whole. Raises OSError."""
    path = path_of(found.device, found.driver)
    KEPT.write(path, found.model_dump_json(indent=1, exclude={"tuned"}))
    return path

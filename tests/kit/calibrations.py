"""Made-up calibrations."""

import math
from pathlib import Path

import pytest

from foretrain.hardware import calibration
from foretrain.hardware.calibration import Calibration, KernelTime, StepTime
from foretrain.hardware.cpu import nominal_cpu
from foretrain.measure import calibrate as kernels
from foretrain.measure import calibrate as module
from foretrain.measure import peaks


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A calibration of a second: one run of each kernel, on small tensors."""
    monkeypatch.setattr(module, "ENOUGH_S", 0.0)
    monkeypatch.setattr(module, "FEWEST", 1)
    monkeypatch.setattr(module, "SIZES", (4096, 65_536))
    tiny_step = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 1}
    monkeypatch.setattr(module, "REFERENCE", {**module.REFERENCE, **tiny_step, "vocab_size": 512})
    monkeypatch.setattr(module, "REFERENCE_STEPS", 2)
    monkeypatch.setattr(module, "SMALL_STEPS", 2)
    small = {"n_layer": 1, "n_embd": 32, "block_size": 16, "batch_size": 2}
    monkeypatch.setattr(module, "SMALL_REFERENCE", {**module.SMALL_REFERENCE, **small})
    monkeypatch.setattr(kernels, "matmul_shapes", lambda large: [(64, 96, 32), (128, 64, 64)])
    for name, value in (("ENOUGH_S", 0.0), ("FEWEST", 1), ("SHAPES", ((64, 96, 32),)), ("HEADS", ((2, 16, 8),)),
                        ("SMALLEST_BYTES", 4096), ("SIZES", 3), ("PAGES_BYTES", 1 << 20), ("LAUNCHES", 5)):  # fmt: skip
        monkeypatch.setattr(peaks, name, value)
    monkeypatch.setattr(module, "modes_for", lambda placement: [False])  # a C++ compiler takes half a minute
    monkeypatch.setattr(module, "usual_dtypes", lambda device, quick: ["float32", "bfloat16"])
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    return tmp_path


def made_up_calibration(
    flop_per_s: float = 1e11, bytes_per_s: float = 1e10, steps: tuple[StepTime, ...] = ()
) -> Calibration:
    kernels = []
    for kind in ("matmul", "matmul_input", "matmul_weight"):
        shapes = ((512, 384, 128), (2048, 1536, 384), (64, 64, 64))
        kernels += [(kind, shape, 2 * math.prod(shape) / flop_per_s) for shape in shapes]
    for kind, passes in (("attention", 1), ("attention_backward", 2.5)):
        for b, h, t, d in ((4, 6, 256, 64), (2, 2, 64, 32)):
            kernels.append((kind, (b, h, t, d), passes * 2 * b * h * t * t * d / flop_per_s))
    for kind in ("add", "norm", "gelu"):
        kernels += [(kind, (size,), size / bytes_per_s) for size in (10_000, 1_000_000, 100_000_000)]
    times = tuple(KernelTime(kind=k, dtype="float32", shape=s, time_s=t) for k, s, t in kernels)
    return Calibration(
        device=nominal_cpu().name, driver="", torch_version=calibration.installed_torch(), threads=2,
        date="2026-01-01T00:00:00+00:00", took_s=1.0, kernels=times, steps=steps, launch_s=1e-6,
    )  # fmt: skip

"""Calibration on this CPU: every kernel runs, names and shapes are those of the operations, nothing is half-written."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.hardware import card
from foretrain.hardware.calibration import StepTime, path_of
from foretrain.hardware.cpu import cpu_device
from foretrain.measure import calibrate as kernels
from foretrain.measure import calibrate as module
from foretrain.measure import peaks
from foretrain.measure.timer import Enough, repeated
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, step
from foretrain.predict.speed.time import step_time
from foretrain.reports.document import Message, Table
from foretrain.reports.views import agreement as calibration_view
from foretrain.training import starting
from foretrain.training.device import place
from tests.kit.calibrations import hasty  # noqa: F401
from tests.kit.command import foretrain
from tests.kit.nvml import Nvml
from tests.kit.tiny import tiny

CPU = torch.device("cpu")


def test_every_kind_of_operation_is_measured(hasty: Path) -> None:
    """But for fused kernels, which whole compiled steps stand for."""
    found = module.calibrate(place(RunConfig(device="cpu", compile=False)), ["float32", "bfloat16"], [False], ignore)
    measured = {(k.kind, k.dtype) for k in found.kernels}
    for dtype in ("float32", "bfloat16"):
        for op in step(MicroBatchRun(StepSpec.of(tiny(dropout=0.1), cpu_device(), dtype=dtype, compiled=False), True)):  # type: ignore[arg-type]
            assert (op.kind, dtype) in measured or (op.kind, "float32") in measured, op.kind
    assert all(k.time_s > 0 and math.prod(k.shape) > 0 for k in found.kernels)
    assert found.context_bytes is None
    assert found.clock_ghz is None


def ignore(what: str, share: float) -> None:
    assert 0 <= share <= 1


def test_shapes_are_those_of_what_runs() -> None:
    """(m, n, k): the product's result is m x n, its FLOPs are 2mnk by FlopCounterMode."""
    from torch.utils.flop_counter import FlopCounterMode

    for kernel in kernels.matmuls(CPU, "float32", large=False):
        m, n, k = kernel.shape
        if m * n * k > 1e8:
            continue
        with FlopCounterMode(display=False) as counter:
            assert kernel.run().shape == (m, n)
        assert counter.get_total_flops() == 2 * m * n * k


def test_the_state_of_the_random_generator_is_left_alone(hasty: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    module.calibrate(place(RunConfig(device="cpu", compile=False)), ["float32"], [False], ignore)
    assert torch.equal(torch.get_rng_state(), before)


def test_command_keeps_it_and_plan_uses_it(hasty: Path) -> None:
    found = json.loads(foretrain("calibrate", "--device", "cpu", "--quick", "--json", code=0).stdout)
    assert found["schema"] == "foretrain.calibration/1"
    assert path_of(found["device"], "").is_file()
    words = ("plan", "baby", "--gpu", "cpu", "--compile=false")
    assert json.loads(foretrain(*words, "--json").stdout)["timing"]["source"] == "calibrated"
    assert "calibrated" in foretrain(*words).stdout
    assert "GFLOP/s" in foretrain("calibrate", "--device", "cpu", "--show", code=0).stdout


def test_every_row_of_a_calibration_has_a_label_of_its_own(hasty: Path) -> None:
    """The small and the large step of one dtype and mode were told apart by nothing."""
    found = peaks.calibrated(place(RunConfig(device="cpu", compile=False)), ["float32", "bfloat16"], [False], ignore)
    sections = calibration_view.document(found, cpu_device(), kept=True).sections
    rows = [row for section in sections for block in section.blocks if isinstance(block, Table) for row in block.rows]
    labels = [row[0].text() for row in rows if isinstance(row[0], Message)]
    assert len(labels) == len(set(labels)) == len(rows)


def test_a_cpu_is_measured_in_every_way_that_train_chooses_among() -> None:
    """Batched products and half-precision weights have other kernels, so they have a step of their own."""
    small = {
        (each.dtype, *sorted(dict(each.way).items()))
        for each in module.references_for(CPU, ["float32", "bfloat16"], [False, True])
        if each.small
    }
    for way in starting.candidates(tiny(dropout=0.0), set()):
        options = {"attention": way.attention, "master_weights": way.master_weights}
        assert (way.dtype, *sorted((k, v) for k, v in options.items() if v not in ("sdpa", False))) in small


def test_a_step_is_corrected_by_one_that_is_carried_out_alike(hasty: Path) -> None:
    """Of each size: the reference of the same attention and masters, else the plain one."""
    own = {"n_layer": 3, "n_embd": 32, "block_size": 16, "batch_size": 2, "n_head": 2, "vocab_size": 64}
    own |= {"gradient_accumulation_steps": 1, "dropout": 0.0}
    device = place(RunConfig(device="cpu", compile=False))
    kernels_only = module.calibrate(device, ["bfloat16"], [], ignore)

    def planned(steps: list[StepTime], **options: Any) -> float:
        found = kernels_only.model_copy(update={"steps": tuple(steps)})
        gpu = cpu_device().model_copy(update={"calibration": found})
        config = RunConfig.model_validate({**own, "device": "cpu", "dtype": "bfloat16", **options})
        time = step_time(StepSpec.of(config, gpu, dtype="bfloat16", compiled=False))
        return time.expected_s

    def reference(seconds: float, **options: Any) -> StepTime:
        return StepTime(options={**own, **options}, dtype="bfloat16", compiled=False, time_s=seconds)

    steps = [reference(1.0), reference(2.0, attention="bmm"), reference(3.0, attention="bmm", master_weights=True)]
    assert planned(steps) == pytest.approx(1.0)
    assert planned(steps, attention="bmm") == pytest.approx(2.0)
    assert planned(steps, attention="bmm", master_weights=True) == pytest.approx(3.0)
    assert planned(steps[:1], attention="sdpa") == pytest.approx(1.0)
    assert planned(steps, attention="bmm", dropout=0.1) == planned(steps, dropout=0.1)  # where bmm cannot serve


def test_show_without_one_is_a_sentence(hasty: Path) -> None:
    foretrain("calibrate", "--device", "cpu", "--show", code=4, says="foretrain calibrate")


@pytest.mark.parametrize(("error", "code"), [
    (RuntimeError("CUDA error: unspecified launch failure\nmore lines"), 4), (KeyboardInterrupt(), 130),
])  # fmt: skip
def test_a_calibration_that_breaks_off_leaves_nothing(
    error: BaseException, code: int, hasty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> float:
        raise error

    monkeypatch.setattr(module, "launch_time", fail)
    told = foretrain("calibrate", "--device", "cpu", "--json", code=code)
    assert not (hasty / "calibrations").exists()
    if code == 4:
        assert "unspecified launch failure" in told.stderr
        assert "more lines" not in told.stderr
        assert json.loads(told.stdout)["id"] == "environment.calibration_failed"


def test_a_wrong_device_is_a_sentence(hasty: Path) -> None:
    with pytest.raises(UserError, match="cuda"):
        place(RunConfig(device="cuda:7"))
    foretrain("calibrate", "--device", "tpu", code=2, says="tpu")


class Idling(Nvml):
    """A card whose clock idles half of the time."""

    calls = 0

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        self.calls += 1
        if self.calls > 20:
            raise self.NVMLError
        return 2610 if self.calls % 2 else 210

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 198_000 if self.calls % 2 else 12_000


def test_the_clock_under_load_is_not_that_of_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "INTERVAL_S", 0.001)
    nvml = Idling()
    with card.Load(0, nvml) as load:
        while nvml.calls <= 20:
            time.sleep(0.001)
    assert load.driver == "575.64"
    assert load.clock_ghz == pytest.approx(2.61)
    assert load.power_w == pytest.approx(198)


class Clock:
    """Every call takes the next of these seconds; the last one again and again. Notes how many were timed at once."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.at_once, self.runs = list(seconds), list[int](), 0

    def run(self) -> None:
        self.runs += 1

    def timed(self, run: Callable[[], Any], count: int) -> list[float]:
        self.at_once.append(count)
        for _ in range(count):
            run()
        return [self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0] for _ in range(count)]


@pytest.mark.parametrize(
    ("seconds", "enough", "at_once"),
    [
        ((0.001,), Enough(0.02, 3, 100), [1, 19]),  # enough together
        ((0.00001,), Enough(0.02, 3, 100), [1, 99]),  # the most
        ((0.015,), Enough(0.02, 3, 100), [1, 2]),  # the fewest
        ((0.0,), Enough(0.02, 3, 100), [1, 99]),  # a clock too coarse to show anything
        ((0.5,), Enough(0.02, 3, 100, long_s=0.1), [1]),  # one long run
        ((0.01, 0.002), Enough(0.02, 3, 100), [1, 2, 3]),  # the first one was slow
        ((0.001,), Enough(0.0, 1, 100), [1]),
    ],
    ids=str,
)
def test_runs_until_enough(seconds: tuple[float, ...], enough: Enough, at_once: list[int]) -> None:
    clock = Clock(*seconds)
    found = repeated(clock.run, clock.timed, enough)
    assert clock.at_once == at_once
    assert len(found) == sum(at_once) == clock.runs - 1  # one more to warm up

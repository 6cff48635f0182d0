"""Times from the catalogue: real cases, bounds, directions; and rates from measured kernels."""

import io
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware import calibration
from foretrain.hardware.calibration import Calibration, KernelTime, StepTime, load, save
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.hardware.cpu import nominal_cpu
from foretrain.predict.plan import plan, timing
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, Operation, step
from foretrain.predict.speed.rates import CatalogueRates, MeasuredRates, busy_s, rates_of
from foretrain.predict.speed.time import bound_s, evaluation_time, step_time
from foretrain.reports import text
from foretrain.reports.views import plan as plan_view
from tests.kit.calibrations import made_up_calibration
from tests.kit.command import REPO
from tests.kit.tiny import tiny

CASES = REPO / "examples" / "real-cases"
RTX_4070 = find("RTX 4070")


def case(name: str) -> RunConfig:
    return resolve([str(CASES / f"{name}.py")]).config


def test_case_b1_is_forecast_within_a_fifth() -> None:
    """Logged: 3.9 s an iteration, the first one 32 s with compilation and an evaluation."""
    made = plan(case("b1"), RTX_4070)
    assert made.nanogpt_timing.source == "estimated"
    assert made.nanogpt_timing.step_s.expected_s == pytest.approx(3.9, rel=0.20)
    assert made.nanogpt_timing.step_s.low_s < 3.9 < made.nanogpt_timing.step_s.high_s
    assert made.nanogpt_timing.compile_s.low_s < 13 < made.nanogpt_timing.compile_s.high_s


def test_the_first_step_and_the_end_are_said() -> None:
    """Compilation shows in the first step; nanoGPT logged 32 s for it, with the evaluation before step 0."""
    made = plan(case("b1"), RTX_4070)
    shown = Console(file=io.StringIO(), width=200)
    text.render(plan_view.document(made, now=datetime(2026, 1, 1)), shown)
    lines = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "of it compilation" in lines
    end = datetime(2026, 1, 1) + timedelta(seconds=made.timing.total_s.expected_s)
    assert f"{end:%Y-%m-%d %H:%M} (" in lines
    endless = plan(case("b1").model_copy(update={"max_iters": 10**10}), RTX_4070)
    text.render(plan_view.document(endless, now=datetime(2026, 1, 1)), shown)


def test_case_d_is_forecast_within_a_fifth_and_above_the_bound() -> None:
    """20,000 steps at the logged 3.9 s are 21.7 h; the card's peak alone would take 2.55e18 / 58.3e12 s = 12.1 h."""
    config = case("d")
    made = plan(config, RTX_4070)
    hours = made.nanogpt_timing.step_s.scaled(config.max_iters)
    assert hours.expected_s / 3600 == pytest.approx(21.7, rel=0.20)
    assert hours.low_s > 2.55e18 / 58.3e12


@pytest.mark.parametrize("name", [gpu.name for gpu in catalogue().values() if gpu.fp16_dense_tflops])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_card_is_faster_than_its_peak(name: str, compiled: bool) -> None:
    gpu = find(name)
    dtype = "bfloat16" if gpu.supports_bf16 else "float16"
    for config in (RunConfig(), RunConfig(n_layer=2, n_embd=4096, n_head=32, batch_size=4)):
        found = step_time(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled))
        if found is None:
            continue
        way = MicroBatchRun(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled))
        assert found.low_s >= bound_s(way)
        assert found.low_s <= found.expected_s <= found.high_s


def seconds(**knobs: object) -> float:
    compiled = bool(knobs.pop("compile", True))
    config = RunConfig.model_validate({"n_layer": 6, "n_embd": 384, "n_head": 6, "block_size": 512, **knobs})
    found = step_time(StepSpec.of(config, RTX_4070, dtype="bfloat16", compiled=compiled))
    return found.expected_s


def test_directions() -> None:
    base = seconds()
    assert seconds(compile=False) > base
    assert seconds(n_layer=12) > 1.2 * base
    assert seconds(activation_checkpointing=True) > 1.05 * base
    assert seconds(gradient_accumulation_steps=80) == pytest.approx(2 * base, rel=0.02)
    assert seconds(vocab_size=50257) > base  # tensor cores want multiples of 8
    # Each chunk adds to the head's gradient, which a narrow model feels: 12 B a weight and chunk.
    assert base < seconds(loss_chunk_size=2048) < seconds(loss_chunk_size=512) < 1.25 * base


def test_a_tiny_model_is_bound_by_launching() -> None:
    """Python launches some 18 us a kernel; a model of 4 x 128 on a fast card waits for it."""
    config = RunConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, gradient_accumulation_steps=1)
    gpu = find("H100 SXM5 80GB")
    found = step_time(StepSpec.of(config, gpu, dtype="bfloat16", compiled=False))
    busy = busy_s(
        step(MicroBatchRun(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=False), True)),
        CatalogueRates(gpu),
    )
    assert found.expected_s > 3 * busy


# -- measured rates ----------------------------------------------------------------------------------------


@given(st.integers(1, 10**9), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_where_all_rates_are_equal_interpolation_changes_nothing(nbytes: int, m: int, n: int, k: int) -> None:
    rates = MeasuredRates(made_up_calibration())
    product = Operation("head", "matmul", "forward", 1, (m, n, k), "float32", 2 * m * n * k, 0, 0)
    assert rates.time_s(product) == pytest.approx(2 * m * n * k / 1e11, rel=1e-6)
    moved = Operation("residual", "add", "forward", 1, (nbytes,), "float32", 0, nbytes, 0)
    assert rates.time_s(moved) == pytest.approx(max(nbytes, 500) / 1e10, rel=1e-6)
    unknown = Operation("x", "fused", "forward", 1, (nbytes,), "float32", 0, nbytes, 0)
    assert rates.time_s(unknown) == rates.time_s(moved)


def test_a_whole_step_corrects_the_sum_of_kernels() -> None:
    """The reference step took a second; it is forecast to take a second, and twice the micro-batches about two."""
    knobs = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "gradient_accumulation_steps": 4}
    steps = (StepTime(options=knobs, dtype="float32", compiled=False, time_s=1.0),)
    gpu = nominal_cpu().model_copy(update={"calibration": made_up_calibration(steps=steps)})
    config = RunConfig.model_validate(knobs)
    found = step_time(StepSpec.of(config, gpu, dtype="float32", compiled=False))
    assert found.expected_s == pytest.approx(1.0)
    twice = step_time(
        StepSpec.of(
            config.model_copy(update={"gradient_accumulation_steps": 8}),
            gpu,
            "foretrain",
            dtype="float32",
            compiled=False,
        )
    )
    assert twice.expected_s == pytest.approx(2.0, rel=0.05)


def test_unmeasured_dtype_falls_back_to_the_catalogue() -> None:
    gpu = nominal_cpu().model_copy(update={"calibration": made_up_calibration()})
    assert isinstance(rates_of(gpu, "float32"), MeasuredRates)
    assert isinstance(rates_of(gpu, "bfloat16"), CatalogueRates)
    assert rates_of(Gpu(name="unknown"), "float32") is None


def test_a_calibrated_plan_says_so_and_its_json_stays_small(tmp_path: Path) -> None:
    gpu = nominal_cpu().model_copy(update={"calibration": made_up_calibration()})
    made = plan(tiny(compile=False), gpu)
    assert made.timing.source == "calibrated"
    assert "kernels" not in made.model_dump_json()
    assert made.timing.step_s.high_s / made.timing.step_s.low_s < 1.5


# -- the cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    return tmp_path


def test_a_calibration_is_kept_for_its_device_alone(own_folder: Path) -> None:
    found = made_up_calibration()
    path = save(found)
    assert load(found.device) == found
    assert load("another device") is None
    assert load(found.device, "580.1") is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_calibration_is_none(own_folder: Path, damage: bytes) -> None:
    found = made_up_calibration()
    save(found).write_bytes(damage)
    assert load(found.device) is None


def test_a_calibration_of_another_torch_is_none(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up_calibration()
    save(found)
    monkeypatch.setattr(calibration, "installed_torch", lambda: "1.0")
    assert load(found.device) is None


def test_a_folder_that_cannot_be_written_to(own_folder: Path) -> None:
    (own_folder / "calibrations").write_text("a file")
    with pytest.raises(OSError):
        save(made_up_calibration())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_card_has_a_time_in_every_dtype_that_it_has(optimizer: str) -> None:
    """Muon's products are in half precision, of which some old cards have no rate."""
    config = tiny(optimizer=optimizer)
    for gpu in catalogue().values():
        for dtype in ("float32", "float16", "bfloat16"):
            found = step_time(StepSpec.of(config, gpu, dtype=dtype, compiled=False))  # type: ignore[arg-type]
            assert (found is None) == (gpu.peak_flop_per_s(dtype) is None or gpu.bandwidth_bytes_per_s is None)  # type: ignore[arg-type]


# -- a calibration with two reference steps ------------------------------------------------------------------


def _calibrated(**changes: Any) -> Gpu:
    """A CPU whose kernels run at one rate each, and whose small steps take three times their kernels, large ones once."""
    names = ("add", "norm", "norm_backward", "gelu", "gelu_backward", "softmax", "softmax_backward", "gather", "scatter",
             "join", "dropout", "accumulate", "fill", "clip", "gradient_norm", "adamw")  # fmt: skip
    products = [KernelTime(kind=f"matmul{way}", dtype="float32", shape=(512, 512, 512), time_s=1e-3)
                for way in ("", "_input", "_weight")]  # fmt: skip
    scores = [KernelTime(kind=f"attention{way}", dtype="float32", shape=(4, 4, 128, 32), time_s=1e-4)
              for way in ("", "_backward")]  # fmt: skip
    kernels = (*products, *scores, *(KernelTime(kind=n, dtype="float32", shape=(2**20,), time_s=1e-4) for n in names))
    bare = Calibration(device="cpu", driver="", torch_version="2", threads=1, date="2026-01-01", took_s=1.0,
                       kernels=kernels, launch_s=1e-6)  # fmt: skip
    gpu = Gpu(name="cpu", kind="cpu", fp32_tflops=1.0, source="test", calibration=bare)
    steps = []
    for config, factor, forward in ((SMALL_STEP, 3.0, 5.0), (LARGE_STEP, 1.0, 1.5)):
        summed = step_time(StepSpec.of(config, gpu, dtype="float32", compiled=False))
        evaluation = evaluation_time(StepSpec.of(config, gpu, dtype="float32", compiled=False))
        batches = 2 * config.eval_rows / config.eval_batch
        options = {name: getattr(config, name) for name in config.model_fields_set}
        steps.append(StepTime(options=options, dtype="float32", compiled=False, time_s=factor * summed.expected_s,
                              forward_s=forward * evaluation.expected_s / batches))  # fmt: skip
    return gpu.model_copy(update={"calibration": bare.model_copy(update={"steps": tuple(steps), **changes})})


SMALL_STEP = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256, batch_size=4,
                       gradient_accumulation_steps=1)  # fmt: skip
LARGE_STEP = RunConfig(n_layer=6, n_head=8, n_embd=512, block_size=512, vocab_size=8192, batch_size=8,
                       gradient_accumulation_steps=1)  # fmt: skip


def _over_kernels(config: RunConfig, time_of: Any) -> float:
    own, bare = _calibrated(), _calibrated(steps=())
    found = [time_of(StepSpec.of(config, gpu, dtype="float32", compiled=False)).expected_s for gpu in (own, bare)]
    return found[0] / found[1]


def test_steps_are_corrected_by_the_reference_of_their_size() -> None:
    """One large reference foretold a small model's step 19% too quick: threads that wait for each other were missed."""
    assert _over_kernels(SMALL_STEP, step_time) == pytest.approx(3.0)
    assert _over_kernels(LARGE_STEP, step_time) == pytest.approx(1.0)
    between = _over_kernels(SMALL_STEP.model_copy(update={"n_embd": 256, "batch_size": 8}), step_time)
    assert 1.1 < between < 2.9
    assert _over_kernels(SMALL_STEP.model_copy(update={"n_embd": 32}), step_time) == pytest.approx(3.0)
    assert _over_kernels(LARGE_STEP.model_copy(update={"n_layer": 24}), step_time) == pytest.approx(1.0)


def test_evaluations_are_corrected_by_forward_passes() -> None:
    assert _over_kernels(SMALL_STEP, evaluation_time) == pytest.approx(5.0)
    assert _over_kernels(LARGE_STEP, evaluation_time) == pytest.approx(1.5)


def test_ranges_are_as_wide_as_the_calibration_wavered() -> None:
    def width(**changes: Any) -> float:
        found = step_time(StepSpec.of(SMALL_STEP, _calibrated(**changes), dtype="float32", compiled=False))
        return found.high_s / found.low_s

    assert width() < width(unsteadiness=0.1) < width(unsteadiness=0.2)
    assert width() < width(drift=0.1) < width(drift=0.2) == width(drift=0.2, unsteadiness=0.1)
    assert width(others_share=0.6) > 3
    assert width(others_share=0.02) == width()


def test_a_calibrated_run_counts_its_start() -> None:
    totals = [
        timing(StepSpec.of(SMALL_STEP, _calibrated(start_s=start_s), dtype="float32", compiled=False))
        for start_s in (0.0, 7.0)
    ]
    assert totals[1].total_s.expected_s - totals[0].total_s.expected_s == pytest.approx(7.0)

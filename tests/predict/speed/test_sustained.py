"""What products hold within a board's power: rates that others measured, and the rule for boards that nobody did."""

import json
from statistics import median

import pytest

from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import catalogue, find
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.rates import CatalogueRates
from foretrain.predict.speed.time import DERIVED_HIGH, DERIVED_LOW, HIGH, LOW, step_time
from tests.kit.command import REPO, foretrain

RATES = json.loads((REPO / "benchmarks" / "published_rates.json").read_text("utf-8"))
ABOVE_ITS_PEAK = 1.2
# (measured board, another one of its architecture and tensor cores, dtype)
PAIRS = [
    ("RTX A4000", "A40"), ("RTX A2000 12GB", "A40"), ("RTX A6000", "A40"), ("A100 PCIe 40GB", "A100 SXM4 80GB"),
    ("A100 PCIe 80GB", "A100 PCIe 40GB"), ("H100 PCIe 80GB", "H100 SXM5 80GB"), ("L40S", "L4"),
    ("RTX PRO 6000 Server", "RTX PRO 6000"),
]  # fmt: skip


def records(card: str, dtype: str) -> list[float]:
    key = {"bfloat16": "bf16_tflops", "float16": "fp16_tflops"}[dtype]
    found = [
        max(rate for size, rate in row["tflops_by_n"].items() if int(size) >= 8192)
        for row in RATES["matmul_by_size"]
        if (row["gpu"], row["dtype"]) == (card, dtype)
    ]
    return found + [
        row[key]
        for name in ("matmul_best", "matmul_best_shape")
        for row in RATES[name]
        if row["gpu"] == card and key in row
    ]


def test_a_measured_rate_is_the_median_of_its_records() -> None:
    measured = 0
    for gpu in catalogue().values():
        for dtype, stated, peak in (
            ("bfloat16", gpu.measured_bf16_matmul_tflops, gpu.bf16_dense_tflops),
            ("float16", gpu.measured_fp16_matmul_tflops, gpu.fp16_dense_tflops),
        ):
            found = [rate for rate in records(gpu.name, dtype) if peak and rate <= ABOVE_ITS_PEAK * peak]
            assert bool(stated) == bool(found), (gpu.name, dtype)
            if stated:
                measured += 1
                assert stated == pytest.approx(median(found), abs=0.051), (gpu.name, dtype)
                assert gpu.measured_source
    assert measured > 80


@pytest.mark.parametrize(("card", "like"), PAIRS)
def test_the_rule_of_power_holds_for_boards_that_were_measured(card: str, like: str) -> None:
    gpu, known = find(card), find(like)
    assert gpu.architecture == known.architecture
    unmeasured = {"measured_bf16_matmul_tflops": None, "measured_fp16_matmul_tflops": None, "sustained_like": like}
    by_rule, measured = gpu.model_copy(update=unmeasured).sustained_share("bfloat16"), gpu.sustained_share("bfloat16")
    assert by_rule
    assert measured
    assert DERIVED_LOW <= by_rule / measured <= DERIVED_HIGH


def test_a_rate_by_rule_is_of_a_measured_card_of_the_same_kind() -> None:
    for gpu in catalogue().values():
        if gpu.sustained_like:
            like = catalogue()[gpu.sustained_like]
            assert not gpu.measured_source
            assert like.measured_source
            assert like.architecture == gpu.architecture
            assert like.fp16_flop_per_clock_per_sm == gpu.fp16_flop_per_clock_per_sm


def test_no_matmul_is_planned_faster_than_large_ones_measured() -> None:
    config = resolve(["gpt2-124m"]).config
    for name in ("L4", "L40S", "H100 PCIe 80GB", "RTX A4000", "RTX PRO 6000", "RTX 6000 Ada"):
        gpu = find(name)
        free = gpu.model_copy(
            update={"measured_bf16_matmul_tflops": None, "measured_fp16_matmul_tflops": None, "sustained_like": ""}
        )
        assert CatalogueRates(free).held_clock("bfloat16") == 1
        held, unheld = (
            step_time(StepSpec.of(config, each, "nanogpt", dtype="bfloat16", compiled=True)) for each in (gpu, free)
        )
        assert held.expected_s > unheld.expected_s
        share = CatalogueRates(gpu).held_clock("bfloat16")
        assert held.expected_s <= unheld.expected_s / share
    assert CatalogueRates(find("RTX 5090")).held_clock("bfloat16") == 1  # above its data sheet, as its kind is


def test_a_rate_by_rule_has_a_wider_range() -> None:
    config = resolve(["gpt2-124m", "--torch_version=2.6"]).config
    found = step_time(StepSpec.of(config, find("RTX 6000 Ada"), "nanogpt", dtype="bfloat16", compiled=True))
    assert found.high_s / found.expected_s == pytest.approx(HIGH * DERIVED_HIGH, rel=0.05)
    assert found.low_s / found.expected_s == pytest.approx(LOW * DERIVED_LOW, rel=0.05)


def test_mfu_divides_by_the_dense_peak() -> None:
    made = plan(resolve(["gpt2-124m"]).config, find("L4"))
    assert made.timing.mfu == pytest.approx(made.timing.flop_per_s / 121e12)
    shown = " ".join(foretrain("plan", "gpt2-124m", "--gpu", "L4").stdout.split())
    assert "of the rated peak" in shown
    assert "published matmul rates" in shown


def test_tf32_of_blackwell_is_half_of_bf16() -> None:
    for gpu in catalogue().values():
        if gpu.name.startswith("RTX 50"):
            assert gpu.tf32_dense_tflops == pytest.approx((gpu.bf16_dense_tflops or 0) / 2, rel=0.01), gpu.name

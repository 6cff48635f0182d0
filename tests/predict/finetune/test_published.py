"""Published fine-tuning runs of one GPU: the estimate of the code that ran is what PyTorch's allocator had at its peak."""

import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import finetune_measured as published

ROWS: dict[str, Any] = {row["id"]: row for row in published.PUBLISHED["rows"]}
# Full, LoRA and QLoRA; logits that decide, or the optimizer; plain code, unsloth's kernels, Liger's loss.
QUICK = ("fm-007", "fm-025", "fm-055", "fm-061", "fm-085", "fm-190", "fm-271", "tu-004", "tu-026")


def error(id: str) -> float:
    row = ROWS[id]
    with published.as_run(row):
        return published.predicted(row) / row["measured"] - 1


@pytest.mark.parametrize("id", QUICK)
def test_published_run_is_what_its_code_is_estimated_to_take(id: str) -> None:
    limit = {"peak_allocated_bytes": 0.01, "tokens_per_s": 0.15}[ROWS[id]["kind"]]
    assert abs(error(id)) <= limit


@pytest.mark.slow
def test_no_published_run_is_refused_and_few_are_missed() -> None:
    peaks = [abs(error(id)) for id, row in ROWS.items() if row["kind"] == "peak_allocated_bytes"]
    times = [abs(error(id)) for id, row in ROWS.items() if row["kind"] == "tokens_per_s"]
    assert sorted(peaks)[int(0.9 * len(peaks))] <= 0.01
    assert max(times) <= 0.15
    for row in ROWS.values():
        if row["kind"] != "tokens_per_s":
            with published.as_run(row):
                assert not published.refused(row), row["id"]


def test_the_estimate_is_the_plans_own_again_afterwards() -> None:
    row = ROWS["fm-061"]
    before = published.predicted(row)
    with published.as_run(row):
        assert published.predicted(row) < 0.99 * before
    assert published.predicted(row) == before


def outside(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows if not published.in_range(published.as_planned(row))]


SHOWN = [row for row in ROWS.values() if row["kind"] == "nvidia_smi_bytes"]


def test_plan_range_holds_nvidia_smi_of_plain_runs() -> None:
    """Its factors come from runs on another card."""
    assert not outside(row for row in SHOWN if row["kernels"] == "none")


@pytest.mark.slow
def test_plan_range_holds_most_nvidia_smi_of_other_kernels() -> None:
    """The two runs whose kernels kept twice as much, and one at its card's end, are outside."""
    assert outside(SHOWN) == ["fm-182", "fm-185", "fm-263"]


def test_what_fits_is_never_shown_more_than_there_is() -> None:
    """As fm-176, at a card's end: one byte less than the whole range is tight, and its need is shown uncut."""
    row = ROWS["fm-176"]
    gpu = published.find_gpu(row["gpu"])
    tune = published.FineTune.model_validate(published.as_planned(row)["options"])
    ledger = published.FineTuneEstimate(published.facts_for(row["model"]), tune, gpu)
    most = ledger.memory.neediest.needed_high_bytes
    for free, verdict in ((most, "fits"), (most - 1, "tight")):
        phases = ledger.judged(free, gpu.memory_bytes).phases
        assert {phase.verdict for phase in phases if phase.needed_high_bytes == most} == {verdict}
        assert all(phase.verdict != "fits" or phase.needed_high_bytes <= free for phase in phases)

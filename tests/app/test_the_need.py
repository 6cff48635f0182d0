"""What a run needs is one number, wherever it is said, and however much memory is free."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from foretrain.advice.advisor import advise
from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import first_answer
from foretrain.analysis.explanation import explain
from foretrain.analysis.forecast_check import check_forecast
from foretrain.analysis.run import explain_run
from foretrain.app.plan import Cards, Target, make_plan
from foretrain.app.request import PretrainingRequest
from foretrain.base.messages import format_value
from foretrain.base.units import GIB, format_bytes
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import Plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import roofline
from foretrain.reports.document import Paragraph
from foretrain.reports.views import first as first_view
from foretrain.reports.views import plan as plan_view
from foretrain.runs.record import MeasuredPhase
from foretrain.web.answers import plan_json
from tests.kit.command import REPO, foretrain
from tests.kit.reports import record

CASE_C = str(REPO / "examples" / "real-cases" / "c.py")


def planned(words: list[str], gpu: str, others: int) -> Plan:
    return make_plan(resolve(words), Target(find(gpu), others))


# -- one need -------------------------------------------------------------------------------------------------------

RUNS = {
    "gpt2-30m": (["gpt2-30m", "--optimizer_offload=true"], "RTX 4070", (0, 11 * GIB)),
    "a nanoGPT file": ([CASE_C], "RTX 4070", (0, 8 * GIB)),
}


@pytest.mark.parametrize(("words", "gpu", "all_others"), RUNS.values(), ids=RUNS)
def test_the_need_is_the_same_everywhere(
    words: list[str], gpu: str, all_others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = set()
    for others in all_others:
        found = planned(words, gpu, others)
        memory = found.memory_of(found.step)
        phases = [phase.needed_expected_bytes for phase in memory.phases]
        assert memory.needed_bytes == max(phases)
        needed, span = format_bytes(memory.needed_bytes), format_value(memory.neediest.needed_span, "bytes_span")
        said.add(span)
        shown = foretrain("plan", *words, "--gpu", gpu, "--used-by-others", f"{others}B", "--check")
        assert span in " ".join(shown.stdout.split())
        if shown.returncode == 3:
            assert f"needs about {needed}," in " ".join(shown.stderr.split())
        line = foretrain("plan", *words, "--gpu", gpu, "--used-by-others", f"{others}B", "--oneline").stdout
        assert f"{format_value(memory.needed_bytes, 'rough_gib')} " in line
        answer = json.loads(foretrain("plan", *words, "--gpu", gpu, "--used-by-others", f"{others}B", "--json").stdout)
        step = next(one for one in answer["memory"] if one["step"] == found.step)
        assert max(phase["needed_expected_bytes"] for phase in step["phases"]) == memory.needed_bytes
        shown = plan_json(PretrainingRequest(resolve(words), Cards()), found)
        tiles = {tile["id"]: tile["value"] for tile in shown["figures"]}
        assert tiles["memory_needed"] == needed
        assert f" {needed} (" in " ".join(foretrain(
            "advise", *words, "--gpu", gpu, "--used-by-others", f"{others}B", "--goal", "fit", "--full"
        ).stdout.split())  # fmt: skip
        assert found.memory_of(found.step).needed_bytes == advise(found, found.step, "fit").now.needed_bytes
    assert len(said) == 1


def test_the_other_trainers_need_does_not_depend_on_what_is_free() -> None:
    wanted = format_bytes(planned([CASE_C], "RTX 4070", 0).memory_of("nanogpt").needed_bytes)
    for others in ("0B", "500MB", "3GB"):
        words = [CASE_C, "--trainer", "foretrain", "--gpu", "4070", "--used-by-others", others]
        assert (
            f"train.py it would be tight and need {wanted}" in (shown := one_line(words))
            or f"that needs {wanted}" in shown
        )


def one_line(words: list[str]) -> str:
    return " ".join(foretrain("plan", *words).stdout.split())


def test_where_it_first_fails_is_said_beside_where_it_needs_most() -> None:
    shown = one_line(["gpt2-124m", "--gpu", "4070", "--used-by-others", "12GB"])
    assert "most in the backward pass. It runs out of memory first in the evaluation." in shown


def test_phase_with_the_most_tensors_is_named_of_equal_ones() -> None:
    """Later steps hold the optimizer's states beside what the first step held, in memory that is reserved already."""
    for words in ([CASE_C], ["gpt2-124m"]):
        memory = planned(words, "RTX 4070", 0).memory_of("foretrain")
        assert memory.neediest.phase == "steady_step"
        assert memory.neediest.allocated_bytes == memory.worst.allocated_bytes


def test_free_is_said_only_where_others_are_known() -> None:
    assert "of 11.56 GiB, in" in one_line(["gpt2-124m", "--gpu", "4070"])
    assert "of 9.70 GiB free, in" in one_line(["gpt2-124m", "--gpu", "4070", "--used-by-others", "2GB"])
    large = ["gpt2-124m", "--batch_size=64", "--gpu", "4070"]
    assert "only 9.70 GiB free" in one_line([*large, "--used-by-others", "2GB"])
    assert "the device has 11.56 GiB" in one_line(large)
    assert "only 9.00 GiB allowed (memory_limit)" in one_line([*large, "--memory_limit=9GiB"])


# -- the suggested command -----------------------------------------------------------------------------------------

SUGGESTED = {
    "offload": (["gpt2-774m"], "RTX 4070", 0),
    "tight": (["gpt2-xl"], "RTX 5090", 10**9),
    "micro-batch": (["gpt2-350m", "--batch_size=32"], "RTX 3060", 0),
    "checkpointing": (["gpt2-350m"], "RTX 4060", 0),
    "close other programs": (["gpt2-350m"], "RTX 4060 Laptop", 6 * GIB),
    "foretrain's step": ([CASE_C], "RTX 4070", 2 * GIB),
    "eager": (["gpt2-124m", "--compile=false", "--batch_size=64"], "RTX 4070", 0),
}  # fmt: skip


@pytest.mark.parametrize(("words", "gpu", "others"), SUGGESTED.values(), ids=SUGGESTED)
def test_planning_the_suggested_command_says_what_was_promised(words: list[str], gpu: str, others: int) -> None:
    """The same need with its range, the same verdict, the same time; and `advise` begins with the same change."""
    found, asked = planned(words, gpu, others), Asked(words=tuple(words), gpu=gpu, others=f"{others}B")
    answer = first_answer(found, asked)
    first = advise(found, found.step).advised[0]
    assert answer.advice.rules == first.rules
    shown = one_line([*words, "--gpu", gpu, "--used-by-others", f"{others}B"])
    promised = format_value(answer.changed.memory.neediest.needed_span, "bytes_span")
    assert promised in shown
    if answer.next != "change":
        assert answer.advice.used_by_others_bytes < others
        return
    again = planned(list(answer.command[2:]), gpu, others)
    memory = again.memory_of(answer.advice.step)
    assert format_value(memory.neediest.needed_span, "bytes_span") == promised
    assert again.verdict_of(answer.advice.step) == "fits"
    assert again.timing_of(answer.advice.step) == answer.changed.timing
    assert shlex.join(answer.command[-1:]) in shown


def test_time_and_cost_are_those_of_the_suggested_command() -> None:
    found = planned(["gpt2-350m", "--batch_size=32"], "RTX 3060", 0)
    answer = first_answer(found, Asked(words=("gpt2-350m", "--batch_size=32")))
    total, own = answer.changed.timing.total_s, found.timing.total_s
    shown = one_line(["gpt2-350m", "--batch_size=32", "--gpu", "RTX 3060"])
    span = format_value((total.low_s, total.expected_s, total.high_s), "duration_span")
    assert f"time with the change below, {span}" in shown
    assert "cost with it, " in shown
    assert format_value((own.low_s, own.expected_s, own.high_s), "duration_span") not in shown


def test_without_a_command_time_and_cost_say_if_it_fitted() -> None:
    shown = one_line(["gpt2-350m", "--gpu", "RTX 4060 Laptop", "--used-by-others", "6GB"])
    assert "time if it fitted, " in shown
    assert "cost if it fitted, " in shown


def test_a_change_of_time_is_in_words() -> None:
    words = ("gpt2-124m", "--batch_size=64")
    found = planned([*words], "RTX 4070", 0)
    answer = first_answer(found, Asked(words=words))
    for slower, said in (0.393, "39.3% more time per step"), (-0.034, "3.4% less time per step"):
        advice = answer.advice.model_copy(update={"effect": answer.advice.effect.model_copy(update={"slower": slower})})
        rows = first_view.screen(found, Asked(words=words), replace(answer, advice=advice)).rows
        assert said in " ".join(str(row.text) for row in rows if isinstance(row.text, str))


def test_a_run_that_may_not_fit_shows_its_uncut_need() -> None:
    found = planned(["gpt2-xl"], "RTX 5090", 0)
    assert found.verdict == "may_not_fit"
    low, expected, high = found.memory_of(found.step).neediest.needed_span
    assert high > expected > low
    assert expected > (found.available_bytes or 0)
    shown = one_line(["gpt2-xl", "--gpu", "5090"])
    assert f"with more memory it would use {format_value((low, expected, high), 'bytes_span')}" in shown
    assert re.search(r"31\.36 GiB .*31\.36–31\.36", shown) is None


# -- MFU beside the share of matmuls -------------------------------------------------------------------------------


def test_an_mfu_above_the_share_of_matmuls_is_of_the_rated_peak() -> None:
    """It is not impossible: at their real clock matmuls pass the data sheet's peak, and MFU counts attention in full,
    of which a causal step does half. Counted as done, and with what matmuls reach, the share is above it."""
    words = ["gpt2-124m", "--block_size=4096", "--batch_size=2"]
    found = planned(words, "RTX 4070", 0)
    slow = first_answer(found, Asked(words=tuple(words))).bottleneck
    assert found.timing.mfu > slow.share
    roof = roofline(StepSpec.of(found.config, found.gpu, dtype=found.dtype, compiled=True))
    matmuls = [p for p in roof.points if p.flops_per_byte >= roof.ridge_flops_per_byte]
    reached = max(p.flop_per_s for p in matmuls) / roof.peak_flop_per_s
    done = sum(p.share * p.flop_per_s for p in matmuls) / roof.peak_flop_per_s
    assert reached > 1
    assert done < found.timing.mfu
    assert done < slow.share * reached
    assert f"MFU {format_value(found.timing.mfu, 'percent')} of the rated peak" in one_line([*words, "--gpu", "4070"])


def test_need_is_explained_and_compared_by_the_largest_phase() -> None:
    """A large evaluation batch: the step has the most bytes of tensors, an evaluation after it needs most of the card."""
    made = planned(["gpt2-40m", "--eval_batch_size=32"], "RTX 4070", 0)
    memory = made.memory_of("foretrain")
    needs, tensors = memory.neediest, memory.worst
    assert (tensors.phase, needs.phase) == ("steady_step", "evaluate_steady")
    assert needs.needed_low_bytes > tensors.needed_high_bytes

    found = explain(made, step="foretrain")
    process = next(line for line in found.lines if line.id == "process")
    assert (found.phase, process.high_bytes) == ("evaluate_steady", needs.needed_high_bytes)
    shown = plan_view.document(made)
    said = [block.message for part in shown.sections for block in part.blocks if isinstance(block, Paragraph)]
    legend = next(message for message in said if message.id == "plan.legend")
    assert made.config.batch_size < legend.values["B"] == 32

    reserved = needs.reserved_bytes or 0
    phases = (MeasuredPhase(phase="evaluate_steady", allocated_bytes=needs.allocated_bytes, reserved_bytes=reserved),)
    run = record(config=made.config, gpu=made.gpu, memory=record().memory.model_copy(update={"phases": phases}))
    row = next(row for row in check_forecast(made, run).rows if row.id == "process.reserved")
    assert row.in_range
    assert row.predicted == pytest.approx(reserved, rel=0.02)
    pieces = {piece.id: piece for piece in explain_run(run, made, [], []).memory}
    assert pieces["process"].predicted_bytes == needs.needed_expected_bytes

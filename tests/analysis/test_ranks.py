"""Runs of several ranks, looked at: each rank beside its forecast, who is slow, worlds side by side, resumed elsewhere."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretrain.analysis.forecast_check import of_directory, plan_now, plan_of
from foretrain.analysis.live import listed
from foretrain.app.compare import compared
from foretrain.app.explain import run_of
from foretrain.app.run_report import gather
from foretrain.comparison.compare import Comparison
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.predict.plan import Plan, plan
from foretrain.predict.ranks import of_run
from foretrain.reports import html, text
from foretrain.reports.document import Document
from foretrain.reports.views import compare as compare_view
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views import run as run_view
from foretrain.reports.views import run_explain
from foretrain.reports.views import runs as listed_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RankFigures, TrainedRun
from foretrain.training import starting
from tests.kit.command import foretrain, said
from tests.kit.runs import GPU, write_measured_run
from tests.kit.tiny import tiny

MIB = 1 << 20
CPU = cpu_device().model_copy(update={"name": "CPU"})
BOTH = "ddp", "fsdp"


def figures(rank: int, **more: Any) -> RankFigures:
    known = {
        "host": "n1", "card": GPU.name, "allocated_bytes": 256 * MIB, "reserved_bytes": 512 * MIB,
        "process_bytes": 900 * MIB, "step_s": 0.1, "data_wait_s": 0.001, "evaluated_s": 0.5, "evaluated_tokens": 1000,
    }  # fmt: skip
    return RankFigures(rank=rank, **{**known, **more})


def a_run(path: Path, ranks: Sequence[RankFigures] = (), **more: Any) -> RunDirectory:
    own = [name for name in more if name in TrainedRun.model_fields and name != "step_s"]
    record = {name: more.pop(name) for name in own}
    write_measured_run(path, **more)
    directory = RunDirectory(path)
    directory.write_record(
        directory.read_record().model_copy(update={"world": max(1, len(ranks)), "ranks": tuple(ranks), **record})
    )
    return directory


def shown(document: Document) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None, highlight=False)
    text.render(document, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def side_by_side(*runs: RunDirectory) -> tuple[Comparison, str]:
    found = compared([str(run.path) for run in runs]).comparison
    return found, " ".join(shown(compare_view.document(found)).split())


# -- the forecast ------------------------------------------------------------------------------------------


def test_plan_of_ranks_has_memory_of_one_and_time_of_all() -> None:
    config = RunConfig(gradient_accumulation_steps=8, batch_size=4, compile=False)
    alone = plan(config, GPU)
    two, eight = (of_run(alone, world, 1) for world in (2, 8))
    assert alone.timing
    assert (two.world, two.devices, two.config) == (2, 2, config)
    ranks_share = config.model_copy(update={"gradient_accumulation_steps": 4})
    assert two.timing.step_s.expected_s > plan(ranks_share, GPU).timing.step_s.expected_s  # type: ignore[union-attr]
    assert two.timing.tokens_per_s == pytest.approx(config.tokens_per_step / two.timing.step_s.expected_s)
    # DDP's buckets hold all gradients from the beginning, so evaluations take 4 bytes a parameter more.
    more = [one.memory_of("foretrain").phase("evaluate_first").allocated_bytes for one in (two, alone)]
    assert more[0] - more[1] == pytest.approx(4 * alone.counts.n_params, rel=0.01)
    assert "2 ranks share each step" in html.render(plan_view.document(two))
    assert two.spec().config.gradient_accumulation_steps == 4
    assert eight.memory_of("foretrain").worst.allocated_bytes == pytest.approx(
        two.memory_of("foretrain").worst.allocated_bytes, rel=0.35
    )
    assert Plan.from_json(json.dumps(two.to_json(schema="x"))) == two


def test_what_nccl_takes_is_beside_the_allocator() -> None:
    """What a run measures is the allocator's own, so neither context nor NCCL's buffers are held against it."""
    made = of_run(plan(RunConfig(gradient_accumulation_steps=2, batch_size=4, compile=False), GPU), 2, 2)
    memory = made.memory_of("foretrain")
    most = memory.neediest
    assert most.reserved_bytes
    own = most.needed_expected_bytes - memory.context.expected_bytes
    assert own == pytest.approx(most.reserved_bytes, rel=0.02)


def test_ranks_on_a_cpu_have_no_forecast_of_time() -> None:
    made = of_run(plan(tiny(gradient_accumulation_steps=6), CPU), 3, 3)
    assert made.timing is None
    assert (made.world, made.devices) == (3, 1)


def test_the_forecast_is_made_anew_for_another_number_of_ranks(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "r", [figures(0), figures(1)], gradient_accumulation_steps=6)
    record = directory.read_record()
    own = plan_now(record)
    directory.write("plan.json", json.dumps(own.model_copy(update={"name": "kept"}).to_json(schema="x")))
    assert plan_of(directory.path, record).name == "kept"
    assert plan_of(directory.path, record.model_copy(update={"world": 3})).world == 3


# -- one run -----------------------------------------------------------------------------------------------


def test_each_rank_stands_beside_the_forecast(tmp_path: Path) -> None:
    ranks = [figures(0), figures(1, reserved_bytes=700 * MIB, card="RTX 4070"), figures(2, evaluated_s=0.7)]
    directory = a_run(tmp_path / "r", ranks, gradient_accumulation_steps=3)
    record, found = directory.read_record(), run_of(directory).explanation.ranks
    assert record.highest_bytes == 700 * MIB
    assert (found.world, found.devices, found.machines, found.strategy) == (3, 3, 1, "ddp")
    assert (found.most, found.slow, found.parts[2].behind) == (1, (2,), pytest.approx(0.4))
    assert found.low_bytes < found.predicted_bytes < found.high_bytes
    assert found.tokens_per_s == pytest.approx(record.config.tokens_per_step / 0.1, rel=0.02)
    assert found.card_tokens_per_s == pytest.approx((found.tokens_per_s or 0) / 3)
    said = shown(run_explain.document(run_of(directory).explanation))
    assert "3 ranks share each step (DDP), one card per rank, on 1 machine" in said
    assert "Rank 1 takes most: 700 MiB reserved by PyTorch, outside the range" in said
    assert "Rank 2 (n1, RTX 4070) computes 40.0% slower than most" in said


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        ([figures(0), figures(1)], {}, "No rank computes more than 15.0% slower than most"),
        ([figures(0, evaluated_s=0.01), figures(1, evaluated_s=0.02)], {}, "was too short to tell"),
        ([figures(0), figures(1, evaluated_s=0.9)], {"strategy": "fsdp"}, "With FSDP2 the ranks wait for each other"),
        ([figures(0, host="a"), figures(1, host="b")], {}, "one card per rank, on 2 machines"),
        ([], {"world": 2}, "No rank has reported figures yet"),
    ],
)
def test_what_is_said_of_the_ranks(ranks: list[RankFigures], more: dict[str, Any], words: str, tmp_path: Path) -> None:
    directory = a_run(tmp_path / "r", ranks, gradient_accumulation_steps=2, **more)
    assert words in " ".join(shown(run_explain.document(run_of(directory).explanation)).split())


def test_many_ranks_are_cut_but_for_the_largest_and_the_slow(tmp_path: Path) -> None:
    ranks = [figures(n) for n in range(64)]
    ranks[40], ranks[50] = figures(40, evaluated_s=0.8), figures(50, reserved_bytes=600 * MIB)
    directory = a_run(tmp_path / "r", ranks, gradient_accumulation_steps=64)
    said = shown(run_explain.document(run_of(directory).explanation))
    assert "48 more ranks are not shown" in said
    assert all(any(line.split()[:2] == [str(n), "n1"] for line in said.splitlines()) for n in (0, 13, 40, 50))


def test_of_shards_each_rank_has_a_share_of_the_gradients(tmp_path: Path) -> None:
    sizes = {}
    for strategy in BOTH:
        directory = a_run(
            tmp_path / strategy, [figures(0), figures(1)], gradient_accumulation_steps=2, strategy=strategy
        )
        record = directory.read_record()
        memory = record.memory.model_copy(update={"gradients_bytes": 1})
        directory.write_record(record.model_copy(update={"memory": memory}))
        check = of_directory(directory)[2]
        sizes[strategy] = next(row.predicted for row in check.memory if row.id == "component.gradients")
    assert sizes["fsdp"] == pytest.approx(sizes["ddp"] / 2, rel=0.05)


def test_forecast_check_and_report_of_a_run_have_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_run(tmp_path / "r", [figures(0), figures(1, reserved_bytes=700 * MIB)], gradient_accumulation_steps=2)
    check = of_directory(directory)[2]
    reserved = next(row for row in check.memory if row.id == "process.reserved")
    assert (reserved.measured, reserved.low) == (700 * MIB, check.ranks.low_bytes if check.ranks else None)
    assert "that of the rank with most" in shown(run_view.comparison_document(check))
    page = html.render(run_view.report(gather(directory)))
    assert "Rank 1 takes most" in page
    line = json.loads(said(capsys, "explain", str(directory.path), "--json"))
    assert [part["rank"] for part in line["ranks"]["parts"]] == [0, 1]


def test_the_list_of_runs_has_ranks_where_one_has_several(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two", [figures(0), figures(1)])
    alone, both = (
        shown(listed_view.document(listed([each.path for each in some]).runs, {})) for some in ([one], [one, two])
    )
    assert "ranks" not in alone
    assert "ranks" in both


def test_a_run_of_one_rank_is_as_it_was(tmp_path: Path) -> None:
    found = run_of(a_run(tmp_path / "r"))
    assert found.explanation.ranks is None
    assert found.check.ranks is None
    assert found.plan.world == 1


# -- resumed on another number -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "world", "step", "now", "found"),
    [
        ((), 2, 20, 2, ()),
        ((), 2, 20, 3, ((0, 2), (20, 3))),
        (((0, 2), (20, 3)), 3, 30, 3, ((0, 2), (20, 3))),
        (((0, 2), (20, 3)), 3, 30, 1, ((0, 2), (20, 3), (30, 1))),
        (((0, 2), (20, 3)), 3, 10, 2, ()),  # from a checkpoint of before
        ((), 2, 0, 3, ()),  # nothing of the two is left
    ],
)
def test_where_the_number_of_ranks_changed(
    before: Any, world: int, step: int, now: int, found: Any, tmp_path: Path
) -> None:
    record = a_run(tmp_path / "r", world=world, worlds=before).read_record()
    assert starting.worlds(record, step, now) == found


def test_speeds_are_of_the_last_number_of_ranks(tmp_path: Path) -> None:
    """Twenty steps of 0.3 s on two ranks, then forty of 0.1 s on three."""
    directory = a_run(
        tmp_path / "r", [figures(n) for n in range(3)], worlds=((0, 2), (20, 3)), resumed_from=(20,), wall_s=12.0,
        gradient_accumulation_steps=6,
    )  # fmt: skip
    lines = directory.read_lines("metrics")
    for line in lines:
        if line["kind"] == "step" and line["step"] < 20:
            line["step_s"] *= 3
    directory.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    found = run_of(directory)
    assert found.check.time[0].measured == pytest.approx(0.1, rel=0.02)
    assert found.explanation.notes == found.check.notes == ()  # the speed did not change by itself
    times = {piece.id: piece for piece in found.explanation.time}
    assert (times["steps"].count, times["other_ranks"].count) == (40, 20)
    assert times["other_ranks"].measured_s == pytest.approx(6.0, rel=0.02)
    assert "2 from step 0, 3 from step 20" in shown(run_explain.document(found.explanation))
    comparison, said = side_by_side(directory, a_run(tmp_path / "one", gradient_accumulation_steps=6))
    assert comparison.sides[0].step_s == pytest.approx(0.1, rel=0.02)
    assert "a resume changed the number of its ranks" in said


def test_a_run_that_went_on_alone_still_has_its_history(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "r", worlds=((0, 2), (20, 1)), resumed_from=(20,))
    found = run_of(directory).explanation
    assert (found.ranks.world, found.ranks.parts) == (1, ())
    assert "2 from step 0, 1 from step 20" in shown(run_explain.document(found))


# -- side by side ------------------------------------------------------------------------------------------


def test_two_cards_beside_one(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", gradient_accumulation_steps=4, step_s=0.18)
    two = a_run(tmp_path / "two", [figures(0), figures(1)], gradient_accumulation_steps=4, seed=2)
    found, said = side_by_side(one, two)
    (scaling,) = found.scalings
    assert (scaling.more, scaling.more_cards, scaling.fewer_cards, scaling.why) == ("two", 2, 1, "")
    assert scaling.speed_up == pytest.approx(1.8, rel=0.02)
    assert scaling.efficiency == pytest.approx(0.9, rel=0.02)
    first, second = found.sides
    assert second.card_tokens_per_s == pytest.approx((second.tokens_per_s or 0) / 2)
    assert (second.mfu or 0) / (first.mfu or 1) == pytest.approx(0.9, rel=0.02)  # a card's, not of one alone
    assert second.micro_batch_s == pytest.approx(0.1 / 2, rel=0.02)
    assert (second.cost_per_hour or 0) / (first.cost_per_hour or 1) == pytest.approx(2, rel=0.1)
    assert found.verdict("memory").pair
    assert {setting.name for setting in found.differing if setting.matters} == {"ranks"}
    assert "1.80 times the tokens/s (measured), a scaling efficiency of 9" in said
    assert "their loss curves can be compared step by step" in said
    assert "of each card" in said
    assert Comparison.from_json(json.dumps(found.to_json(schema="x"))) == found


@pytest.mark.parametrize(
    ("more", "why", "words"),
    [
        ({"gpu": find("RTX 4090")}, "other_cards", "on different cards"),
        ({"n_layer": 3}, "other_models", "but their models differ"),
        ({"batch_size": 8}, "", "losses are compared at equal tokens"),
    ],
)
def test_what_may_not_be_compared_of_unlike_worlds(more: dict[str, Any], why: str, words: str, tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", gradient_accumulation_steps=4)
    two = a_run(tmp_path / "two", [figures(0), figures(1)], gradient_accumulation_steps=4, seed=2, **more)
    found, said = side_by_side(one, two)
    assert found.scalings[0].why == why
    assert (found.scalings[0].efficiency is None) is bool(why)
    assert words in said


def test_ranks_on_a_cpu_are_no_more_hardware(tmp_path: Path) -> None:
    two, three = (
        a_run(tmp_path / str(n), [figures(k) for k in range(n)], gradient_accumulation_steps=6, seed=n, gpu=CPU)
        for n in (2, 3)
    )
    found, said = side_by_side(two, three)
    assert [side.cards for side in found.sides] == [1, 1]
    assert found.scalings[0].why == "one_processor"
    assert "so there is no scaling efficiency" in said


def test_runs_of_one_rank_hear_nothing_of_ranks(tmp_path: Path) -> None:
    found, said = side_by_side(a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=2, strategy="fsdp"))
    assert found.scalings == ()
    assert "ranks" not in said
    assert "strategy" not in said


# -- commands ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_two_ranks_goes_on_on_three() -> None:
    """Trained, stopped, resumed by the commands themselves; what they leave is what is shown."""
    words = (
        "--device=cpu", "--dtype=float32", "--compile=false", "--dataset=python-stdlib", "--tokenizer=byte",
        "--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=1",
        "--gradient_accumulation_steps=6", "--eval_interval=20", "--eval_iters=1", "--out_dir=r", "--cpu_threads=1",
        "--max_iters=100000", "--lr_decay_iters=100000",
    )  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, "-m", "foretrain", "train", "baby", *words, "--gpus", "2"], stderr=subprocess.PIPE, text=True
    )
    assert first.stderr
    for line in first.stderr:
        if line.startswith("saved"):
            first.send_signal(signal.SIGTERM)
            break
    first.communicate(timeout=300)
    assert first.returncode == 75
    done = RunDirectory(Path("r")).read_record().steps_done
    assert Plan.from_json(Path("r/plan.json").read_text("utf-8")).world == 2
    short = [word for word in words if "iters=100000" not in word]
    foretrain(
        "train", "baby", *short, f"--max_iters={done + 40}", "--lr_decay_iters=100000", "--gpus", "3", "--resume",
        "auto", timeout=600, code=0)  # fmt: skip
    events = RunDirectory(Path("r")).read_lines("events")
    assert [e["values"]["changed"] for e in events if e["id"] == "resumed_otherwise"] == [["ranks: 2 → 3"]]
    record = RunDirectory(Path("r")).read_record()
    assert record.worlds == ((0, 2), (done, 3))
    found = run_of(RunDirectory(Path("r"))).explanation.ranks
    assert [part.rank for part in found.parts] == [0, 1, 2]

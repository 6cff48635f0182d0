"""Training on several ranks: gloo processes that train, stop, die, run out of memory and go on, each a whole run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import keep_going
from foretrain.config.sharing import as_one_rank_of, check_ranks, config_of_rank
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RankFigures
from foretrain.training.place import ALONE, Place, first_node, place_of
from foretrain.training.ranks import slow
from tests.kit import train_ranks as kit
from tests.kit.command import foretrain, refused
from tests.kit.training import assert_same

# -- two ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same run by two ranks, `two`, and by one, `one`."""
    folder = tmp_path_factory.mktemp("whole")
    kit.prepared(folder, kit.config())
    assert kit.run(folder, 2, "--out_dir=two", happens=kit.keep_rows) == [0, 0]
    (folder / "rank-0.log").rename(folder / "said-0")
    (folder / "rank-1.log").rename(folder / "said-1")
    assert kit.run(folder, 1, "--out_dir=one") == [0]
    return folder


def test_two_ranks_learn_what_one_does_from_the_same_tokens(whole: Path) -> None:
    one, two = kit.losses(whole / "one"), kit.losses(whole / "two")
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-6)  # sums in another order
    evaluations = [RunDirectory(whole / name).read_record() for name in ("one", "two")]
    assert evaluations[1].val_loss == pytest.approx(evaluations[0].val_loss, rel=1e-6)
    assert all(r.config.tokens_per_step == kit.config().tokens_per_step for r in evaluations)


def test_each_row_of_each_step_is_taken_once_by_one_of_the_ranks(whole: Path) -> None:
    assert kit.rows_taken(whole) == kit.rows_wanted(whole, kit.config())


def test_one_rank_speaks_and_writes_for_all(whole: Path) -> None:
    assert "Finished 12 steps" in (whole / "said-0").read_text()
    assert kit.said(whole).startswith("run:")
    assert not [line for line in (whole / "said-1").read_text().splitlines() if line and line[0] != "["]
    record = RunDirectory(whole / "two").read_record()
    assert (record.world, [figures.rank for figures in record.ranks]) == (2, [0, 1])
    assert all(f.allocated_bytes and f.process_bytes and f.step_s and f.evaluated_s for f in record.ranks)
    steps = [line["step"] for line in RunDirectory(whole / "two").read_lines("metrics") if line["kind"] == "step"]
    assert steps == list(range(12))
    alone = RunDirectory(whole / "one").read_record()
    assert (alone.world, alone.ranks) == (1, ())


def test_stop_of_one_rank_stops_all_and_resume_changes_no_bit(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(dropout=0.1))
    assert kit.run(tmp_path, 2, "--out_dir=whole") == [0, 0]
    assert kit.run(tmp_path, 2, "--out_dir=cut", happens=kit.signalled) == [ExitCode.STOPPED] * 2
    record = RunDirectory(tmp_path / "cut").read_record()
    assert (record.status, record.reason, record.steps_done) == ("interrupted", "SIGTERM", 7)
    assert kit.run(tmp_path, 2, "--out_dir=cut", "--resume=auto") == [0, 0]
    assert_same(kit.state(tmp_path / "cut"), kit.state(tmp_path / "whole"))
    assert kit.losses(tmp_path / "cut") == kit.losses(tmp_path / "whole")


def test_killed_rank_is_named_and_another_world_goes_on(whole: Path, tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    codes = kit.run(tmp_path, 2, happens=kit.killed)
    assert codes == [ExitCode.ENVIRONMENT, -signal.SIGKILL]
    (sentence,) = kit.errors(tmp_path, 2)
    assert "rank 1 of 2" in sentence
    assert "--resume auto" in sentence
    assert RunDirectory(tmp_path / "out").read_record().reason == "environment.ranks_lost"
    assert kit.run(tmp_path, 1, "--resume=auto") == [0]
    assert kit.losses(tmp_path / "out") == pytest.approx(kit.losses(whole / "two"), rel=1e-6)


@pytest.mark.parametrize("happens", [kit.forward, kit.backward])
def test_a_rank_without_memory_cuts_its_own_rows_and_then_all_do(happens: Any, whole: Path, tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    assert kit.run(tmp_path, 2, happens=happens) == [0, 0]
    record = RunDirectory(tmp_path / "out").read_record()
    assert (record.shrunk_from, record.config.batch_size, record.config.gradient_accumulation_steps) == (4, 2, 12)
    assert kit.losses(tmp_path / "out") == pytest.approx(kit.losses(whole / "two"), rel=1e-6)
    if happens is kit.forward:  # what was done again was taken twice, by this rank alone
        taken, wanted = kit.rows_taken(tmp_path), kit.rows_wanted(tmp_path, kit.config())
        assert {step: rows for step, rows in taken.items() if step != 3} == {s: r for s, r in wanted.items() if s != 3}
        assert set(taken[3]) == set(wanted[3])
    mine = [json.loads(line)["id"] for line in (tmp_path / "out/rank-1.jsonl").read_text().splitlines()]
    assert mine[0] == "out_of_memory"


@pytest.mark.parametrize("happens", [kit.sent, pytest.param(kit.optimizer, marks=pytest.mark.slow)])
def test_a_rank_whose_step_cannot_be_done_again_ends_all(happens: Any, tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    codes = kit.run(tmp_path, 2, "--eval_interval=2", happens=happens)
    assert codes == [ExitCode.OUT_OF_MEMORY] * 2
    (sentence,) = kit.errors(tmp_path, 2)
    assert "rank 1" in sentence
    record = RunDirectory(tmp_path / "out").read_record()
    assert (record.status, record.config.batch_size) == ("failed", 2)
    assert kit.run(tmp_path, 1, "--eval_interval=2", "--resume=auto") == [0]
    assert RunDirectory(tmp_path / "out").read_record().config.batch_size == 2


def test_all_ranks_judge_a_loss_that_is_not_finite_alike(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    assert kit.run(tmp_path, 2, happens=kit.not_finite) == [ExitCode.DIVERGED] * 2
    assert len(kit.errors(tmp_path, 2)) == 1
    assert RunDirectory(tmp_path / "out").read_record().status == "diverged"


# -- what does not fit together --------------------------------------------------------------------------------


def test_ranks_that_were_asked_for_unlike_runs_say_what_differs(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    assert kit.ended(kit.started(tmp_path, 2, last=("--learning_rate=0.5",))) == [ExitCode.ENVIRONMENT] * 2
    (sentence,) = kit.errors(tmp_path, 2)
    assert "learning_rate is 0.01 on rank 0 and 0.5 on rank 1" in sentence
    assert not (tmp_path / "out").exists()


def test_a_port_in_use_is_said_once(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(collective_timeout=2))
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        assert kit.ended(kit.started(tmp_path, 2, port=held.getsockname()[1]))[0] == ExitCode.ENVIRONMENT
    (sentence,) = kit.errors(tmp_path, 2)
    assert "MASTER_PORT" in sentence


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(collective_timeout=2))
    (first, second) = kit.started(tmp_path, 2, last=("--no-such-option=1",))
    assert kit.ended([first, second]) == [ExitCode.ENVIRONMENT, ExitCode.USAGE]
    assert "rank 1 of 2 did not answer within 2 s" in kit.said(tmp_path)


@pytest.mark.parametrize(("gpus", "says"), [("4", "3 (192), 6 (384)"), ("7", "7")])
def test_ranks_that_cannot_share_a_step_are_refused_at_once(
    gpus: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.prepared(tmp_path, kit.config())
    monkeypatch.chdir(tmp_path)
    found = foretrain("train", "run.toml", "--gpus", gpus, code=ExitCode.USAGE)
    assert gpus in found.stderr
    assert not (tmp_path / "out").exists()


def test_batch_size_auto_takes_any_whole_number_per_rank() -> None:
    made = kit.config(batch_size=12, gradient_accumulation_steps=1, auto_batch_size=True)
    own = config_of_rank(as_one_rank_of(made, 4), 4)
    assert (own.batch_size * own.gradient_accumulation_steps, own.eval_rows) == (3, made.eval_rows)
    with pytest.raises(UserError):
        config_of_rank(as_one_rank_of(made, 8), 8)


@pytest.mark.parametrize(("strategy", "optimizer", "works"), [("ddp", "muon", True), ("fsdp", "muon", False)])
def test_what_a_strategy_cannot_share_is_refused(strategy: str, optimizer: str, works: bool) -> None:
    made = kit.config(optimizer=optimizer, strategy=strategy)
    if works:
        return check_ranks(made, 2, 2)
    with pytest.raises(UserError, match="--strategy=ddp"):
        check_ranks(made, 2, 2)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit", "adamw4bit"])
def test_other_optimizers_share_steps_by_ddp(optimizer: str, tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(optimizer=optimizer))
    assert kit.run(tmp_path, 2, "--out_dir=two") == [0, 0]
    assert kit.run(tmp_path, 1, "--out_dir=one") == [0]
    assert kit.losses(tmp_path / "two") == pytest.approx(kit.losses(tmp_path / "one"), rel=1e-3)


# -- who this process is ---------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "gpu-[03-04]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ALONE),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ALONE),
        (TORCHRUN, Place(9, 16, 1, 8, "a", 29400)),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, Place(9, 16, 1, 8, "a", 29400, agent=True)),
        (SLURM | {"SLURM_STEP_ID": "0"}, Place(9, 16, 1, 8, "gpu-03", 32345, "slurm")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16", "MASTER_ADDR": "b"}, Place(9, 16, 1, 8, "b", 32345, "slurm")),
        (SLURM, ALONE),  # the batch script itself, which runs once
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        (SLURM | TORCHRUN, Place(9, 16, 1, 8, "a", 29400)),  # torchrun within srun
    ],
)
def test_a_process_finds_its_rank(environ: Mapping[str, str], place: Place) -> None:
    assert place_of(environ) == place


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2"},
        TORCHRUN | {"RANK": "16"},
        TORCHRUN | {"LOCAL_RANK": "x"},
        TORCHRUN | {"MASTER_PORT": "99999"},
    ],
)
def test_variables_that_name_no_rank_are_refused(environ: Mapping[str, str]) -> None:
    with refused(code=ExitCode.ENVIRONMENT):
        place_of(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu-[03-05,11],big-1", "gpu-03"), ("a,b", "a"), ("n1", "n1"), ("rack[1-2]n5,x", "rack1n5"), ("", "")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_what_is_started_here() -> None:
    made = kit.config(device="cpu", gradient_accumulation_steps=16)
    assert keep_going.wanted(0, made, {}) is None
    assert keep_going.wanted(1, made, {}) is None
    assert keep_going.wanted(2, made, {}) == keep_going.Start(2)
    assert keep_going.wanted(8, made, TORCHRUN) is None
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert keep_going.wanted(0, made, sky | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}) == keep_going.Start(
        8, 1, 2, "10.0.0.1"
    )
    with pytest.raises(UserError, match="--gpus 4"):
        keep_going.wanted(4, made, TORCHRUN)
    words = ["train", "a.toml", "--gpus", "2", "--x=1", "--gpus=3"]
    assert keep_going.without(words, "--gpus") == ["train", "a.toml", "--x=1"]


def test_more_ranks_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        facts = (1, 2)

    monkeypatch.setattr(keep_going, "Cards", Two)
    made = kit.config(device="auto", gradient_accumulation_steps=8)
    assert keep_going.wanted(2, made, {}) == keep_going.Start(2)
    with pytest.raises(UserError, match=r"4 ranks on .*, which has 2 cards"):
        keep_going.wanted(4, made, {})


@pytest.mark.parametrize(
    ("seconds", "late"), [((1.0, 1.0, 1.05), []), ((1.0, 1.3), [1]), ((1.0, 1.5, 1.0, 1.0), [1]), ((0.01, 0.03), [])]
)
def test_a_rank_that_computes_slower_than_most_is_found(seconds: tuple[float, ...], late: list[int]) -> None:
    figures = [
        RankFigures(rank=rank, host="a", card="b", evaluated_s=each, evaluated_tokens=100)
        for rank, each in enumerate(seconds)
    ]
    assert [found.rank for found, _ in slow(figures)] == late


# -- `foretrain train --gpus` ----------------------------------------------------------------------------------


def _launched(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "foretrain", "train", "run.toml", "--gpus=2", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _until_step(run: Path, step: int) -> None:
    end = time.monotonic() + kit.MOST_S
    while time.monotonic() < end:
        lines = RunDirectory(run).read_lines("metrics") if run.exists() else []
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.02)
    pytest.fail("no step was made")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are read from /proc")
def test_ranks_started_here_stop_with_what_started_them(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(max_iters=100_000, lr_decay_iters=100_000))
    started = _launched(tmp_path)
    _until_step(tmp_path / "out", 3)
    ranks = _children(started.pid)
    started.send_signal(signal.SIGTERM)
    told, _ = started.communicate(timeout=kit.MOST_S)
    assert started.returncode == ExitCode.STOPPED, told
    record = RunDirectory(tmp_path / "out").read_record()
    assert record.status == "interrupted"
    assert (tmp_path / f"out/checkpoints/step-{record.steps_done:010d}/manifest.json").is_file()
    assert len(ranks) == 2
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are read from /proc")
def test_a_stop_before_ranks_have_begun_is_a_stop(tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config())
    started = _launched(tmp_path)
    end = time.monotonic() + kit.MOST_S
    while len(_children(started.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)  # they still import
    told, _ = started.communicate(timeout=kit.MOST_S)
    assert started.returncode == ExitCode.STOPPED, told
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are read from /proc")
@pytest.mark.parametrize("number", [0, 1])
def test_killed_rank_is_restarted_from_the_last_checkpoint(number: int, tmp_path: Path) -> None:
    kit.prepared(tmp_path, kit.config(max_iters=60, lr_decay_iters=60))
    started = _launched(tmp_path, "--auto-restart")
    _until_step(tmp_path / "out", 12)
    (ranks_parent,) = _children(started.pid)
    os.kill(_children(ranks_parent)[number], signal.SIGKILL)
    told, _ = started.communicate(timeout=180)
    assert started.returncode == 0, told
    record = RunDirectory(tmp_path / "out").read_record()
    assert record.status == "finished"
    assert record.resumed_from
    assert kit.run(tmp_path, 1, "--out_dir=one") == [0]
    assert kit.losses(tmp_path / "out") == pytest.approx(kit.losses(tmp_path / "one"), rel=1e-5)

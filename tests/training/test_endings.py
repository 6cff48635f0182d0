"""How a run ends, and what its end says: signals that come twice, a finished run, one that diverged, a removed folder."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import ExitCode
from foretrain.cli.commands.train import Printer
from foretrain.runs import folder
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, nonfinite
from tests.kit.command import foretrain, refused
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import train

WORDS = ["train", *(f"--{key}={value}" for key, value in TINY.items())]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], object]) -> None:
    """Let the command do something after a step."""
    show = Printer.__call__

    def listen(self: Printer, event: Any) -> None:
        show(self, event)
        if getattr(event, "kind", "") == "step" and event.step == step:
            do()

    monkeypatch.setattr(Printer, "__call__", listen)


def send(number: int, times: int = 1) -> Callable[[], None]:
    def now(*_: object) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return now


@pytest.mark.fault(
    "SIGTERM several times, as some batch systems send it", row="B.3",
    sees="exit code 75 as after one",
    safe="everything up to that step",
)  # fmt: skip
def test_a_second_and_a_third_sigterm_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(Path("data/toy"))
    at_step(monkeypatch, 6, send(signal.SIGTERM, 2))
    monkeypatch.setattr(Printer, "end", send(signal.SIGTERM))  # while the process ends
    foretrain(*WORDS, code=ExitCode.STOPPED)
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.reason, record.steps_done) == ("interrupted", "SIGTERM", 7)
    assert checkpoint.steps_in(Path("out/checkpoints"))[-1] == 7


def test_a_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(Path("data/toy"))
    at_step(monkeypatch, 6, send(signal.SIGINT, 2))
    assert foretrain(*WORDS).returncode == ExitCode.INTERRUPTED
    assert set(checkpoint.steps_in(Path("out/checkpoints"))) <= {5}  # nor does it wait for the save under way


def test_resume_of_a_finished_run_says_that_it_is_finished() -> None:
    write_dataset(Path("data/toy"))
    assert foretrain(*WORDS).returncode == 0
    result = foretrain(*WORDS, "--resume", "auto", code=0)
    assert "out is finished: 12 of 12 steps are done" in result.stdout
    assert "--resume no" in result.stdout
    told = foretrain(*WORDS, "--resume", "auto", "--json")
    assert json.loads(told.stdout)["status"] == "finished"
    assert not Path("out-2").exists()
    foretrain(*WORDS, "--resume", "auto", "--max_iters=14", code=0)
    record = RunDirectory(Path("out")).read_record()
    assert (record.steps_done, record.resumed_from) == (14, (12,))


def test_a_finished_run_can_be_evaluated_again() -> None:
    write_dataset(Path("data/toy"))
    assert foretrain(*WORDS).returncode == 0
    foretrain(*WORDS, "--resume", "auto", "--eval_only=true", "--eval_iters=3", code=0)
    assert not Path("out-2").exists()
    lines = [m for m in RunDirectory(Path("out")).read_lines("metrics") if m["kind"] == "evaluation"]
    assert [m["step"] for m in lines] == [0, 5, 10, 12]
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.steps_done, record.val_loss) == ("finished", 12, lines[-1]["val_loss"])


GUESS = 4.564  # ln 96


@pytest.mark.parametrize(
    ("losses", "id"),
    [
        ([4.6, 21230.0], "diverged.worse"), ([4.6, 3.0, 7.5], "diverged.worse"), ([4.6, 2.0, 3.9], "diverged.lost"),
        ([4.6], None), ([4.6, 4.7], None), ([4.6, 2.0, 2.4], None), ([4.6, 4.4, 4.7], None), ([11.0, 12.0], None),
        ([9.0], None),
    ],
)  # fmt: skip
def test_what_counts_as_diverged(losses: list[float], id: str | None) -> None:
    found = nonfinite.at_the_end(losses, 96)
    assert (found[0] if found else None) == id


@pytest.mark.fault(
    "a run that diverges without a number that is not finite", row="B.2",
    sees="a note when the loss is far above a guess; at the end exit code 6",
    safe="the checkpoints, whose weights are finite",
)  # fmt: skip
def test_a_run_that_diverged_does_not_finish() -> None:
    notes: list[Any] = []
    with refused("diverged.worse", code=ExitCode.DIVERGED) as caught:
        train(tiny(learning_rate=30.0, decay_lr=False, warmup_iters=0, grad_clip=0.0), listen=notes.append)
    assert caught.value.values["loss"] > nonfinite.FAR_ABOVE * GUESS
    assert [getattr(note, "id", "") for note in notes].count("diverging") == 1
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.reason, record.steps_done) == ("diverged", "diverged.worse", 12)


@pytest.mark.fault(
    "the run's folder is removed while it trains", row="B.3",
    sees="a note with the files that are written again",
    safe="what comes after; what was logged and saved before is lost",
)  # fmt: skip
def test_a_folder_that_is_removed_under_a_run_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(Path("data/toy"))

    def remove() -> None:
        while checkpoint.steps_in(Path("out/checkpoints")) != [5] or list(Path("out/checkpoints").glob(".staging-*")):
            time.sleep(0.005)  # the save of step 5 is under way
        shutil.rmtree("out")

    at_step(monkeypatch, 6, remove)
    result = foretrain(*WORDS, code=0)
    assert "removed while it trains" in result.stderr
    for name in ("config.toml", "environment.json", "plan.json", "run.lock", "run.json"):
        assert Path("out", name).exists(), name
    assert checkpoint.steps_in(Path("out/checkpoints")) == [10, 12]
    assert foretrain("compare", "out").returncode == 0


def test_a_run_whose_lock_was_removed_is_locked_again() -> None:
    own = folder.create("out")
    own.write("config.toml", "a = 1\n")
    shutil.rmtree("out")
    assert own.restore_removed() == ("config.toml", "run.lock")
    assert Path("out/config.toml").read_text() == "a = 1\n"
    with refused("usage.run_in_use"):
        RunDirectory(Path("out")).acquire()
    assert own.restore_removed() == ()
    own.release()
    RunDirectory(Path("out")).acquire()


def test_a_damaged_newest_checkpoint_is_told() -> None:
    words = ("--max_iters=4", "--lr_decay_iters=4", "--warmup_iters=1", "--eval_iters=1", "--eval_interval=2",
             "--always_save_checkpoint=true", "--n_layer=1", "--n_embd=16", "--n_head=1")  # fmt: skip
    assert foretrain("train", "baby", "--device=cpu", *words).returncode == 0
    newest = Path("out-baby/checkpoints/step-0000000004/model.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    for command in (["sample", "out-baby", "--tokens", "5"], ["export", "out-baby", "--to", "safetensors", "--force"]):
        result = foretrain(*command, code=0)
        assert "step-0000000002 is used" in result.stderr
        assert "step-0000000004: model.safetensors has" in result.stderr
        told = json.loads(foretrain(*command, "--json").stdout)
        assert (told["checkpoint"], len(told["skipped"])) == ("step-0000000002", 1)
    resumed = foretrain("train", "baby", "--device=cpu", *words, "--max_iters=6", "--resume=auto", "--json")
    assert "step-0000000004" in resumed.stderr

"""`train --auto-restart`: crashes are gone on from, everything else is passed on, nobody is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import keep_going as supervisor
from foretrain.cli.keep_going import child_words, keep_going
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint
from tests.kit.command import refused
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import assert_same, final_tensors, train


@pytest.mark.parametrize(
    ("words", "resumed"),
    [
        (["train", "a.toml", "--auto-restart"], ["train", "a.toml", "--resume=auto"]),
        (["train", "--resume", "no", "a.toml"], ["train", "a.toml", "--resume=auto"]),
        (["train", "--resume=no", "--auto-restart", "--x=1"], ["train", "--x=1", "--resume=auto"]),
        (["train", "--resume", "auto"], ["train", "--resume=auto"]),
    ],
)
def test_the_childs_command_line(words: list[str], resumed: list[str]) -> None:
    assert child_words(words, resume=True) == resumed
    assert child_words(words, resume=False) == [word for word in words if word != "--auto-restart"]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], list[list[str]]]:
    """Let the children end as listed: (exit code, the checkpoint that it leaves or None); returns their command lines."""

    def plan(ends: list[Any]) -> list[list[str]]:
        seen: list[list[str]] = []
        steps, died_at = [""], iter([7] * 4 + list(range(50)))

        def one(words: list[str]) -> tuple[int, bool]:
            code, step, *passed = ends[len(seen)]
            seen.append(words)
            steps[0] = step or steps[0]
            return code, bool(passed)

        monkeypatch.setattr(supervisor, "one_attempt", one)
        monkeypatch.setattr(supervisor, "standing", lambda config: ("out" if steps[0] else "", steps[0], 0))
        monkeypatch.setattr(supervisor, "step_reached", lambda config: next(died_at))
        monkeypatch.setattr(sys, "argv", ["foretrain", "train", "--auto-restart"])
        return seen

    return plan


@pytest.mark.fault(
    "the process is killed, by the kernel or a crash", row="B.1",
    sees="with --auto-restart: how it died, and that it goes on",
    safe="everything up to the last checkpoint",
)  # fmt: skip
def test_crashes_are_gone_on_from_with_growing_waits(children: Any) -> None:
    waits: list[float] = []
    seen = children([(-9, "a"), (-11, None), (1, None), (-6, "b"), (-9, None), (0, "c")])
    assert keep_going(tiny(), wait=waits.append) == 0
    assert waits == [1, 2, 4, 1, 2]
    assert seen == [["train"], *[["train", "--resume=auto"]] * 5]


@pytest.mark.parametrize("code", [0, 2, 4, 5, 6, 7, 8, 75, 130])
def test_what_the_user_can_mend_is_passed_on(code: int, children: Any) -> None:
    assert len(seen := children([(code, "a")])) == 0
    assert keep_going(tiny(), wait=lambda s: pytest.fail("waited")) == code
    assert len(seen) == 1


def test_it_gives_up_without_progress(children: Any) -> None:
    children([(-9, None)] * 4)
    with refused(code=ExitCode.ENVIRONMENT) as caught:
        keep_going(tiny(), wait=lambda s: None)
    assert "4 times" in str(caught.value)
    assert "SIGKILL" in str(caught.value)


def test_crashes_at_other_steps_each_time_are_given_more_tries(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine that kills at random, before the next checkpoint is there."""
    waits: list[float] = []
    died_at = iter(range(50))
    children([(-9, "a"), *[(-9, None)] * 11, (0, "b")])
    monkeypatch.setattr(supervisor, "step_reached", lambda config: next(died_at))
    with pytest.raises(UserError, match="12 times"):
        keep_going(tiny(), wait=waits.append)
    assert (len(waits), max(waits)) == (11, supervisor.LONGEST_WAIT_S)


def test_a_damaged_checkpoint_written_anew_is_a_new_one() -> None:
    config = tiny(max_iters=8)
    train(config)
    before = supervisor.standing(tiny(max_iters=20))
    assert before[:2] == ("out", "step-0000000008")
    Path("out/checkpoints/step-0000000008").rename("old")
    Path("out/checkpoints/step-0000000008").mkdir()
    assert supervisor.standing(tiny(max_iters=20)) != before
    assert supervisor.step_reached(tiny(max_iters=20)) >= 7


def test_the_last_step_is_read_from_the_end_of_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(max_iters=8))
    log = Path("out/metrics.jsonl")
    whole = log.read_bytes()
    wanted = supervisor.step_reached(tiny(max_iters=20))
    log.write_bytes(b"x" * 300_000 + b"\n" + whole + b'{"kind": "step", "st')  # cut by a crash
    assert supervisor.step_reached(tiny(max_iters=20)) == wanted == json.loads(whole.splitlines()[-1])["step"]
    monkeypatch.setattr(supervisor, "LAST_LINES_BYTES", 20)
    assert supervisor.step_reached(tiny(max_iters=20)) == -1


def test_a_stop_is_a_stop(children: Any) -> None:
    children([(-9, "a", "signal")])
    assert keep_going(tiny(), wait=lambda s: pytest.fail("waited")) == ExitCode.INTERRUPTED


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from foretrain.cli import main; main()", "train", "--auto-restart", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def child_of(parent: subprocess.Popen[str], until: Callable[[], bool]) -> int:
    for _ in range(1200):
        time.sleep(0.05)
        if until():
            return int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()[0])
    raise AssertionError("it never happened")


@pytest.mark.fault(
    "the supervisor of --auto-restart dies", row="B.3",
    sees="the training saves and stops",
    safe="everything up to that step",
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc for children")
def test_a_killed_child_a_stop_and_a_killed_supervisor() -> None:
    write_dataset(Path("data/toy"))
    own = {**TINY, "max_iters": 1500, "lr_decay_iters": 1500, "eval_interval": 100, "dropout": 0.1, "dtype": "float32",
           "attention": "sdpa"}  # fmt: skip
    words = [f"--{k}={v}" for k, v in own.items()]
    folder, events = Path("out/checkpoints"), Path("out/events.jsonl")

    def resumed() -> int:  # the first kill may come before there is any event
        return events.read_text().count('"resumed"') if events.exists() else 0

    parent = started(*words)
    os.kill(child_of(parent, lambda: bool(checkpoint.steps_in(folder))), signal.SIGKILL)
    child_of(parent, lambda: resumed() == 1)
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=600)
    assert parent.returncode == ExitCode.STOPPED, err
    assert "crashed (SIGKILL)" in err
    parent = started(*words, "--resume=auto")
    child = child_of(parent, lambda: resumed() == 2)
    parent.kill()
    parent.wait()
    for _ in range(600):
        time.sleep(0.05)
        # The record may still be of the stop before; whoever trains holds the lock until it has written its own.
        if not Path(f"/proc/{child}").exists() or not RunDirectory(Path("out")).is_locked():
            break
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.reason) == ("interrupted", "SIGTERM")
    parent.stdout.close()
    parent.stderr.close()
    config = tiny(**{**own, "out_dir": "out"})
    train(config, resume=True)
    train(tiny(**{**own, "out_dir": "whole"}))
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))

"""`train --auto-restart` as its user has it, many times: a killed child, a stop, a killed supervisor, a resume by hand.

Each process is a fork of one that has imported torch, and runs the real command. After the first one every process is
made to differ in what must not count: another number of threads by default, and no memory of what was measured to be
fastest, so that it would choose anew.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foretrain.training.cpu_threads
from foretrain.cli import keep_going, main
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, starting
from tests.faults.harness import fork, outcome, random_of, wait
from tests.kit.tiny import TINY

CONFIG = {
    **TINY, "n_layer": 1, "dropout": 0.1, "max_iters": 400, "lr_decay_iters": 400, "eval_interval": 40, "eval_iters": 1,
    "out_dir": "out",
}  # fmt: skip
THREADS = 2
LONGEST_S = 120.0


class Forked:
    """Stands in for subprocess.Popen in the supervisor: the child is a fork, which has its pipe and no other file."""

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], env: dict[str, str], **_: Any) -> None:
        def child() -> int:
            os.setsid()
            for handle in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
                if handle > 2 and handle not in pass_fds:
                    try:
                        os.close(handle)
                    except OSError:
                        continue
            os.environ.clear()
            os.environ.update(env)
            return command_line(command[command.index("foretrain") + 1 :])

        self.pid = fork(child)

    def wait(self) -> int:
        while True:
            try:
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except InterruptedError:
                continue

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def command_line(words: list[str]) -> int:
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["foretrain", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _as_here(threads: int) -> None:
    """In a new process: its threads by default, its chances to choose, and no wait after a crash."""
    import torch

    torch.set_num_threads(threads)
    foretrain.training.cpu_threads.usable_cores = starting.usable_cores = lambda: 4
    starting.SHORT_S, starting.BUDGET_S = 0.0, 0.0
    keep_going.FIRST_WAIT_S = 0.02
    keep_going.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]


def _start(*more: str, threads: int = THREADS, forget: bool = False, **changes: Any) -> int:
    def work() -> int:
        if forget:
            os.environ["FORETRAIN_CACHE"] = f"forgotten-{os.getpid()}"
        _as_here(threads)
        return command_line(["train", *more, *(f"--{key}={value}" for key, value in {**CONFIG, **changes}.items())])

    return fork(work)


def _until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_S
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError("it never happened")
        time.sleep(0.002)


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _resumed(out: Path) -> int:
    return (out / "events.jsonl").read_text().count('"resumed"')


def one(out: Path, chance: Any) -> bool:
    """Whether every fault was got over as documented; what the run left is for the caller to compare."""
    went_well, spread_s = True, 0.4

    def other() -> dict[str, Any]:
        return {"threads": chance.choice((1, 2, 3)), "forget": chance.random() < 0.5}

    supervisor = _start("--auto-restart", out_dir=out)
    _until(lambda: bool(checkpoint.steps_in(out / "checkpoints")))
    time.sleep(chance.uniform(0, spread_s))
    os.kill(_child_of(supervisor), signal.SIGKILL)
    _until(lambda: _resumed(out) >= 1)
    time.sleep(chance.uniform(0, spread_s))
    os.kill(supervisor, signal.SIGTERM)
    code = wait(supervisor)
    went_well &= code in (0, 75)
    if code == 75:
        supervisor = _start("--auto-restart", "--resume=auto", out_dir=out, **other())
        _until(lambda: _resumed(out) >= 2)
        time.sleep(chance.uniform(0, spread_s))
        os.kill(supervisor, signal.SIGKILL)
        wait(supervisor)
        _until(lambda: RunDirectory(out).read_record().status != "running" and not RunDirectory(out).is_locked())
        went_well &= RunDirectory(out).read_record().status in ("interrupted", "finished")
        if RunDirectory(out).read_record().status == "interrupted":
            went_well &= wait(_start("--resume=auto", out_dir=out, **other())) == 0
    return went_well


def supervised(count: int, seed: int) -> dict[str, Any]:
    """Runs under --auto-restart with three faults each, against the run that nothing interrupts."""
    os.environ["FORETRAIN_CACHE"] = str(Path("cache").absolute())
    assert wait(_start(out_dir="whole")) == 0, Path("log.txt").read_text()
    whole = outcome("whole", chain=False)
    found: dict[str, Any] = {"runs": 0, "equal": 0, "as_documented": 0}
    for i in range(count):
        out = Path(f"s{i}")
        found["as_documented"] += (well := one(out, random_of(seed, i)))
        found["runs"] += 1
        found["equal"] += (same := outcome(str(out), chain=False) == whole)
        if well and same:
            shutil.rmtree(out)
        else:
            found.setdefault("not", []).append(i)  # its folder stays, to be looked at
    return {**found, "ok": found["runs"] == found["equal"] == found["as_documented"]}

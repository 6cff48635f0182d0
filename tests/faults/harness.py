"""A fork-server: torch is imported once, and each run is a fork of that process, which may be killed at any moment.

The server never computes with torch itself, so that its forks start with no threads. What a fork does with files it
does through foretrain/base/files.py, where it can be killed before any call.
"""

import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it, which takes longer than a run

from foretrain.base import files
from foretrain.base.errors import UserError
from foretrain.base.signals import StopFlag
from foretrain.data.dataset import read_info
from foretrain.runs import folder as store
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, trainer
from foretrain.training.device import place
from foretrain.training.trainer import Trainer
from tests.kit.tiny import tiny

DATA = Path("data/toy")
LISTENING, SAVING = 0, 1  # bytes that a fork shares with the server
# About half of a run's time is spent in saves, so that many kills meet one.
RUN = {
    "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.1, "max_iters": 24, "lr_decay_iters": 24,
    "eval_interval": 3, "eval_iters": 1, "log_interval": 2,
}  # fmt: skip


class Shared:
    """A few bytes that a fork sets and the server reads, also after the fork is dead."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def __setitem__(self, place: int, value: bool) -> None:
        self._memory[place] = int(value)

    def __getitem__(self, place: int) -> bool:
        return bool(self._memory[place])


def fork(work: Callable[[], int]) -> int:
    """Start `work` in a fork; its exit code is what `work` returns, 99 where it raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, *, kill_after_s: float | None = None, signal_: int = signal.SIGKILL) -> int:
    """Exit code of a fork (negative: the signal that ended it); optionally sends it a signal after a while."""
    if kill_after_s is not None:
        end = time.monotonic() + kill_after_s
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(pid, signal_)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def result_of(work: Callable[[], Any]) -> Any:
    """What `work` returns, as JSON, from a fork. Raises RuntimeError where it failed."""
    reader, writer = os.pipe()

    def child() -> int:
        os.close(reader)
        text = json.dumps(work()).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text)
        return 0

    pid = fork(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    if (code := wait(pid)) != 0:
        raise RuntimeError(f"a fork ended with {code}")
    return json.loads(text)


def kill_at(call: int, counts: Callable[[str, Path], bool] = lambda call, path: True) -> files.Watcher:
    seen = 0

    def watcher(name: str, path: Path, size_bytes: int) -> None:
        nonlocal seen
        seen += counts(name, path)
        if seen == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return watcher


def of_checkpoints(call: str, path: Path) -> bool:
    return "checkpoints" in path.parts


def run(out: str, shared: Shared, watcher: files.Watcher | None = None, **changes: Any) -> int:
    """Train, or go on with, the run `out` in this process; the exit code of the command line."""
    torch.set_num_threads(1)
    config = tiny(**{**RUN, "out_dir": out, **changes})
    resume = (Path(out) / "run.json").exists()
    if not resume:  # killed before it had a record: what is there is no run yet, and its name would be taken
        shutil.rmtree(out, ignore_errors=True)
    directory = RunDirectory(Path(out)) if resume else store.create(out)
    if resume:
        directory.acquire()
    own = Trainer(config, read_info(DATA), directory, place(config))
    own.meter.wants = lambda phase: False  # type: ignore[method-assign] - what is measured takes longer than training
    _keep_chain(own, Path(f"{out}.chain"))
    _tell(shared)
    files.watch(watcher)
    try:
        record = own.run(resume=resume)
    except UserError as error:
        return int(error.exit_code)
    return 75 if record.status == "interrupted" else 0


def _tell(shared: Shared) -> None:
    """Let the server see when signals are heard and when a save is under way."""
    enter, commit = StopFlag.__enter__, checkpoint.commit

    def entered(self: StopFlag) -> StopFlag:
        enter(self)
        shared[LISTENING] = True
        return self

    def saving(*words: Any) -> Path:
        shared[SAVING] = True
        try:
            return commit(*words)
        finally:
            shared[SAVING] = False

    StopFlag.__enter__ = entered  # type: ignore[method-assign]
    checkpoint.commit = saving


def _keep_chain(own: Trainer, path: Path) -> None:
    """Hash the tokens of every step onto the hash of the step before it, one line a step."""
    known = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    original = trainer.train_step

    def step(state: Any, batches: Any, rate: float) -> Any:
        at = own.progress.step
        digest = hashlib.sha256(known.get(str(at - 1), "start").encode())

        def hashed() -> Any:
            for idx, targets in batches:
                digest.update(idx.numpy().tobytes() + targets.numpy().tobytes())
                yield idx, targets

        result = original(state, hashed(), rate)
        known[str(at)] = digest.hexdigest()
        with path.open("a") as file:
            file.write(f"{at} {known[str(at)]}\n")
        return result

    trainer.train_step = step


def outcome(out: str, *, chain: bool = True) -> dict[str, Any]:
    """What a finished run left: digests of weights, moments and generators, its step, losses, and its tokens' chain."""
    path, skipped = checkpoint.newest_valid(Path(out) / "checkpoints")
    assert not skipped, skipped
    manifest = json.loads((path / "manifest.json").read_text())
    digests = {n: manifest["files"][f"{n}.safetensors"]["sha256"] for n in ("model", "optimizer", "rng")}
    metrics = [
        (m["kind"], m["step"], m.get("loss"), m.get("val_loss")) for m in RunDirectory(Path(out)).read_lines("metrics")
    ]
    losses = hashlib.sha256(repr(metrics).encode()).hexdigest()
    found = {**digests, "step": manifest["step"], "losses": losses}
    if chain:
        hashes = dict(line.split() for line in Path(f"{out}.chain").read_text().splitlines())
        last = str(max(map(int, hashes)))
        found |= {"last": last, "chain": hashes[last]}
    return found


def readable(out: str) -> bool:
    """Whether everything that stands under a checkpoint's name is whole, at this moment after a kill."""
    folder = Path(out) / "checkpoints"
    return all(checkpoint.problem_of(checkpoint.path_of(folder, step)) is None for step in checkpoint.steps_in(folder))


def random_of(seed: int, *words: object) -> random.Random:
    """A generator for one trial, which does not hang on the others."""
    return random.Random(f"{seed} {words}")

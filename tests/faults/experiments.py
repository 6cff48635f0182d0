"""The experiments: each puts one kind of fault at many places and counts what came of it."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.base import files
from foretrain.base.errors import UserError
from foretrain.model.step import build
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, trainer
from foretrain.training.checkpoint import Progress
from tests.faults import harness
from tests.faults.harness import (
    LISTENING,
    SAVING,
    Shared,
    fork,
    kill_at,
    of_checkpoints,
    outcome,
    random_of,
    result_of,
    wait,
)
from tests.kit.tiny import tiny, write_dataset

MOST_KILLS = 6  # of one run; then it is let go on to its end
Counts = dict[str, Any]


def reference(out: str = "whole", **changes: Any) -> tuple[dict[str, Any], float]:
    """(what the run leaves that nothing interrupts, its seconds)."""
    before = time.monotonic()
    assert wait(fork(lambda: harness.run(out, Shared(), **changes))) == 0
    return outcome(out), time.monotonic() - before


def kills(count: int, seed: int) -> Counts:
    """kill -9 at random times and before random calls of saves; each run is resumed until it is done."""
    whole, took_s = reference()
    found = {"kills": 0, "in_a_save": 0, "runs": 0, "equal": 0, "unreadable": 0}
    while found["kills"] < count:
        out, killed = f"k{found['runs']}", 0
        while True:
            chance, shared = random_of(seed, out, killed), Shared()
            by_call = chance.random() < 0.4
            watcher = kill_at(chance.randrange(1, 60), of_checkpoints) if by_call else None
            last = killed >= MOST_KILLS or found["kills"] >= count
            pid = fork(lambda w=watcher, s=shared, o=out, end=last: harness.run(o, s, None if end else w))
            code = wait(pid, kill_after_s=None if by_call or last else chance.uniform(0, took_s))
            if code != -signal.SIGKILL:
                assert code == 0, code
                break
            killed += 1
            found["kills"] += 1
            found["in_a_save"] += shared[SAVING]
            found["unreadable"] += not harness.readable(out)
        found["runs"] += 1
        found["equal"] += outcome(out) == whole
        shutil.rmtree(out)
    return {**found, "ok": found["equal"] == found["runs"] and not found["unreadable"]}


def every_call(limit: int, seed: int) -> Counts:
    """A kill before each call on files of the first saves, retention included; at most `limit` of them."""
    short = {"max_iters": 9, "keep_checkpoints": 1}  # three saves; the second and third remove one
    whole, _ = reference(**short)
    found = {"calls": 0, "equal": 0, "unreadable": 0}
    for call in range(1, limit + 1):
        out = f"c{call}"
        if wait(fork(lambda c=call, o=out: harness.run(o, Shared(), kill_at(c, of_checkpoints), **short))) == 0:
            shutil.rmtree(out)
            break
        found["calls"] += 1
        found["unreadable"] += not harness.readable(out)
        assert wait(fork(lambda o=out: harness.run(o, Shared(), **short))) == 0
        found["equal"] += outcome(out) == whole
        shutil.rmtree(out)
    return {**found, "ok": found["equal"] == found["calls"] and not found["unreadable"]}


def sigterm(count: int, seed: int) -> Counts:
    """SIGTERM at random moments: exit code 75, the step it stopped at saved, and the rest of the run as ever."""
    whole, took_s = reference()
    found: Counts = {"signals": 0, "exit_75": 0, "durable": 0, "equal": 0, "slowest_s": 0.0}
    attempt = 0
    while found["signals"] < count:
        out, shared, attempt = f"t{attempt}", Shared(), attempt + 1
        pid = fork(lambda o=out, s=shared: harness.run(o, s))
        while not shared[LISTENING]:
            time.sleep(0.001)
        time.sleep(random_of(seed, out).uniform(0, took_s * 0.8))
        os.kill(pid, signal.SIGTERM)
        before = time.monotonic()
        code = wait(pid)
        if code != 0:  # else it was done already
            found["signals"] += 1
            found["slowest_s"] = max(found["slowest_s"], time.monotonic() - before)
            found["exit_75"] += code == 75
            record = RunDirectory(Path(out)).read_record()
            path, _ = checkpoint.newest_valid(Path(out) / "checkpoints")
            saved = checkpoint.read_progress(path).step if path else None
            found["durable"] += (record.status, saved) == ("interrupted", record.steps_done)
            assert wait(fork(lambda o=out: harness.run(o, Shared()))) == 0
            found["equal"] += outcome(out) == whole
        shutil.rmtree(out)
    return {**found, "ok": found["exit_75"] == found["durable"] == found["equal"] == found["signals"]}


def _state(**changes: Any) -> Any:
    torch.set_num_threads(1)
    state = build(tiny(dropout=0.1, **changes), torch.device("cpu"), torch.float32, compile=False)
    idx = torch.arange(16).repeat(4, 1)
    trainer.train_step(state, [(idx, idx), (idx, idx)], 1e-2)
    return state


def full_disk(offsets: int, seed: int) -> Counts:
    """The disk is full after each 64 KiB of a save: the checkpoint before is whole and the message has need and room."""

    def work() -> Counts:
        folder, state, found = Path("full"), _state(n_embd=128, n_layer=3), {"offsets": 0, "intact": 0, "said": 0}
        files.CHUNK_BYTES = 65536
        checkpoint.save(folder, state, Progress(step=1))
        room = 0

        def watcher(call: str, path: Path, size_bytes: int) -> None:
            nonlocal room
            room -= size_bytes if call == "write" else 0
            if room < 0 and call == "write":  # removing files is still possible
                raise OSError(errno.ENOSPC, "No space left on device")

        files.watch(watcher)
        for offset in range(offsets):
            room = offset * 65536
            try:
                checkpoint.save(folder, state, Progress(step=2))
            except UserError as error:
                found["offsets"] += 1
                found["said"] += error.id == "disk.full" and "needs about" in str(error) and " free, " in str(error)
                whole = checkpoint.problem_of(checkpoint.path_of(folder, 1)) is None
                found["intact"] += whole and [p.name for p in folder.iterdir()] == ["step-0000000001"]
            else:
                break
        shutil.rmtree(folder)
        return found

    found = result_of(work)
    return {**found, "ok": found["offsets"] == found["intact"] == found["said"] > 0}


def bit_flips(count: int, seed: int) -> Counts:
    """One flipped bit somewhere in a checkpoint: weights, moments, generators, state or manifest."""

    def work() -> Counts:
        path = checkpoint.save(Path("flips"), _state(), Progress(step=1))
        chance, found = random_of(seed), {"flips": 0, "found": 0}
        sizes = {entry: entry.stat().st_size for entry in sorted(path.iterdir())}
        for i in range(count):
            target = list(sizes)[i % len(sizes)]
            place, bit = chance.randrange(sizes[target]), 1 << chance.randrange(8)
            with target.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ bit]))
                file.flush()
                found["found"] += checkpoint.problem_of(path) is not None
                file.seek(place)
                file.write(bytes([byte]))
            found["flips"] += 1
        assert checkpoint.problem_of(path) is None
        shutil.rmtree(path.parent)
        return found

    found = result_of(work)
    return {**found, "ok": found["found"] == found["flips"]}


def not_finite(count: int, seed: int) -> Counts:
    """A number that is none, at random steps, micro-steps and tensors: tests/kit/poisoned.py."""

    def work() -> Counts:
        from tests.kit.poisoned import stop_at_random

        torch.set_num_threads(1)
        stop_at_random(count, seed)  # asserts what it must show for each
        for path in Path().glob("r*"):
            shutil.rmtree(path)
        return {"places": count}

    try:
        return {**result_of(work), "ok": True}
    except RuntimeError as error:
        return {"places": 0, "error": str(error), "ok": False}


def out_of_memory(count: int, seed: int) -> Counts:
    """Memory runs out once, in each phase, step and micro-step in turn, at most at `count` points spread over all."""
    steps, accumulation = 10, 20
    base = {**harness.RUN, "batch_size": 2, "gradient_accumulation_steps": accumulation, "max_iters": steps,
            "eval_interval": 4, "block_size": 8, "n_embd": 16}  # fmt: skip
    points = [(where, s, m) for s in range(steps) for m in range(accumulation) for where in ("forward", "backward")]
    points += [("optimizer", s, 0) for s in range(steps)]
    points += [("evaluation", 0, m) for m in range(2 * 4 * 2)]
    points = [points[i * len(points) // count] for i in range(min(count, len(points)))]
    expected: dict[int, Any] = {}
    found = {"points": 0, "as_the_smaller": 0, "clean_stop": 0}

    def go(out: str, **changes: Any) -> int:
        return harness.run(out, Shared(), **{**base, **changes})

    def failing(where: str, step: int, micro: int) -> int:
        from tests.kit.training import NO_MEMORY, fail_in_step

        with pytest.MonkeyPatch.context() as patch:
            if where == "evaluation":
                original, tries = trainer.evaluation_loss, iter(range(10**6))

                def evaluation(*words: Any) -> Any:
                    if next(tries) == micro:
                        raise NO_MEMORY
                    return original(*words)

                patch.setattr(trainer, "evaluation_loss", evaluation)
            else:
                fail_in_step(patch, step, micro, where)
            return go("oom", eval_iters=2)

    assert wait(fork(lambda: go("plain", eval_iters=2))) == 0
    for where, step, micro in points:
        if where in ("forward", "backward") and step not in expected:
            expected[step] = _resumed_smaller(go, step)
        code = wait(fork(lambda w=where, s=step, m=micro: failing(w, s, m)))
        found["points"] += 1
        if where == "optimizer":
            steps_saved = checkpoint.steps_in(Path("oom/checkpoints"))
            found["clean_stop"] += code == 5 and harness.readable("oom") and all(s <= step for s in steps_saved)
        else:
            same = expected[step] if where != "evaluation" else _weights("plain")
            found["as_the_smaller"] += code == 0 and _weights("oom") == same
        for left in ("oom", "oom.chain"):
            shutil.rmtree(left) if Path(left).is_dir() else Path(left).unlink(missing_ok=True)
    return {**found, "ok": found["as_the_smaller"] + found["clean_stop"] == found["points"]}


def _weights(out: str) -> dict[str, str]:
    return {key: value for key, value in outcome(out).items() if key in ("model", "optimizer", "rng")}


def _resumed_smaller(go: Any, step: int) -> dict[str, str]:
    """The run that is stopped before a step and goes on with half the micro-batch."""
    out, half = f"half{step}", {"batch_size": 1, "gradient_accumulation_steps": 40, "eval_iters": 4}

    def until() -> int:
        original, tries = trainer.train_step, iter(range(10**6))

        def stop(*words: Any) -> Any:
            result = original(*words)
            if next(tries) + 1 == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        trainer.train_step = stop
        return go(out, eval_iters=2)

    if step:
        assert wait(fork(until)) == 75
    assert wait(fork(lambda: go(out, **half))) == 0
    found = _weights(out)
    shutil.rmtree(out)
    return found


def prepare() -> None:
    write_dataset(harness.DATA)

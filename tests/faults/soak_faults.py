"""The faults of a soak: each is done to the training process from outside, and what it needs is undone by itself.

A fault is a function of (the run as it is watched, a generator); it returns what is worth noting of it.
"""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.training import checkpoint
from tests.faults.soak_watch import Watch

Note = dict[str, Any]
MOST_SAVES_HELD = 1.5  # no fault lasts longer than from one save to the next and a half, in processor time
MOST_SQUEEZES = 2  # each halves the micro-batch for good


def kill(run: Watch, chance: random.Random) -> Note:
    return _end(run, signal.SIGKILL)


def kill_in_a_save(run: Watch, chance: random.Random) -> Note:
    """As soon as a staging folder is there, after up to a tenth of a second."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(run.checkpoints.glob(".staging-*")):
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.1))
    staging = any(run.checkpoints.glob(".staging-*"))
    return {**_end(run, signal.SIGKILL), "staging": staging}


def segmentation_fault(run: Watch, chance: random.Random) -> Note:
    return _end(run, signal.SIGSEGV)


def flip_and_kill(run: Watch, chance: random.Random) -> Note:
    """One bit of the newest checkpoint, then kill -9: the one before it has to do."""
    step = checkpoint.steps_in(run.checkpoints)[-1]
    target = chance.choice(sorted(checkpoint.path_of(run.checkpoints, step).iterdir()))
    place, bit = chance.randrange(target.stat().st_size), 1 << chance.randrange(8)
    with target.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))
    return {**_end(run, signal.SIGKILL), "file": target.name, "step": step}


def _end(run: Watch, number: int) -> Note:
    at, child = time.monotonic(), run.living
    last = run.last_step()
    os.kill(child, number)
    run.wait_until_gone(child)
    last = max(last, run.last_step())
    back_s, resumed = run.wait_until_back(at)
    return {"restart_s": back_s, "repeated_steps": last + 1 - resumed}


def stop_and_go_on(run: Watch, chance: random.Random) -> Note:
    """SIGSTOP, as a suspended laptop."""
    held_s = chance.uniform(1, 4)
    before = time.monotonic()
    os.kill(run.living, signal.SIGSTOP)
    time.sleep(held_s)
    os.kill(run.living, signal.SIGCONT)
    return {"held_s": time.monotonic() - before}


def full_disk(run: Watch, chance: random.Random) -> Note:
    """No file may grow beyond 64 KiB, until a save has met that."""
    with _limit(run.living, resource.RLIMIT_FSIZE, 65536):
        return _hold(run)


def no_descriptors(run: Watch, chance: random.Random) -> Note:
    with _limit(run.living, resource.RLIMIT_NOFILE, 3):
        return _hold(run)


def read_only(run: Watch, chance: random.Random) -> Note:
    folder = str(run.checkpoints)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        _make_read_only(folder)
        return _hold(run)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _make_read_only(mounted: str, tries: int = 100) -> None:
    """Asked again while it is busy: no mount turns read-only under a file that is being written."""
    for left in reversed(range(tries)):
        done = subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=not left, capture_output=True)
        if done.returncode == 0:
            return
        time.sleep(0.05)


def slow_disk(run: Watch, chance: random.Random) -> Note:
    os.kill(run.living, signal.SIGUSR2)
    return {}


def no_memory(run: Watch, chance: random.Random) -> Note:
    os.kill(run.living, signal.SIGUSR1)
    return {}


def _hold(run: Watch) -> Note:
    """Until one save has met it; three in a row would end the run.

    A run that may not write its log cannot say that a save has failed, so there is an end by processor time too.
    """
    began, before, used = time.monotonic(), run.failed_saves(), run.cpu_s()
    while run.failed_saves() == before and run.cpu_s() - used < MOST_SAVES_HELD * run.save_cpu_s and run.child:
        time.sleep(0.02)
    return {"lasted_s": time.monotonic() - began}


class _limit:
    """For a while another process has a limit."""

    def __init__(self, pid: int, kind: int, value: int) -> None:
        self.pid, self.kind, self.value = pid, kind, value

    def __enter__(self) -> None:
        self.old = resource.prlimit(self.pid, self.kind)
        resource.prlimit(self.pid, self.kind, (self.value, self.old[1]))

    def __exit__(self, *words: object) -> None:
        if Path(f"/proc/{self.pid}").exists():
            resource.prlimit(self.pid, self.kind, self.old)


Fault = Callable[[Watch, random.Random], Note]
KILLING: tuple[Fault, ...] = (kill, kill_in_a_save, segmentation_fault, flip_and_kill)
PASSING: tuple[Fault, ...] = (stop_and_go_on, full_disk, no_descriptors, read_only, slow_disk)

"""Many trials in forks, each with limits: seconds of the processor, seconds of the clock, memory beyond the start.

A trial that outlives them is ended by the kernel, even inside a C function, and counts as a hang; the next one begins
in a fresh fork.
"""

import json
import mmap
import os
import resource
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from foretrain.base.process_memory import resident_bytes
from tests.faults.harness import fork, wait

CPU_S = (
    10.0  # what the catalogue allows for a verdict; of the processor, as a shared machine's clock is not the product's
)
CLOCK_S = 120.0  # for what waits instead of computing
MEMORY_BYTES = 2**30
_ENDED = {-signal.SIGPROF: "hang", -signal.SIGALRM: "hang"}


def trials(
    count: int, one: Callable[[int], dict[str, Any]], begin: Callable[[], None] = lambda: None, *, apart: bool = False
) -> list[dict[str, Any]]:
    """What `one(i)` returns for each i, as JSON; {"number": i, "fate": "hang" or "ended with …"} where it did not end.

    `begin` is called once in each fork, before its first trial. `apart`: a fork for each trial, whose memory is then
    its own; `base` is what it had at its start, in bytes.
    """
    at, path = mmap.mmap(-1, 8), Path(f"trials-{os.getpid()}.jsonl")
    path.write_text("")
    done = 0
    while done < count:
        last = done + 1 if apart else count
        code = wait(fork(lambda first=done, end=last: _work(range(first, end), one, begin, at, path)))
        if code == 0:
            done = last
            continue
        (number,) = struct.unpack("<q", at[:8])
        with path.open("a") as file:
            file.write(json.dumps({"number": number, "fate": _ENDED.get(code, f"ended with {code}")}) + "\n")
        done = number + 1
    found = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return found


def _work(
    numbers: range, one: Callable[[int], dict[str, Any]], begin: Callable[[], None], at: mmap.mmap, path: Path
) -> int:
    begin()
    base = resident_bytes() or 0
    limit_memory()
    with path.open("a") as file:
        for number in numbers:
            at[:8] = struct.pack("<q", number)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            signal.setitimer(signal.ITIMER_REAL, CLOCK_S)
            found = one(number)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            file.write(json.dumps({"number": number, "base": base, **found}) + "\n")
            file.flush()
    return 0


def limit_memory() -> None:
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def free_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def count_of(found: Sequence[dict[str, Any]], fate: str) -> int:
    return sum(each["fate"] == fate for each in found)

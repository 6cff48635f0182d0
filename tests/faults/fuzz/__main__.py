"""python -m tests.faults.fuzz [--minutes N] [--only NAME …] [--seed N] [--coverage]: change files, let them be read.

Each target gets an equal share of the time, in forks with a limit on seconds and memory. A file that a reader fails on
is made small and kept in build/fuzz/; the exit code is then 1. With --coverage, atheris (libFuzzer) chooses the
changes by the lines that they reach; it needs `pip install atheris`, and takes one target.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.faults.fuzz.mutate import mutated, smallest
from tests.faults.fuzz.targets import MOST_BYTES, TARGETS, Fault, feed
from tests.faults.harness import random_of
from tests.faults.inputs import alone
from tests.faults.limits import trials

REPO = Path(__file__).parents[3]
KEPT = REPO / "build" / "fuzz"
AT_ONCE = 100  # trials of one fork


def fate_of(name: str, data: bytes) -> str:
    """'' for a file that was read or refused in a sentence, else what came instead and where."""
    try:
        feed(name, data)
    except Fault as fault:
        return str(fault)[:300]
    except MemoryError:
        return "MemoryError"
    except BaseException as error:  # also of Rust, whose panics are none of Exception's
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "/foretrain/" in each.filename]
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return f"{type(error).__name__}: {error}"[:200] + where
    return ""


def kind_of(fate: str) -> str:
    """The same for files that fail alike: without the file's own words and numbers."""
    return re.sub(r"\d+", "#", re.sub(r"(says|error:) .*", r"\1", fate, flags=re.DOTALL))


def fuzzed(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """How many files a target read in this time, and what it failed on: {what: the smallest file}."""
    seeds, end, count = TARGETS[name].seeds(), time.monotonic() + seconds, 0
    failed: dict[str, tuple[str, bytes]] = {}

    def data_of(number: int) -> bytes:
        return mutated(seeds, random_of(seed, name, number))[:MOST_BYTES]

    while time.monotonic() < end:
        first = count

        def one(number: int, first: int = first) -> dict[str, Any]:
            return {"fate": fate_of(name, data_of(first + number))}

        for each in trials(AT_ONCE, one, alone):
            if each["fate"]:
                failed.setdefault(kind_of(each["fate"]), (each["fate"], data_of(first + each["number"])))
        count += AT_ONCE
    return {"count": count, "failed": {what: _small(name, what, data) for what, data in failed.values()}}


def _small(name: str, what: str, data: bytes) -> bytes:
    """The file without what it does not take to fail in this way; what hangs or ends the process stays as it is."""
    if what.startswith(("hang", "ended with")):
        return data

    def fails(shorter: bytes) -> bool:
        return kind_of(trials(1, lambda _: {"fate": fate_of(name, shorter)}, alone)[0]["fate"]) == kind_of(what)

    return smallest(data, fails, tries=120)


def keep(name: str, what: str, data: bytes) -> Path:
    """The failing file, with what came of it beside it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}--{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(what + "\n", "utf-8")
    return path


def by_coverage(name: str, seconds: float) -> None:
    """atheris on one target, without an end but the time; it exits by itself where something fails."""
    import atheris

    corpus = KEPT / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(data)

    def one(data: bytes) -> None:
        if what := fate_of(name, data):
            raise RuntimeError(f"{what} ({keep(name, what, data)})")

    atheris.instrument_all()
    limits = (f"-max_total_time={seconds:.0f}", f"-max_len={MOST_BYTES}", "-timeout=20", "-rss_limit_mb=3000")
    atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all targets together (5)")
    parser.add_argument("--only", nargs="*", choices=TARGETS, help="these targets alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--coverage", action="store_true", help="let atheris choose the changes, for one target")
    words = parser.parse_args()
    names = words.only or list(TARGETS)
    bad = False
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        if words.coverage:
            alone()
            by_coverage(names[0], words.minutes * 60)
        for name in () if words.coverage else names:
            found = fuzzed(name, words.minutes * 60 / len(names), words.seed)
            bad |= bool(found["failed"])
            print(json.dumps({"target": name, "files": found["count"], "failed": list(found["failed"])}), flush=True)
            for what, data in found["failed"].items():
                print(f"  {keep(name, what, data)}", flush=True)
        os.chdir("/")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

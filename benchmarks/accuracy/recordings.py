"""Recordings of real cards, allocation by allocation, beside traces of the programs that were recorded.

    python -m benchmarks.accuracy.recordings --recordings DIR --checkouts DIR [--only CASE …]

DIR has the memory snapshots that the cases name (FILES), as pickles or as their events in a JSON that gzip has packed:
{"events": [[action, address, bytes, stream], …]}. Allocations are put side by side in their order, by a shortest list of
differences (Myers 1986), and each is held to have the same size, and to be freed before the same other one. Run it with
the Python of the torch that was recorded; other cases' rows stay in benchmarks/results/recordings.json.
"""

import argparse
import gzip
import importlib
import json
import sys
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy import checkouts, results, table
from benchmarks.common import RESULTS, versions

OUT = RESULTS / "recordings.json"
PHASE = "recorded"
FILES = {
    "cs-n-100": "cs336-niu-t100",
    "cs-n-150": "cs336-niu-t150",
    "cs-w-128": "cs336-wedsonlin-medium-t128",
    "cs-w-512": "cs336-wedsonlin-medium-t512-bf16",
    "cs-k-128": "cs336-kkaitlyn111-2.7b-t128",
}
MOST_DIFFERENCES = 2000
SWAPPED = "two buffers of equal size, with which index_put sorts, are freed in the other order"
NAMED = {
    "cs-k-128": "the process had a cuBLAS workspace of 32 MiB before the recording began; index_put took a buffer of "
    "4,096 bytes 16 allocations earlier and once copied 5,242,880 bytes of values, for reasons that are not known; "
    + SWAPPED
}


class BadRecording(ValueError):
    pass


class Life(NamedTuple):
    """An allocation in order: bytes, and the number of the allocation before which it was freed; None if it was not."""

    nbytes: int
    freed_before: int | None
    made_by: str = ""


def recorded(path: Path) -> list[Life]:
    from foretrain.predict import snapshot

    try:
        if path.suffix == ".pickle":
            entries = [(e.action, e.address, e.nbytes) for e in snapshot.read(path).entries]
        else:
            events = json.loads(gzip.decompress(path.read_bytes()))["events"]
            entries = [(str(e[0]), int(e[1]), int(e[2])) for e in events]
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadRecording(f"{path}: is not a recording ({type(error).__name__}: {str(error)[:100]})") from None
    sizes: list[int] = []
    freed: dict[int, int] = {}
    alive: dict[int, int] = {}
    for action, address, nbytes in entries:
        if action == "alloc":
            alive[address] = len(sizes)
            sizes.append(nbytes)
        elif action == "free_completed" and address in alive:
            freed[alive.pop(address)] = len(sizes)
    return [Life(nbytes, freed.get(number)) for number, nbytes in enumerate(sizes)]


def traced(case: table.Case, folders: list[Path]) -> list[Life]:
    """Return the allocations of the program's trace, in the recorded phase."""
    import foretrain

    program = importlib.import_module(f"benchmarks.accuracy.programs.{case.program}")
    settings = dict(case.settings)
    trace = foretrain.trace(lambda on: program.run(on, settings, folders), gpu=case.gpu).trace
    lives: dict[int, Life] = {}
    for phase, start, end in trace.spans():
        if phase != PHASE:
            continue
        for event in trace.events[start:end]:
            allocation = trace.allocations[event if event >= 0 else ~event]
            if event >= 0 and allocation.nbytes:
                lives[event] = Life(allocation.nbytes, None, allocation.op)
            elif ~event in lives:
                lives[~event] = lives[~event]._replace(freed_before=len(lives))
    return list(lives.values())


def in_order(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Return pairs of places of a longest common subsequence. Raises BadRecording where too much differs."""
    farthest, walks = {1: 0}, list[dict[int, int]]()
    for differences in range(MOST_DIFFERENCES):
        walks.append(dict(farthest))
        for k in range(-differences, differences + 1, 2):
            down = k == -differences or (k != differences and farthest[k - 1] < farthest[k + 1])
            x = farthest[k + 1] if down else farthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            farthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _pairs(walks, len(a), len(b))
    raise BadRecording(f"more than {MOST_DIFFERENCES} allocations differ")


def _pairs(walks: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """Go back from the end: every step along a diagonal is a pair."""
    pairs = []
    for differences in range(len(walks) - 1, -1, -1):
        farthest, k = walks[differences], x - y
        down = k == -differences or (k != differences and farthest.get(k - 1, -1) < farthest.get(k + 1, -1))
        before = farthest[k + 1 if down else k - 1]
        before_y = before - (k + 1 if down else k - 1)
        while x > max(before, 0) and y > max(before_y, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = before, before_y
    return pairs[::-1]


def compare(ours: list[Life], theirs: list[Life]) -> dict[str, Any]:
    """Count allocations that are the same in order, and of these those freed at the same place; list the
    differences.
    """
    pairs = in_order([life.nbytes for life in theirs], [life.nbytes for life in ours])
    of_theirs = dict(pairs)
    next_pair: list[int] = [len(ours)] * (len(theirs) + 1)  # of each place in the recording, the trace's
    for place in range(len(theirs) - 1, -1, -1):
        next_pair[place] = of_theirs.get(place, next_pair[place + 1])
    freed = 0
    for i, j in pairs:
        at = theirs[i].freed_before
        expected = len(ours) if at is None else next_pair[at]
        found = ours[j].freed_before
        freed += expected == (len(ours) if found is None else found)
    missing = Counter(life.nbytes for i, life in enumerate(theirs) if i not in of_theirs)
    there = {j for _, j in pairs}
    extra = Counter((life.nbytes, life.made_by) for j, life in enumerate(ours) if j not in there)
    return {
        "recorded": len(theirs), "traced": len(ours), "in_order": len(pairs), "freed_alike": freed,
        "only_recorded": [{"bytes": nbytes, "count": n} for nbytes, n in missing.most_common()],
        "only_traced": [{"bytes": nbytes, "op": op, "count": n} for (nbytes, op), n in extra.most_common()],
    }  # fmt: skip


def find(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.pickle", folder / f"{stem}.json.gz"):
        if path.is_file():
            return path
    raise BadRecording(f"{folder}: has neither {stem}.pickle nor {stem}.json.gz")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.recordings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--recordings", type=Path, required=True, metavar="DIR")
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=list(FILES), choices=list(FILES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known = {case.id: case for case in table.read().cases}
    rows = {row["case"]: row for row in json.loads(asked.out.read_text("utf-8"))["rows"]} if asked.out.is_file() else {}
    for id in asked.only:
        try:
            theirs = recorded(find(asked.recordings, FILES[id]))
            folders = [checkouts.find(repository, asked.checkouts) for repository in known[id].checkouts]
            row = compare(traced(known[id], folders), theirs)
        except (BadRecording, checkouts.Missing) as error:
            print(error, file=sys.stderr)
            return 2
        rows[id] = {
            "case": id, "what": known[id].what, "measured_torch": known[id].torch, "torch": versions()["torch"],
            "date": date.today().isoformat(), **row, "named": NAMED.get(id, SWAPPED),
        }  # fmt: skip
        print(
            f"{id}: {row['in_order']:,} of {row['recorded']:,} allocations in order, {row['freed_alike']:,} freed alike"
        )
    found = {
        "what": "recordings of real cards, allocation by allocation",
        "rows": [rows[id] for id in FILES if id in rows],
    }
    results.write(asked.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

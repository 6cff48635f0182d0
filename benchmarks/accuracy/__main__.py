"""Predict every case of cases.json, or some, and keep what was predicted.

    python -m benchmarks.accuracy [--checkouts DIR] [--only ID …] [--again] [--json] [--out FILE]

A case is kept as soon as it ends, so a stop loses at most the one that runs. A case
that is kept already is not traced again, unless its settings or its driver changed. Cases whose checkout is not in DIR
are said. The code of others needs einops, einx and jaxtyping.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.accuracy import results
from benchmarks.accuracy.table import BadTable, Case, Table, read
from benchmarks.common import RESULTS, versions


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(table: Table, only: list[str]) -> list[Case]:
    """The cases whose id begins with one of these; an id that names none is an error."""
    if not only:
        return list(table.cases)
    for start in only:
        if not any(case.id.startswith(start) for case in table.cases):
            raise BadTable(f"--only {start}: there is no such case; they are {', '.join(c.id for c in table.cases)}")
    return [case for case in table.cases if case.id.startswith(tuple(only))]


def commit() -> str:
    """Of the foretrain that predicts, with '+' where files are changed; '' outside a checkout."""
    import foretrain

    at = Path(foretrain.__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", at, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "-C", at, "status", "--porcelain", "-uno", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def predictions(cases: list[Case], checkouts: Path | None) -> Iterator[dict[str, Any]]:
    """What the worker says of each case, as it ends. One worker for all where it can fork, else one for each."""
    where = ["--checkouts", str(checkouts)] if checkouts is not None else []
    for batch in [cases] if hasattr(os, "fork") else [[case] for case in cases]:
        command = [sys.executable, "-m", "benchmarks.accuracy.predict", *[case.id for case in batch], *where]
        left = {case.id for case in batch}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as chatter:
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=chatter, text=True, encoding="utf-8")
            try:
                assert worker.stdout is not None
                for line in worker.stdout:
                    found = json.loads(line)
                    left.discard(found["case"])
                    yield found
            finally:
                if worker.poll() is None:
                    worker.terminate()
                worker.wait()
            chatter.seek(0)
            last = (chatter.read().strip().splitlines() or [f"ended with {worker.returncode}"])[-1][:200]
        for id in sorted(left):
            yield {"case": id, "why": f"failed: {last}"}


def line_of(row: dict[str, Any]) -> list[str]:
    """A figure as the table of the screen shows it."""
    if "predicted" not in row:
        return [row["id"], row["published"], "–", "–"]
    if "right" in row:
        return [
            row["id"],
            "out of memory",
            "fits" if row["predicted"] else "does not fit",
            "right" if row["right"] else "wrong",
        ]
    unit = {"ms": 1e-3, "tok/s": 1, "B": 1, "MiB": 2**20, "GiB": 2**30}[row["published"].split()[-1]]
    shown = f"{row['predicted'] / unit:,.0f}" if unit <= 1 else f"{row['predicted'] / unit:,.3f}"
    return [row["id"], row["published"], shown, f"{row['error'] * 100:+.3f} %"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, metavar="DIR", help="a folder with the checkouts that the cases name")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="cases whose id begins so")
    parser.add_argument("--again", action="store_true", help="predict also what is kept")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json", help="where predictions are kept")
    asked = parser.parse_args()
    if asked.checkouts is not None and not asked.checkouts.is_dir():
        say(f"--checkouts {asked.checkouts}: there is no such folder")
        return 2
    try:
        table = read()
        cases, kept = chosen(table, asked.only), results.read(asked.out)
    except (BadTable, results.BadResults) as error:
        say(str(error))
        return 2
    prints = {case.id: results.fingerprint(case) for case in table.cases}
    kept = {id: row for id, row in kept.items() if row["fingerprint"] == prints.get(id)}
    states: dict[str, str] = {}
    head = {
        "what": "predicted against measured on other people's GPUs",
        "date": date.today().isoformat(),
        "versions": versions(),
    }
    with_ = {
        "foretrain": versions()["foretrain"],
        "commit": commit(),
        "torch": versions()["torch"],
        "python": versions()["python"],
    }

    def keep() -> dict[str, Any]:
        found = results.document(table, kept, states, head)
        results.write(asked.out, found)
        return found

    todo = [case for case in cases if asked.again or case.id not in kept]
    say(f"{len(cases) - len(todo)} of {len(cases)} cases are kept; {len(todo)} to predict")
    started = time.monotonic()
    try:
        for number, one in enumerate(predictions(todo, asked.checkouts) if todo else (), 1):
            took, started = f"{time.monotonic() - started:.0f} s", time.monotonic()
            id, said = one["case"], one.get("said")
            if said is None:
                states[id] = one["why"]
                say(f"[{number}/{len(todo)}] {id}: {one['why']}")
                continue
            kept[id] = {"fingerprint": prints[id], **with_, "date": date.today().isoformat(), "said": said}
            row = next(row for row in keep()["cases"] if row["id"] == id)
            shown = "; ".join(f"{p} for {m} ({e})" for _, m, p, e in map(line_of, row["figures"]))
            say(f"[{number}/{len(todo)}] {id}: {shown}, {took}")
    except KeyboardInterrupt:
        say(f"stopped; what was predicted is in {asked.out}")
        return 130
    found = keep()
    if asked.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    print(json.dumps(found["summary"], indent=1))
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

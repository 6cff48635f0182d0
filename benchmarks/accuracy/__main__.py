"""Predict every case of cases.json, or some, and store the predictions.

python -m benchmarks.accuracy [--checkouts DIR] [--only ID …] [--again] [--out FILE]

A case is stored as soon as it ends, so a stop loses at most the current one. A stored case is not traced again, unless
its settings or its driver changed. Cases whose checkout is not in DIR are listed. The code of others needs einops, einx
and jaxtyping.
"""

import argparse
import contextlib
import json
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.accuracy import results
from benchmarks.accuracy.predict import prediction_of
from benchmarks.accuracy.table import read
from benchmarks.common import RESULTS, commit, versions


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def line_of(row: dict[str, Any]) -> str:
    if "predicted" not in row:
        return f"{row['id']} {row['published']}: –"
    if "right" in row:
        return f"{row['id']} out of memory: {'right' if row['right'] else 'wrong'}"
    return f"{row['id']} {row['published']}: {row['error'] * 100:+.3f}%"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, metavar="DIR", help="a folder with the checkouts that the cases name")
    parser.add_argument("--only", nargs="+", default=[""], metavar="ID", help="cases whose id begins so")
    parser.add_argument("--again", action="store_true", help="predict also what is kept")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json", help="where predictions are kept")
    asked = parser.parse_args()
    table = read()
    cases = [case for case in table.cases if case.id.startswith(tuple(asked.only))]
    prints = {case.id: results.fingerprint(case) for case in table.cases}
    kept = {id: row for id, row in results.read(asked.out).items() if row["fingerprint"] == prints.get(id)}
    states: dict[str, str] = {}
    own = {key: versions()[key] for key in ("foretrain", "torch", "python")}
    head = {
        "what": "predicted against measured on other people's GPUs",
        "date": date.today().isoformat(),
        "versions": versions(),
    }

    def keep() -> dict[str, Any]:
        found = results.document(table, kept, states, head)
        results.write(asked.out, found)
        return found

    todo = [case for case in cases if asked.again or case.id not in kept]
    say(f"{len(cases) - len(todo)} of {len(cases)} cases are kept; {len(todo)} to predict")
    warnings.simplefilter("ignore")
    for number, case in enumerate(todo, 1):
        started = time.monotonic()
        with contextlib.redirect_stdout(sys.stderr):
            found = prediction_of(case, asked.checkouts)
        if "said" in found:
            kept[case.id] = {
                "fingerprint": prints[case.id], **own, "commit": commit(), "date": date.today().isoformat(), **found,
            }  # fmt: skip
            row = next(row for row in keep()["cases"] if row["id"] == case.id)
            summary = "; ".join(map(line_of, row["figures"]))
        else:
            summary = states[case.id] = found["why"]
        say(f"[{number}/{len(todo)}] {case.id}: {summary}, {time.monotonic() - started:.0f} s")
    print(json.dumps(keep()["summary"], indent=1))
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

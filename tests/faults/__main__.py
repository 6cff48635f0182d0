"""python -m tests.faults [--tier suite|pr|nightly] [--only NAME …] [--seed N] [--out FILE]: a table, and JSON."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import report, show
from tests.faults import (
    data_flips,
    experiments,
    hostile_configs,
    hostile_payloads,
    inputs,
    ranks,
    stopped_ranks,
    supervised,
)

MODULES = (experiments, inputs, hostile_configs, hostile_payloads, data_flips, supervised, ranks, stopped_ranks)
# How many of each: in the test suite, before a merge (10 minutes of 2 cores), by night.
TIERS = {
    "suite": {
        "kills": 8, "every_call": 8, "sigterm": 2, "full_disk": 12, "bit_flips": 500, "not_finite": 4,
        "fuzzed_configs": 60, "hostile_configs": 40, "data_flips": 100,
    },
    "pr": {
        "kills": 100, "every_call": 400, "sigterm": 20, "full_disk": 50, "bit_flips": 500, "not_finite": 50,
        "out_of_memory": 40, "fuzzed_configs": 1000, "hostile_configs": 1000, "hostile_payloads": 1000, "data_flips": 500,
        "supervised": 10, "killed_ranks": 20, "stopped_ranks": 10,
    },
    "nightly": {
        "kills": 1000, "every_call": 400, "sigterm": 200, "full_disk": 10000, "bit_flips": 10000, "not_finite": 1000,
        "out_of_memory": 430, "fuzzed_configs": 20000, "hostile_configs": 1000, "hostile_payloads": 1000,
        "data_flips": 10000, "supervised": 200, "killed_ranks": 200, "stopped_ranks": 50,
    },
}  # fmt: skip
REPO = Path(__file__).parents[2]
RESULTS = {"pr": REPO / "build" / "faults.json", "nightly": REPO / "benchmarks" / "results" / "faults.json"}


def experiment(name: str) -> Callable[[int, int], dict[str, Any]]:
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def main() -> None:
    """Run a tier; exit code 1 where one experiment did not show what it must."""
    parser = argparse.ArgumentParser(description="Put faults into runs and count what comes of them.")
    parser.add_argument("--tier", choices=TIERS, default="pr")
    parser.add_argument(
        "--only", nargs="*", choices=TIERS["pr"], help="these experiments alone; --out FILE: anew in it"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out",
        type=Path,
        help="where to write the JSON; faults.json, of build/ for pr and of benchmarks/results for nightly",
    )
    words = parser.parse_args()
    words.out = words.out and words.out.absolute()
    found = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.chdir(folder)
        experiments.prepare()
        for name, count in TIERS[words.tier].items():
            if words.only and name not in words.only:
                continue
            before = time.monotonic()
            found[name] = experiment(name)(count, words.seed)
            for left in ("whole", "whole.chain"):
                Path(left).rename(f"{left}.{name}") if Path(left).exists() else None
            found[name] |= {"took_s": round(time.monotonic() - before, 1)}
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
        os.chdir("/")
    if words.only and words.out and words.out.exists():
        found = json.loads(words.out.read_text("utf-8"))["experiments"] | found
    ok = all(counts["ok"] for counts in found.values())
    out = words.out or (None if words.only else RESULTS.get(words.tier))
    rows = [
        [name, "yes" if c["ok"] else "NO", ", ".join(f"{k} {v}" for k, v in c.items() if k != "ok")]
        for name, c in found.items()
    ]
    if out is None:
        print(json.dumps(found))
    else:
        data = {"tier": words.tier, "seed": words.seed, "experiments": found, "ok": ok}
        show(f"Faults, tier {words.tier}", ["fault", "held", "counts"], rows)
        report(out, data)
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()

"""Times of collectives as planned, against nccl-tests runs that others published.

    python benchmarks/collectives_measured.py

The runs and their sources are in published_nccl_tests.csv. Rows `fitted` set shares of links.toml; no constant is from
a row `held out`, and the model is judged by them. They had been seen when the term for filling the pipeline was added,
for the `fitted` ones, with latencies of NCCL's. Rows with a reason in `not_judged` are listed and not judged.
"""

import csv
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, report

from foretrain.hardware.links import links
from foretrain.predict.speed.collectives import Group, bus_factor, collective_time

CASES = Path(__file__).parent / "published_nccl_tests.csv"
MISS = 0.20


def cases() -> list[dict[str, str]]:
    with CASES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def compare(case: dict[str, str]) -> dict[str, Any]:
    known = links()
    group = Group(
        ranks_per_node=int(case["ranks_per_node"]),
        link=known[case["link"]],
        nodes=int(case["nodes"]),
        network=known.get(case["network"]),
        nics_per_node=int(case["nics_per_node"] or 1),
    )
    size_bytes = int(case["size_bytes"])
    time = collective_time(case["collective"], size_bytes, group)  # type: ignore[arg-type]
    worst = collective_time(case["collective"], size_bytes, group.model_copy(update={"worst": True}))  # type: ignore[arg-type]
    factor = bus_factor(case["collective"], group.ranks)  # type: ignore[arg-type]
    measured_s = float(case["time_us"]) * 1e-6 if case["time_us"] else _seconds(case, size_bytes * factor)
    return {
        **{key: case[key] for key in ("id", "half", "not_judged", "collective", "card", "link", "network", "source")},
        "nodes": group.nodes,
        "ranks": group.ranks,
        "size_bytes": size_bytes,
        "measured_s": measured_s,
        "estimated_s": time.seconds,
        "estimated_worst_s": worst.seconds,
        "measured_bus_gb_per_s": size_bytes * factor / measured_s / 1e9,
        "estimated_bus_gb_per_s": time.bus_bytes_per_s / 1e9,
        "way": f"{time.algorithm} {time.protocol}",
        "error": time.seconds / measured_s - 1,
    }


def _seconds(case: dict[str, str], carried_bytes: float) -> float:
    """Return the time of a row that states only its bus bandwidth."""
    return carried_bytes / (float(case["busbw_gb_per_s"]) * 1e9)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return of judged rows, by half and kind: count, median absolute error, misses by over 20%."""
    groups = {
        "held out": lambda row: row["half"] == "held out",
        "held out, NVLink in one machine": lambda row: _held(row) and row["nodes"] == 1 and "pcie" not in row["link"],
        "held out, PCIe in one machine": lambda row: _held(row) and row["nodes"] == 1 and "pcie" in row["link"],
        "held out, several machines": lambda row: _held(row) and row["nodes"] > 1,
        "held out, from 64 MB": lambda row: _held(row) and row["size_bytes"] >= 64e6,
        "held out, below 64 MB": lambda row: _held(row) and row["size_bytes"] < 64e6,
        "fitted": lambda row: row["half"] == "fitted",
    }
    judged = [row for row in rows if not row["not_judged"]]
    found = {}
    for name, within in groups.items():
        errors = [abs(row["error"]) for row in judged if within(row)]
        misses = sum(error > MISS for error in errors)
        found[name] = {"rows": len(errors), "median_abs_error": median(errors), "misses_over_20_percent": misses}
    return found


def _held(row: dict[str, Any]) -> bool:
    return row["half"] == "held out"


def main() -> None:
    rows = [compare(case) for case in cases()]
    report(arguments("collectives_measured", __doc__ or "").out, {"summary": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()

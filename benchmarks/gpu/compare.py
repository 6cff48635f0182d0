"""Predicted against measured: every case of a suite.py file, traced here without a card.

    python benchmarks/gpu/compare.py gpu.json.gz [--out compared.json]

Traces are made with the torch that is installed here, so install the one of the measurement. Printed are signed
errors (+1% is predicted 1% too high) of allocated and reserved peaks and of the process's memory, with medians;
how many are met to the byte with the addresses that traces are replayed with, which fall as under Linux, and with rising
ones (predict/allocator/addresses.py); how often a plan would have promised too little (UNDER: the process took more
than the high end of its range) or refused too much (REFUSED: "does not fit" on a card with a tenth more than the
process took); and, where the allocator's history differs from the trace, the sizes that only one of them has.
"""

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.predict.spec import StepSpec

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import parser_of, report

from foretrain.base.installation import installed_torch
from foretrain.base.units import GIB, MIB
from foretrain.config.checks import launched
from foretrain.hardware.catalogue import match
from foretrain.predict.allocator.blocks import Rising
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import predict
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for
from foretrain.predict.trace.memory import exact
from foretrain.predict.trace.record import Trace


def trace_as_measured(data: dict[str, Any], row: dict[str, Any]) -> None:
    """Use the run's buffer between measurements of kernels in the trace of a compiled step.

    Triton's is 256 MiB. It applies to results from before the suite recorded who measures: torch before 2.13 decides
    that at import, which saw no card (at_once.py).
    """
    older = tuple(int(part) for part in data["versions"]["torch"].split(".")[:2]) < (2, 13)
    benchmarker = row.get("benchmarker") or data.get("benchmarker") or ("TritonBenchmarker" if older else "")
    if benchmarker == "TritonBenchmarker":
        os.environ["TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER"] = "0"
    else:
        os.environ.pop("TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER", None)


def differences(trace: Trace, history: dict[str, Any]) -> list[dict[str, Any]]:
    """Return sizes (in 512-byte blocks) that the card's history has more or less often than the trace, largest sums
    first.
    """
    real: Counter[int] = Counter(-(-size // 512) * 512 for size in history["sizes"] if size > 0)
    ours: Counter[int] = Counter(
        -(-trace.allocations[event].nbytes // 512) * 512 for event in trace.events if event >= 0
    )
    places = {-(-int(size) // 512) * 512: place for size, place in history["places"].items()}
    found = [
        {"size_bytes": size, "only_on_card": real[size] - ours[size], "place": places.get(size, "")}
        for size in real | ours
        if real[size] != ours[size] and size >= 64 * 1024
    ]
    return sorted(found, key=lambda row: -abs(row["size_bytes"] * row["only_on_card"]))[:12]


def compare(row: dict[str, Any], gpu: Any) -> dict[str, Any]:
    """Return one case's errors by phase, the worst of them, and the verdicts."""
    config = launched(row["knobs"])
    estimate = predict(StepSpec.of(config, gpu, row["step"], dtype=row["dtype"], compiled=row["compiled"]))
    traces = service.traces(
        requests_for(StepSpec.of(config, gpu, row["step"], dtype=row["dtype"], compiled=row["compiled"]))
    )
    found = exact(traces, estimate, available_bytes=None)
    measured = row["memory"]
    phases = {p.phase: p for p in found.memory.phases if p.phase in measured["phases"]}
    allocated = max(p["allocated_bytes"] for p in measured["phases"].values())
    reserved = max(p["reserved_bytes"] for p in measured["phases"].values())
    ours = found.memory.worst
    process = measured["process_bytes"]
    shown = max(traces, key=lambda trace: replay(trace).peak_reserved_bytes)
    rising = [peak for peak in replay(shown, addresses=Rising()).phases if peak.phase in measured["phases"]]
    roomy = exact(traces, estimate, available_bytes=round(process * 1.1))
    return {
        "allocated_error": ours.allocated_bytes / allocated - 1,
        "reserved_error": max(p.reserved_bytes or 0 for p in phases.values()) / reserved - 1,
        "allocated_error_rising": max(peak.allocated_bytes for peak in rising) / allocated - 1,
        "reserved_error_rising": max(peak.reserved_bytes for peak in rising) / reserved - 1,
        "ledger_error": estimate.worst.allocated_bytes / allocated - 1,
        "process_error": max(p.needed_expected_bytes for p in phases.values()) / process - 1,
        "measured": {"allocated_bytes": allocated, "reserved_bytes": reserved, "process_bytes": process},
        "phases": {
            name: p.allocated_bytes / measured["phases"][name]["allocated_bytes"] - 1 for name, p in phases.items()
        },
        "context_at_start_bytes": measured.get("context_at_start_bytes"),
        "under": process > max(p.needed_high_bytes for p in phases.values()),
        "refused": roomy.memory.verdict == "does_not_fit",
        "context_bytes": process - measured["reserved_at_end_bytes"],
        "differences": differences(traces[0], measured["history"]),
    }


def main() -> None:
    parser = parser_of(__doc__, "gpu_compared")
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    data = json.loads(gzip.decompress(args.results.read_bytes()))
    machine = data["machine"]
    gpu = match(machine["gpu"], machine["memory_bytes"] / GIB, machine["sm_count"])
    here, there = installed_torch().split("+")[0], data["versions"]["torch"].split("+")[0]
    if here != there:
        print(f"note: measured with torch {there}, traced with {here}; memory differs between versions")
    rows = []
    for row in data["rows"]:
        if not row["memory"].get("phases"):
            print(f"{row['name']} {row['step']}: {row['memory'].get('error', 'not measured')}")
            continue
        trace_as_measured(data, row)
        result = compare(row, gpu)
        rows.append({**{key: row.get(key) for key in ("name", "step", "compiled", "dtype", "knobs", "time")}, **result})
        flags = " ".join(word for word in ("under", "refused") if result[word]).upper()
        errors = (f"{what} {result[f'{what}_error']:+.2%}" for what in ("allocated", "reserved", "process", "ledger"))
        print(f"{row['name']} {row['step']} {row['dtype']}: {', '.join(errors)} {flags}", flush=True)
    summary = {}
    for kind, chosen in (("eager", False), ("compiled", True)):
        errors = [abs(row["allocated_error"]) for row in rows if row["compiled"] == chosen]
        if errors:
            summary[f"allocated_{kind}_median"], summary[f"allocated_{kind}_worst"] = median(errors), max(errors)
    if rows:
        summary["reserved_median"] = median(abs(row["reserved_error"]) for row in rows)
        for what in ("allocated", "reserved"):
            for where in ("", "_rising"):
                exact_ones = sum(row[f"{what}_error{where}"] == 0 for row in rows)
                summary[f"{what}_to_the_byte{where}"] = f"{exact_ones} of {len(rows)}"
        summary["under_estimates"] = sum(row["under"] for row in rows)
        summary["false_refusals"] = sum(row["refused"] for row in rows)
    what = (__doc__ or "").splitlines()[0]
    report(args.out, {"what": what, "measured": {**machine, **data["versions"]}, "summary": summary, "rows": rows})
    for row in rows:
        for found in row["differences"][:3]:
            count, place = found["only_on_card"], found["place"]
            print(f"{row['name']} {row['step']}: {count:+d} × {found['size_bytes'] / MIB:.1f} MiB on the card {place}")


if __name__ == "__main__":
    main()

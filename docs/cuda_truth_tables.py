"""docs/cuda-truth.md: what `make cuda-truth` found, from the JSON that it writes."""

import json
from typing import Any

from results import ROOT

FOLDER = ROOT / "benchmarks" / "results"
MIB = 2**20


def found() -> dict[str, Any]:
    """The large tier's results."""
    return json.loads((FOLDER / "cuda_build_large.json").read_text("utf-8"))


def summary() -> str:
    """A row for each quantity and mode, and a sentence on what they are of."""
    data = found()
    lines = ["| | cases | median | 99 % within | furthest | furthest too low | exact or close |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for mode, s in data["summary"].items():
        cases = s["cases"] - s["failed"]
        close = {
            "allocated": f"{s['allocated_within_0.1_percent']:.1%} within 0.1 %",
            "reserved": f"{s['reserved_to_the_byte']:.1%} to the byte, {s['reserved_within_1_percent']:.1%} within 1 %",
            "estimate_allocated": f"{s['estimate_allocated_within_1_percent']:.1%} within 1 %",
        }
        for what, told in (
            ("allocated", "traced, allocated"),
            ("reserved", "traced, reserved"),
            ("estimate_allocated", "estimated, allocated"),
        ):
            e = s[what]
            lines.append(
                f"| {mode}: {told} | {cases} | {e['median']:.3%} | {e['p99']:.2%} | {e['worst']:+.2%} | "
                f"{min(0.0, e['lowest']):+.2%} | {close[what]} |"
            )
    failed = sum(s["failed"] for s in data["summary"].values())
    told = f"{data['date']}, torch {data['versions']['torch']}, {data['tier']} tier. Failed: {failed}; not run: {data['not_done']}."
    return "\n".join([*lines, "", told])


def large_models() -> str:
    """The same of runs that take a GiB and more, where a buffer of some MiB counts as little as on a real run."""
    lines = [
        "| runs of 1 GiB and more | cases | traced, allocated: median, furthest | traced, reserved: median, furthest | estimated, allocated: median, furthest |"
    ]
    lines.append("| --- | ---: | --- | --- | --- |")
    for mode, compiled in (("eager", False), ("compiled", True)):
        rows = [r for r in found()["rows"] if r["compiled"] == compiled and "error" not in r]
        rows = [r for r in rows if r["allocated_bytes"]["real"] >= 1024 * MIB]
        cells = []
        for what in ("allocated_bytes", "reserved_bytes", "estimate_allocated"):
            errors = sorted((r[what]["error"] for r in rows), key=abs)
            cells.append(f"{abs(errors[len(errors) // 2]):.3%}, {errors[-1]:+.2%}" if errors else "")
        lines.append(f"| {mode} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def edge() -> str:
    """How often "fits" was right near the limit."""
    data = json.loads((FOLDER / "cuda_build_edge.json").read_text("utf-8"))
    s = data["summary"]
    lines = ["| who decides | runs at the limit | decided wrongly | … said to fit, and ran out of memory |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for who, told in (("traced", "the trace"), ("estimated", "the estimate, without its range")):
        lines.append(f"| {told} | {s['pairs']} | {s[who]['wrong']} | {s[who]['said_fits_and_did_not']} |")
    furthest = max(abs(row["from_edge"]) for row in data["rows"])
    told = f"{data['made']}: {s['survived']} survived. No limit lies further than {furthest:.1%} from the edge."
    return "\n".join([*lines, "", told])


PARTS = {"cuda-truth": summary, "cuda-truth-large-models": large_models, "cuda-truth-edge": edge}

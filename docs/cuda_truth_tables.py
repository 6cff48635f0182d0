"""docs/cuda-truth.md: what `make cuda-truth` found, from the JSON that it writes."""

import json
import re
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


KINDS = {
    "grid": "Llama and Qwen3, small: full and LoRA, bf16 and fp32 with autocast, with and without checkpointing, AdamW fused "
    "and not, accumulation 1 and 2",
    "other": "the same: padding, fp16, other optimizers, collected logits, eager attention, …",
    "qlora": "the same: QLoRA",
    "family": "other families, small",
    "full size": "Qwen3 0.6B and Llama 3.2 1B, 1 x 2048",
}  # fmt: skip


def finetuning() -> str:
    """A row for each kind of fine-tuning run: how far trace and estimate lie from what the card counted."""
    data = json.loads((FOLDER / "cuda_build_finetuning.json").read_text("utf-8"))
    lines = [
        "| fine-tuning | runs | traced, allocated | traced, reserved | … of any phase | estimated, allocated | estimated, reserved |"
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, s in data["summary"].items():
        runs = s["cases"] - s["failed"]
        if runs:
            phases = max(s[f"{what}_bytes trace_worst_phase"]["worst"] for what in ("allocated", "reserved"))
            lowest = min(s[f"{what}_bytes trace_worst_phase"]["lowest"] for what in ("allocated", "reserved"))
            traced = (s[f"{what}_bytes trace_error"]["worst"] for what in ("allocated", "reserved"))
            guessed = (s[f"{what}_bytes estimate_error"]["worst"] for what in ("allocated", "reserved"))
            cells = [*(f"{each:+.2%}" for each in traced), f"{max(phases, lowest, key=abs):+.2%}"]
            cells += [f"{each:+.2%}" for each in guessed]
            lines.append(f"| {KINDS[kind]} | {runs} | {' | '.join(cells)} |")
    failed = sum(s["failed"] for s in data["summary"].values())
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if name != "python")
    told = f"{data['date']}, {versions}. Each figure is the furthest. Failed: {failed}; not run: {data['not_done']}."
    return "\n".join([*lines, "", told])


def ranks() -> str:
    """A row for each way to share a step: how far trace and estimate lie from what the card of a rank counted."""
    data = json.loads((FOLDER / "cuda_build_ranks.json").read_text("utf-8"))
    lines = ["| way | ranks | traced, allocated | traced, reserved | … of any phase | estimated, allocated |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    good = [row for row in data["rows"] if "error" not in row]
    way_of = {row["name"]: re.split(r", (?=GPT-2|Llama)", row["name"])[0] for row in good}
    for way in dict.fromkeys(way_of.values()):
        rows = [row for row in good if way_of[row["name"]] == way]
        errors = [[row[f"{what}_bytes"]["error"] for row in rows] for what in ("allocated", "reserved")]
        phases = [row[f"{what}_bytes"]["worst_phase"] for row in rows for what in ("allocated", "reserved")]
        guessed = [row["allocated_bytes"]["estimate_error"] for row in rows]
        furthest = [f"{max(each, key=abs):+.3%}" for each in (*errors, phases, guessed)]
        lines.append(f"| {way} | {len(rows)} | {' | '.join(furthest)} |")
    told = f"{data['date']}, torch {data['versions']['torch']}. Each figure is the furthest. Failed: {data['failed']}."
    return "\n".join([*lines, "", told])


PARTS = {
    "cuda-truth": summary,
    "cuda-truth-large-models": large_models,
    "cuda-truth-edge": edge,
    "cuda-truth-finetuning": finetuning,
    "cuda-truth-ranks": ranks,
}

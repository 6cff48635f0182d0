"""What came of a soak, counted from its files: the run's own records, the faults, and a sample of /proc each second."""

import collections
import json
import statistics
from pathlib import Path
from typing import Any

WARM_UP_S = 300.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def counted(work: Path) -> dict[str, Any]:
    """Every figure of a soak, and `ok`: whether each is as it must be."""
    soak = json.loads((work / "soak.json").read_text())
    faults, wall_s = soak["faults"], soak["wall_s"]
    done = [fault for fault in faults if "not_done" not in fault]
    kinds = dict(collections.Counter(fault["kind"] for fault in done))
    times = _times(work, soak)
    samples = lines_of(work / "samples.jsonl")
    supervisor = [(s["at_s"], s["supervisor"]) for s in samples if s["supervisor"]]
    children = _by_process([(s["at_s"], s["child"]) for s in samples if s["child"]])
    oldest = max(children, key=lambda one: one[-1][0] - one[0][0], default=[])
    events = collections.Counter(event["id"] for event in lines_of(work / "out/events.jsonl"))
    grown = {"supervisor": _grown(supervisor), "child": _grown(oldest)}
    ok = (
        soak["manual_actions"] == 0 and soak["ended"] == 75 and len(done) == len(faults) and times["goodput"] >= 0.9
        and all(g is not None and g["resident_bytes_per_h"] < 1e6 and g["open_files_grown"] == 0 for g in grown.values())
    )  # fmt: skip
    return {
        "ok": ok, "hours": wall_s / 3600, "every_s": soak["every_s"], "faults": len(done), "kinds": kinds,
        "not_done": [fault for fault in faults if "not_done" in fault], "manual_actions": soak["manual_actions"],
        "exit_code": soak["ended"], "processes": len(children), "events": dict(events), **times, "grown": grown,
    }  # fmt: skip


def _times(work: Path, soak: dict[str, Any]) -> dict[str, Any]:
    """Where the time went. Useful: steps, evaluations and the saves' hold on the loop, each counted once, as the run
    itself logged them. The share is of the time in which the run could have worked: without restarts, and without
    the seconds for which a fault held the process itself.
    """
    first, wall_s, faults = soak["first_step"], soak["wall_s"], soak["faults"]
    lines = [line for line in lines_of(work / "out/metrics.jsonl") if line["step"] > first]
    steps = [line for line in lines if line["kind"] == "step"]
    events = lines_of(work / "out/events.jsonl")
    held_s = sum(fault.get("held_s", 0.0) for fault in faults)
    restart_s = sum(fault.get("restart_s", 0.0) for fault in faults)
    step_s = sum(line["step_s"] for line in steps) - held_s
    evaluation_s = sum(line["evaluation_s"] for line in lines if line["kind"] == "evaluation")
    save_s = sum(event["values"].get("save_s", 0.0) for event in events if event["id"] == "saved")
    median_s = statistics.median(line["step_s"] for line in steps) if steps else 0.0
    repeated = sum(fault.get("repeated_steps", 0) for fault in faults)
    useful_s = step_s + evaluation_s + save_s
    could_s = wall_s - restart_s - held_s
    samples = _by_process([(s["at_s"], s["child"]) for s in lines_of(work / "samples.jsonl") if s["child"]])
    return {
        "goodput": useful_s / could_s if could_s > 0 else 0.0, "useful_share_of_wall": useful_s / wall_s,
        "wall_s": wall_s, "useful_s": useful_s, "step_s": step_s, "evaluation_s": evaluation_s, "save_s": save_s,
        "restart_s": restart_s, "held_s": held_s, "repeated_steps": repeated, "repeated_s": repeated * median_s,
        "steps": len(steps), "median_step_s": median_s,
        "useful_cpu_s": sum(line.get("cpu_s", 0.0) for line in steps),
        "cpu_s": sum(one[-1][1]["cpu_s"] for one in samples),
    }  # fmt: skip


def _by_process(samples: list[tuple[float, dict[str, Any]]]) -> list[list[tuple[float, dict[str, Any]]]]:
    found: dict[int, list[tuple[float, dict[str, Any]]]] = {}
    for at_s, sample in samples:
        found.setdefault(sample["pid"], []).append((at_s, sample))
    return list(found.values())


def _grown(samples: list[tuple[float, dict[str, Any]]]) -> dict[str, Any] | None:
    """A process from its first to its last quarter after warm-up: medians, so that a save under way is no growth."""
    samples = [(at, s) for at, s in samples if at - samples[0][0] >= WARM_UP_S]
    if len(samples) < 40:
        return None
    quarter = len(samples) // 4
    early, late = samples[:quarter], samples[-quarter:]
    hours = (statistics.mean(at for at, _ in late) - statistics.mean(at for at, _ in early)) / 3600

    def median(part: list[tuple[float, dict[str, Any]]], key: str) -> float:
        return statistics.median(sample[key] for _, sample in part)

    return {
        "resident_bytes": median(late, "resident_bytes"),
        "resident_bytes_per_h": (median(late, "resident_bytes") - median(early, "resident_bytes")) / hours,
        "open_files": median(late, "open_files"),
        "open_files_grown": median(late, "open_files") - median(early, "open_files"), "lived_h": hours * 4 / 3,
    }  # fmt: skip


def segments(out: Path) -> list[tuple[int, int]]:
    """(first step, micro-batch) of each part of a run, as the steps were done that count: a step that was done again
    after a kill counts as it was done the last time.
    """
    parts, batch = [(0, 8)], 8
    for event in lines_of(out / "events.jsonl"):
        values = event["values"]
        if event["id"] == "split_kept":
            batch = values["batch_size"]
        elif event["id"] == "micro_batch_shrunk":
            batch = values["new"]
            parts = [part for part in parts if part[0] < values["step"]] + [(values["step"], batch)]
        elif event["id"] == "resumed":
            parts = [part for part in parts if part[0] < values["step"]] + [(values["step"], batch)]
    merged: list[tuple[int, int]] = []
    for start, size in parts:
        if not merged or merged[-1][1] != size:
            merged.append((start, size))
    return merged

"""Predicted against the CUDA build's allocator: one case's errors, and what they come to over many."""

import math
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from statistics import median
from typing import Any

from foretrain.base.installation import installed_torch
from foretrain.config.checks import launched
from foretrain.hardware.catalogue import Gpu, match
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import estimated
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for
from foretrain.predict.trace.service import Request

ALLOCATED_LIMIT = 0.001  # beyond these a case is listed
ESTIMATE_LIMIT = 0.01
Row = dict[str, Any]

BYTES = ("allocated_bytes", "reserved_bytes")


def origin(what: str | None, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Where results are from: the first line of a script's docstring, the day, the machine, versions."""
    return {
        "what": (what or "").splitlines()[0], "date": date.today().isoformat(),
        "machine": {"card": "NVIDIA GeForce RTX 4070, without a card", "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), "torch": installed_torch(), **(versions or {})},
    }  # fmt: skip


def card() -> Gpu:
    return match("NVIDIA GeForce RTX 4070", 12281 / 1024, 46)


def requests(case: Any) -> list[Request]:
    """The traces that predict a case; two where only a real card decides how a product is padded."""
    config = launched(case.settings)
    return requests_for(StepSpec.of(config, card(), case.step, dtype=case.dtype, compiled=case.compiled))


def compared(case: Any, measured: dict[str, Any]) -> Row:
    """Bytes and signed errors of a case that was measured; its traces come from the cache."""
    row: Row = {**case._asdict(), "seconds": measured.get("seconds")}
    if "error" in measured:
        return {**row, "error": measured["error"]}
    if measured["branches"]:
        return {**row, "error": f"not a real step: {measured['branches'][0]}", "branches": measured["branches"]}
    found = [replay(trace).phases for trace in service.traces(requests(case))]
    real = {name: phase for name, phase in measured["phases"].items() if name in {p.phase for p in found[0]}}
    row["phases"] = {}
    for what in BYTES:
        highest = max(phase[what] for phase in real.values())
        # Where only a card can say which of two traces is its own, the nearer one is: the fake card's choice is by chance.
        answers = [max(getattr(p, what) for p in phases if p.phase in real) for phases in found]
        predicted = min(answers, key=lambda answer: abs(answer - highest))
        row[what] = {"predicted": predicted, "real": highest, "error": predicted / highest - 1}
        nearest = found[answers.index(predicted)]
        row["phases"][what] = {p.phase: getattr(p, what) / real[p.phase][what] - 1 for p in nearest if p.phase in real}
    return row | estimates(row)


def estimates(row: Row) -> Row:
    c = launched(row["knobs"])
    memory = estimated(StepSpec.of(c, card(), row["step"], dtype=row["dtype"], compiled=row["compiled"])).memory
    phases = [phase for phase in memory.phases if phase.phase in row["phases"]["allocated_bytes"]]
    found = {}
    for what in ("allocated", "reserved"):
        highest = max(getattr(phase, f"{what}_bytes") or 0 for phase in phases)
        found[f"estimate_{what}"] = {"predicted": highest, "error": highest / row[f"{what}_bytes"]["real"] - 1}
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"median": median(sizes), "p99": quantile(sizes, 0.99), "worst": max(errors, key=abs), "lowest": min(errors)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Eager and compiled apart: how many, how far off, how many to the byte."""
    found: dict[str, Any] = {}
    for mode, compiled in (("eager", False), ("compiled", True)):
        mine = [row for row in rows if row["compiled"] == compiled]
        good = [row for row in mine if "error" not in row]
        if not mine:
            continue
        found[mode] = {"cases": len(mine), "failed": len(mine) - len(good)}
        if good:
            reserved = [row["reserved_bytes"]["error"] for row in good]
            found[mode] |= {
                "allocated": spread([row["allocated_bytes"]["error"] for row in good]),
                "allocated_within_0.1_percent": _share(
                    abs(r["allocated_bytes"]["error"]) <= ALLOCATED_LIMIT for r in good
                ),
                "reserved": spread(reserved),
                "reserved_to_the_byte": _share(error == 0 for error in reserved),
                "reserved_within_1_percent": _share(abs(error) <= 0.01 for error in reserved),
                "estimate_allocated": spread([row["estimate_allocated"]["error"] for row in good]),
                "estimate_allocated_within_1_percent": _share(
                    abs(r["estimate_allocated"]["error"]) <= ESTIMATE_LIMIT for r in good
                ),
                "estimate_reserved": spread([row["estimate_reserved"]["error"] for row in good]),
            }
    return found


def _share(wanted: Any) -> float:
    answers = list(wanted)
    return sum(answers) / len(answers)


def off(row: Row) -> float:
    """Return how far a case is off; a failed one further than any other."""
    return math.inf if "error" in row else max(abs(row[what]["error"]) for what in BYTES)


def told(row: Row, key: str = "error") -> str:
    if "error" in row:
        return f"{row['name']}: {row['error'][:110]}"
    return f"{row['name']}: allocated {row['allocated_bytes'][key]:+.3%}, reserved {row['reserved_bytes'][key]:+.3%}"


def table(rows: Sequence[Row]) -> str:
    """Return a line for each case, those that are furthest off last, and how many are met."""
    counts = {mode: {key: found[key] for key in ("cases", "failed")} for mode, found in summary(rows).items()}
    return "\n".join([*map(told, sorted(rows, key=off)), f"{counts}"])

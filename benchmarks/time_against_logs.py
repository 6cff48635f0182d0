"""The uncalibrated time model against step times and training speeds that others published.

    python benchmarks/time_against_logs.py

The runs, their sources and what they leave open are in published_logs.json. Nothing here is measured: it shows what
the stated range of `foretrain plan` is worth on cards that nobody has calibrated. Runs of the origins in `looked_at`
may be looked at when a rule is found; all others are only judged, and no constant is fitted to them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import other_steps
from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.predict.software import ASSUMED, parse
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun
from foretrain.predict.speed.time import Range, range_of, step_time

Case = dict[str, Any]
DOCUMENT = json.loads((Path(__file__).parent / "published_logs.json").read_text("utf-8"))
LOOKED_AT = frozenset(DOCUMENT["looked_at"])

# Which runs a line of the summary counts. Doubtful records count in the first and the last line only.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "looked at": lambda case: not case["doubtful"] and case["origin"] in LOOKED_AT,
    "only judged": lambda case: not case["doubtful"] and case["origin"] not in LOOKED_AT,
    "nanoGPT-like on GeForce, both": lambda case: not case["doubtful"] and case["kind"] != "other" and _geforce(case),
    "… nanoGPT's step": lambda case: _judged(case, "nanogpt"),
    "… nanoGPT-like, GeForce": lambda case: _judged(case, "nanogpt", "pytorch") and _geforce(case),
    "… nanoGPT-like, data centre": lambda case: _judged(case, "nanogpt", "pytorch") and not _geforce(case),
    "… other programs": lambda case: _judged(case, "other"),
    "… torch before 2.2": lambda case: _judged(case) and _old(case),
    "… torch from 2.2 on": lambda case: _judged(case) and case["torch"] != "" and not _old(case),
    "… torch not stated": lambda case: _judged(case) and case["torch"] == "",
    "… compiled": lambda case: _judged(case) and case["compiled"],
    "… eager": lambda case: _judged(case) and not case["compiled"],
    "doubtful": lambda case: bool(case["doubtful"]),
}


def _judged(case: Case, *kinds: str) -> bool:
    return not case["doubtful"] and case["origin"] not in LOOKED_AT and (not kinds or case["kind"] in kinds)


def _geforce(case: Case) -> bool:
    return find(case["gpu"]).is_geforce


def _generation(case: Case) -> str:
    return f"{find(case['gpu']).architecture} {'GeForce' if _geforce(case) else 'boards'}"


def _old(case: Case) -> bool:
    version = parse(case["torch"])
    return version is not None and not version.flash2


def predicted(log: Case, config: RunConfig, gpu: Gpu) -> Range:
    """Return the plan's range for the step, at the source's torch, else at the plan's assumption."""
    torch = parse(log["torch"]) or ASSUMED
    if not log["program"]:
        at = config.model_copy(update={"torch_version": str(torch)})
        found = step_time(StepSpec.of(at, gpu, "nanogpt", dtype=log["dtype"], compiled=log["compiled"]))
        assert found
        return found
    way = MicroBatchRun(
        StepSpec.of(config, find("RTX 4070"), "nanogpt", dtype=log["dtype"], compiled=log["compiled"]), True, torch
    )
    return range_of(other_steps.expected_s(log, config, gpu, way), gpu, as_nanogpt=log["kind"] != "other")


def case_of(log: dict[str, Any]) -> Case:
    """Return the record with its prediction. An error is of the step time: positive is predicted too slow."""
    config = resolve([f"--{key}={value}" for key, value in log["config"].items()]).config
    gpu = find(log["gpu"])
    found = predicted(log, config, gpu)
    logged_s = config.tokens_per_step / log["tokens_per_s"]
    shape = ModelShape.of(config)
    return {
        **log,
        "n_params": shape.n_params,
        "predicted": found.model_dump(),
        "logged_s": logged_s,
        "error": found.expected_s / logged_s - 1,
        "inside": found.low_s <= logged_s <= found.high_s,
        "mfu": log["tokens_per_s"] * shape.flops_per_token / (gpu.peak_flop_per_s(log["dtype"]) or 1),
    }


def group_of(name: str, cases: list[Case]) -> dict[str, Any]:
    errors = [case["error"] for case in cases]
    worst = max(cases, key=lambda case: abs(case["error"]))
    return {
        "group": name,
        "runs": len(cases),
        "median_abs_error": median(map(abs, errors)),
        "median_error": median(errors),
        "worst_abs_error": abs(worst["error"]),
        "worst": worst["id"],
        "inside": sum(case["inside"] for case in cases),
        "narrowest": min(case["predicted"]["high_s"] / case["predicted"]["expected_s"] for case in cases),
        "widest": max(case["predicted"]["high_s"] / case["predicted"]["expected_s"] for case in cases),
    }


def main() -> None:
    options = arguments("time_against_logs", __doc__ or "")
    order = list(catalogue())
    cases = sorted(
        map(case_of, DOCUMENT["logs"]), key=lambda case: (order.index(case["gpu"]), case["kind"], case["id"])
    )
    members = {name: [case for case in cases if belongs(case)] for name, belongs in GROUPS.items()}
    for side in ("looked at", "only judged"):
        for name in dict.fromkeys(map(_generation, cases)):
            members[f"{side}, {name}"] = [case for case in members[side] if _generation(case) == name]
    members |= {f"by {origin}": [case for case in cases if case["origin"] == origin] for origin in _origins(cases)}
    groups = [group_of(name, found) for name, found in members.items() if found]
    data = {"what": (__doc__ or "").splitlines()[0], "looked_at": sorted(LOOKED_AT), "groups": groups}
    report(options.out, {**data, "left_out": DOCUMENT["left_out"], "cases": cases})


def _origins(cases: list[Case]) -> list[str]:
    count = {case["origin"]: 0 for case in cases}
    for case in cases:
        count[case["origin"]] += 1
    return sorted(count, key=lambda origin: (-count[origin], origin))


if __name__ == "__main__":
    main()

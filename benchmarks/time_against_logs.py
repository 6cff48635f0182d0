"""The uncalibrated time model against training speeds that others published.

    python benchmarks/time_against_logs.py

The runs, their sources and what they leave open are in published_logs.json. Nothing here is measured: it shows what
the stated range of `foretrain plan` is worth on cards that nobody has calibrated.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, report, show

from foretrain.configfile import resolve
from foretrain.hardware import catalogue, find
from foretrain.lm.shape import ModelShape
from foretrain.predict.time import step_time

Case = dict[str, Any]

# Which runs a line of the summary counts. Doubtful records count in the first and the last line only.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "nanoGPT's step": lambda case: _sound(case, "nanogpt"),
    "… GeForce": lambda case: _sound(case, "nanogpt") and _geforce(case),
    "… data centre": lambda case: _sound(case, "nanogpt") and not _geforce(case),
    "… eager": lambda case: _sound(case, "nanogpt") and not case["compiled"],
    "other PyTorch steps": lambda case: _sound(case, "pytorch"),
    "other software": lambda case: _sound(case, "other"),
    "every kind, GeForce": lambda case: _sound(case) and _geforce(case),
    "every kind, data centre": lambda case: _sound(case) and not _geforce(case),
    "every kind, flash, vocabulary 50,257": lambda case: (
        _sound(case) and case["config"]["vocab_size"] == 50257 and case["attention"] == "flash"
    ),
    "every kind, below 50M parameters": lambda case: _sound(case) and case["n_params"] < 50e6,
    "every kind, above 300M parameters": lambda case: _sound(case) and case["n_params"] > 300e6,
    "doubtful": lambda case: bool(case["doubtful"]),
}


def _sound(case: Case, kind: str = "") -> bool:
    return not case["doubtful"] and kind in ("", case["kind"])


def _geforce(case: Case) -> bool:
    return case["gpu"].startswith("RTX")


def case_of(log: dict[str, Any]) -> Case:
    """The record with what the model says of it. An error is of the step time: positive is predicted too slow."""
    config = resolve([f"--{key}={value}" for key, value in log["config"].items()]).config
    gpu = find(log["gpu"])
    predicted = step_time(config, gpu, log["dtype"], "nanogpt", compiled=log["compiled"])
    assert predicted
    logged_s = config.tokens_per_step / log["tokens_per_s"]
    shape = ModelShape.of(config)
    return {
        **log,
        "n_params": shape.n_params,
        "predicted": predicted.model_dump(),
        "logged_s": logged_s,
        "error": predicted.expected_s / logged_s - 1,
        "inside": predicted.low_s <= logged_s <= predicted.high_s,
        "mfu": log["tokens_per_s"] * shape.flops_per_token / (gpu.peak_flop_per_s(log["dtype"]) or 1),
    }


def group_of(name: str, cases: list[Case]) -> dict[str, Any]:
    errors = [case["error"] for case in cases]
    return {
        "group": name,
        "runs": len(cases),
        "median_abs_error": median(map(abs, errors)),
        "median_error": median(errors),
        "worst_abs_error": max(map(abs, errors)),
        "inside": sum(case["inside"] for case in cases),
    }


def main() -> None:
    options = arguments("time_against_logs", __doc__ or "")
    logs = json.loads((Path(__file__).parent / "published_logs.json").read_text("utf-8"))["logs"]
    order = list(catalogue())
    cases = sorted(map(case_of, logs), key=lambda case: (order.index(case["gpu"]), case["kind"], case["id"]))
    members = {name: [case for case in cases if belongs(case)] for name, belongs in GROUPS.items()}
    groups = [group_of(name, found) for name, found in members.items() if found]
    show(
        "Groups of published runs",
        ["group", "runs", "median |error|", "median error", "worst", "in range"],
        [
            [g["group"], str(g["runs"]), f"{g['median_abs_error']:.1%}", f"{g['median_error']:+.1%}",
             f"{g['worst_abs_error']:.1%}", f"{g['inside']} of {g['runs']}"]
            for g in groups
        ],
    )  # fmt: skip
    report(
        options.out,
        "Time model against published runs",
        ["card", "run", "kind", "mode", "logged tok/s", "predicted tok/s", "step time", "in range", "MFU of the card"],
        [
            [case["gpu"], case["id"] + (" ?" if case["doubtful"] else ""), case["kind"],
             "compiled" if case["compiled"] else "eager", f"{case['tokens_per_s']:,.0f}",
             f"{case['tokens_per_s'] / (1 + case['error']):,.0f}", f"{case['error']:+.1%}",
             "yes" if case["inside"] else "no", f"{case['mfu']:.0%}"]
            for case in cases
        ],
        {"what": (__doc__ or "").splitlines()[0], "groups": groups, "cases": cases},
    )  # fmt: skip


if __name__ == "__main__":
    main()

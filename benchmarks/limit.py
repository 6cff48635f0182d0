"""How near training steps come to what this machine can do: nanoGPT's and foretrain's, against a limit of measured peaks.

    python benchmarks/limit.py                        (all three models: some ten minutes on two cores)
    python benchmarks/limit.py --only 6x384
    python benchmarks/limit.py --cards                (only the cards, from recorded calibrations: no measurement)

The contestants train in alternating blocks, as in against_nanogpt.py, and then some steps each under torch.profiler,
whose operations are grouped as the limit's. The peaks are measured before and after; of both the better counts. A
group that was quicker than its limit would mean that a peak was badly measured: such groups are named in the result.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against_nanogpt import MODELS, RECIPE, TINY, Entry, Model, alternate, entries, machine, results
from common import RESULTS, parser_of, versions
from step_operations import StepOperations, profiled, show_compiled_kernels

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.data.builtin import prepare_built_in
from foretrain.hardware.calibration import Calibration, Peaks, best_of
from foretrain.hardware.catalogue import Dtype, find
from foretrain.hardware.cpu import usable_cores
from foretrain.measure import calibrate, peaks, timer
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import GROUPS, StepLimit, limit_of, peaks_of
from foretrain.training import starting
from foretrain.training.device import Placement, keep_memory, place
from foretrain.training.starting import Chosen

# Compiled it is not faster there (against_nanogpt.py).
SKIP = {"6x384": "nanoGPT compiled", "124M": "nanoGPT compiled"}
ROUNDS = {"4x128": 8, "6x384": 5, "124M": 2}
PROFILED_STEPS = {"4x128": 10, "6x384": 3, "124M": 1}


def measured_peaks(placement: Placement) -> Peaks:
    """Measure this device's peaks in its calibrated dtypes."""
    dtypes = calibrate.usual_dtypes(placement.device, quick=False)
    return peaks.measure(placement.device, dtypes, timer.timer(placement.device))


def tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def shares(row: dict[str, Any], found: StepOperations, limits: dict[str, StepLimit]) -> dict[str, Any]:
    """Return a contestant's step as shares of its limits, and its groups beside theirs."""
    own, step_s = limits[row["dtype"]], row["step_s"]
    best = min(limits.values(), key=lambda limit: limit.limit_s)
    at_limit = {group.group: group.limit_s for group in own.groups}
    return {
        "share": own.limit_s / step_s, "share_of_machine": best.limit_s / step_s, "limit_s": own.limit_s,
        "groups": [
            {"group": group, "limit_s": at_limit[group], "measured_s": found.groups.get(group, 0.0)} for group in GROUPS
        ],
        "rest_s": found.rest_s(step_s),
        "quicker_than_limit": [group for group in GROUPS if 0 < found.groups.get(group, 0.0) < at_limit[group]],
        "profile": asdict(found),
    }  # fmt: skip


def as_trained(config: RunConfig, placement: Placement, row: dict[str, Any]) -> bool:
    """Return whether `foretrain train` would run it so. Short runs are not compiled."""
    return row["name"] == "foretrain" and row["compiled"] == (
        starting.spared_compiling(Chosen(config, placement), set()).placement.compiled
    )


def one_model(model: Model, end: float) -> dict[str, Any]:
    config = RunConfig.model_validate({**RECIPE, **model.settings, "device": "cpu"})
    placement, info = place(config), prepare_built_in(config)
    long = config.model_copy(update={"max_iters": 10**7})  # so that foretrain measures its choices
    tell(f"{model.name}: peaks")
    before = measured_peaks(placement)
    all = [
        entry for entry in entries(long, placement, info, patched=False) if SKIP.get(model.name, "-") not in entry.label
    ]
    torch.set_num_threads(usable_cores())
    tell(", ".join(entry.label for entry in all))
    alternate(all, replace(model, rounds=ROUNDS.get(model.name, model.rounds)), usable_cores(), end)
    shapes = [parameter.shape for parameter in ModelShape.of(config).parameters()]
    tell("; ".join(f"{entry.label} {entry.first_s:.0f} s, {entry.block_s}" for entry in all))
    profiles = [_profiled(entry, PROFILED_STEPS.get(model.name, 2), shapes) for entry in all]
    found = best_of(before, measured_peaks(placement))
    dtypes: Any = found.dtypes
    limits = {dtype: limit for dtype in dtypes if (limit := _limit(config, placement, dtype, found))}
    rows = []
    for row, profile in zip(results(all, config, placement), profiles, strict=True):
        del row["losses"]
        if "step_s" in row:
            row |= shares(row, profile, limits) | {"as_trained": as_trained(config, placement, row)}
        rows.append(row)
    limits_json = {dtype: limit.to_json() for dtype, limit in limits.items()}
    return {"model": model.name, "knobs": model.settings, "threads": usable_cores(), "peaks": found.to_json(),
            "limits": limits_json, "contestants": rows}  # fmt: skip


def _profiled(entry: Entry, steps: int, shapes: list[tuple[int, ...]]) -> StepOperations:
    return profiled(lambda: entry.train(1), steps, shapes)


def _limit(config: RunConfig, placement: Placement, dtype: Dtype, found: Peaks) -> StepLimit | None:
    return limit_of(StepSpec.of(config, placement.gpu, dtype=dtype), found)


def cards() -> list[dict[str, Any]]:
    """Return runs on cards with a recorded calibration, against its limit."""
    speed = json.loads((RESULTS / "gpu_h100_speed.json").read_text("utf-8"))
    gpu = find(speed["gpu"])
    found = peaks_of(Calibration.model_validate(speed["calibration"]))
    timed = [
        row | {"step_s": row["measured"]["step_s"]} for row in speed["rows"] if "step_s" in row.get("measured", {})
    ]
    ways = json.loads((RESULTS / "gpu_h100_ways.json").read_text("utf-8"))
    timed += [
        row | {"step_s": median(block["step_s"] for block in row["blocks"])}
        for row in ways["rows"]
        if row.get("blocks")
    ]
    rows = [_card_row(row, gpu, found) for row in timed]
    return [{"gpu": gpu.name, "date": speed["date"], "peaks": found.to_json(), "rows": rows}]


def _card_row(row: dict[str, Any], gpu: Any, found: Peaks) -> dict[str, Any]:
    """Return one of them; without a limit where the recorded calibration has no peak for it."""
    config = RunConfig.model_validate(row["knobs"])
    limit = limit_of(StepSpec.of(config, gpu, dtype=row["dtype"], compiled=row["compiled"]), found)
    kept = {key: row[key] for key in ("name", "knobs", "dtype", "step", "compiled", "step_s")}
    kept |= {"title": row.get("title", row["name"]), "ratio": row.get("ratio")}  # the first have no nanoGPT beside them
    if limit is None:
        return kept
    groups = [{"group": group.group, "limit_s": group.limit_s} for group in limit.groups]
    return kept | {"limit_s": limit.limit_s, "share": limit.limit_s / row["step_s"], "groups": groups}


def main() -> None:
    parser = parser_of(__doc__, "limit")
    names = [model.name for model in [*MODELS, TINY]]
    parser.add_argument("--only", nargs="+", choices=names, default=names[:-1], help="these models")
    parser.add_argument("--cards", action="store_true", help="only the cards, from recorded calibrations")
    args = parser.parse_args()
    known = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"models": []}
    known["cards"] = cards()
    if not args.cards:
        os.environ["FORETRAIN_CACHE"] = tempfile.mkdtemp()  # foretrain's choices are measured here
        keep_memory()  # as `foretrain train` does; it serves both sides
        show_compiled_kernels()
        for model in (model for model in [*MODELS, TINY] if model.name in args.only):
            found = one_model(model, time.monotonic() + 600)
            found |= {"date": date.today().isoformat(), "machine": machine("cpu"), "versions": versions()}
            known["models"] = [each for each in known["models"] if key(each) != key(found)] + [found]
            keep(args.out, known)
    keep(args.out, known)


def key(found: dict[str, Any]) -> tuple[str, str]:
    return found["machine"]["device"], found["model"]


def keep(path: Path, known: dict[str, Any]) -> None:
    order = [model.name for model in [*MODELS, TINY]]
    known["models"].sort(key=lambda each: (each["machine"]["device"], order.index(each["model"])))
    path.write_text(json.dumps({"what": (__doc__ or "").splitlines()[0], **known}, indent=1) + "\n", "utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

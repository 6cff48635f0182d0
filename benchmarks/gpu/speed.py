"""Seconds and joules of a step on a CUDA card: forecast from the catalogue, forecast after calibration, measured.

    python benchmarks/gpu/speed.py --out speed.json           (under 9 minutes on one card, no network)
    python benchmarks/gpu/speed.py --device cpu --small       (does the script itself work?)

What is compiled is compiled by forks side by side first, so that it lies in the compiler's cache. All forecasts are
made before anything but the calibration is measured, which is of the cases' dtypes alone and has a third of --minutes:
what is not done by then is given up, and no forecast is calibrated. Energy is NVML's counter over the timed steps. What
a case raises is written down, and the script goes on; after --minutes no further case is started: the first cases are
of all kinds.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.predict.spec import StepSpec

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from at_once import error_of, import_compiler, parser_of, run_all
from cases import B1, CHARACTERS, GPT2, A, C, Case
from common import versions

from foretrain.config.checks import launched
from foretrain.config.options import RunConfig
from foretrain.hardware.calibration import Calibration
from foretrain.hardware.catalogue import detect
from foretrain.measure.calibrate import LARGE_REFERENCE, NARROW_REFERENCE, calibrate
from foretrain.measure.timer import Stepper
from foretrain.predict.plan import whole_run
from foretrain.predict.speed.time import compile_time, evaluation_time, step_time
from foretrain.predict.timing import power
from foretrain.training.device import Placement, place

XL = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 4, "gradient_accumulation_steps": 2}
NARROW = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 65, "batch_size": 12}
MODELS = {"124M": GPT2, "4 × 128": NARROW, "A": A, "350M": XL, "characters": CHARACTERS, "C": C, "B1": B1}
CASES = [
    *(Case(name, settings, "bfloat16", "foretrain", compiled) for name, settings in MODELS.items() for compiled in (True, False)),
    *(Case(name, MODELS[name], "float16", "foretrain", False) for name in ("A", "B1", "124M")),
    *(Case(f"124M, batch {b}", {**GPT2, "batch_size": b}, "bfloat16", "foretrain", False) for b in (2, 16)),
    Case("124M, vocabulary 50257", {**GPT2, "vocab_size": 50257}, "bfloat16", "foretrain", False),
    Case("124M, checkpointing", {**GPT2, "activation_checkpointing": True}, "bfloat16", "foretrain", False),
    Case("124M, chunked loss", {**GPT2, "loss_chunk_size": 2048}, "bfloat16", "foretrain", False),
    Case("124M, chunked loss", {**GPT2, "loss_chunk_size": 2048}, "bfloat16", "foretrain", True),
    Case("124M, T 256, batch 32", {**GPT2, "block_size": 256, "batch_size": 32}, "bfloat16", "foretrain", False),
    Case("A, fp32", A, "float32", "foretrain", False),
]  # fmt: skip
SMALL = [Case("small", {**NARROW, "gradient_accumulation_steps": 1}, "float32", "foretrain", False)]
REFERENCES = [
    Case("reference", LARGE_REFERENCE, "bfloat16", "foretrain", True),
    Case("narrow reference", NARROW_REFERENCE, "bfloat16", "foretrain", True),
]
STEPS = 10
ERRORS = ("catalogue_error", "calibrated_error", "energy_error")


def joules(device: torch.device) -> float | None:
    """Return the card's energy since its driver was loaded; None without a counter."""
    if device.type != "cuda":
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)) / 1e3
    except pynvml.NVMLError:
        return None


def forecast(case: Case, gpu: Any) -> dict[str, Any]:
    spec = StepSpec.of(launched(case.settings), gpu, dtype=case.dtype, compiled=case.compiled)  # type: ignore[arg-type]
    found, evaluation = step_time(spec), evaluation_time(spec)
    assert found
    run = whole_run(spec, "estimated", found, evaluation, compile_time(case.compiled))
    watts = power(gpu, run.mfu)
    return {**found.model_dump(), "step_j": watts.expected_w * found.expected_s if watts else None, "mfu": run.mfu}


def measure(case: Case, placement: Placement) -> dict[str, Any]:
    """Return median seconds, and joules per step, without the two that warm up."""
    torch._dynamo.reset()
    config, device = launched(case.settings), placement.device
    try:
        step = Stepper(config, placement, case.dtype, compiled=case.compiled)
        before_j, started = joules(device), time.perf_counter()
        times = step.times(STEPS)
        after_j, took_s = joules(device), time.perf_counter() - started
    except Exception as error:  # one failing case must not cost the others their time on the card
        return error_of(error)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    used = after_j - before_j if after_j is not None and before_j is not None else None
    return {"step_s": median(times), "times_s": times, "power_w": used / took_s if used else None}


def compile_alone(case: Case, device: str) -> dict[str, Any]:
    """Take the first steps in a fork, to fill the compiler's cache."""
    began = time.perf_counter()
    Stepper(launched(case.settings), place(RunConfig(device=device)), case.dtype, compiled=True)
    return {"first_steps_s": time.perf_counter() - began}


def compile_all(cases: list[Case], device: str, deadline: float) -> None:
    """Compile before this process asks for a card, as it could not fork afterwards."""
    import_compiler()
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        f"{case.name} {case.dtype}, compiled": partial(compile_alone, case, device) for case in cases if case.compiled
    }
    run_all(jobs, max(1, (os.cpu_count() or 1) // 2), deadline)


class LateError(Exception):
    pass


def calibration_of(cases: list[Case], placement: Placement, deadline: float) -> Calibration | None:
    """Calibrate the dtypes and modes of these cases, fp32 always; None where the deadline came first."""

    def listen(what: str, share: float) -> None:
        if time.monotonic() > deadline:
            raise LateError(f"{what} at {share:.0%}")

    dtypes, modes = [*dict.fromkeys([case.dtype for case in cases] + ["float32"])], {case.compiled for case in cases}
    try:
        return calibrate(placement, dtypes, sorted(modes), listen)
    except LateError as late:
        print(f"not calibrated: no time left ({late})", file=sys.stderr, flush=True)
        return None


def main() -> None:
    args = parser_of(__doc__, "gpu_speed.json", minutes=8.0).parse_args()
    end, cases = time.monotonic() + args.minutes * 60, SMALL if args.small else CASES
    if not args.small:
        compile_all([*REFERENCES, *cases], args.device, time.monotonic() + args.minutes * 60 / 4)
    placement = place(RunConfig(device=args.device, compile=not args.small))
    calibration = calibration_of(cases, placement, time.monotonic() + args.minutes * 60 / 3)
    gpus = {
        source: placement.gpu.model_copy(update={"calibration": found})
        for source, found in (("catalogue", None), ("calibrated", calibration))
        if source == "catalogue" or found
    }
    rows: list[dict[str, Any]] = [
        {**case._asdict(), **{source: forecast(case, gpu) for source, gpu in gpus.items()}} for case in cases
    ]
    for case, row in zip(cases, rows, strict=True):
        found: dict[str, Any] = {"error": "no time left"}
        if time.monotonic() < end:
            found = measure(case, placement)
        row["measured"] = found
        line = found.get("error", "")
        if not line:
            for source in gpus:
                row[f"{source}_error"] = row[source]["expected_s"] / found["step_s"] - 1
            if found["power_w"] and row["catalogue"]["step_j"]:
                row["energy_error"] = row[list(gpus)[-1]]["step_j"] / (found["power_w"] * found["step_s"]) - 1
            line = f"{found['step_s'] * 1e3:,.1f} ms, " + ", ".join(
                f"{key} {row[key]:+.1%}" for key in ERRORS if key in row
            )
        print(
            f"{case.name} {case.dtype} {'compiled' if case.compiled else 'eager'}: {line}", file=sys.stderr, flush=True
        )
    summary = {}
    for key in ERRORS:
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            summary |= {f"{key}_median": median(errors), f"{key}_worst": max(errors)}
    detected = detect() if placement.device.type == "cuda" else None
    document = {
        "what": (__doc__ or "").splitlines()[0], "date": date.today().isoformat(), "gpu": placement.gpu.name,
        "driver": detected.driver if detected else "", "versions": versions(), "summary": summary,
        "calibration": calibration.model_dump(mode="json") if calibration else None, "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(document) + "\n", "utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

"""Step time on this device after `foretrain calibrate`: predicted against measured, in one run.

    python benchmarks/step_time.py            (about eight minutes; leave the machine idle)
    python benchmarks/step_time.py --eager    (without the compiled half)

Every config is forecast before any is measured. The steps are those of the trainer on random tokens. Each config is
measured in two rounds, one after all others, so that a machine that drifts shows; the quicker quarter of all steps
counts, as it does in the calibration.
"""

import sys
from typing import Any

import torch
from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype
from foretrain.measure.calibrate import calibrate, modes_for, usual_dtypes
from foretrain.measure.timer import Stepper
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.training.device import keep_memory, place

SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "vocab_size": 256, "batch_size": 16}
CASES: list[tuple[str, dict[str, Any], Dtype, bool]] = [
    ("4 × 256, T 128, B 16, V 256", SMALL, "float32", False),
    ("4 × 256, T 128, B 4, V 256", {**SMALL, "batch_size": 4}, "float32", False),
    ("8 × 256, T 128, B 8, V 256", {**SMALL, "n_layer": 8, "batch_size": 8}, "float32", False),
    ("4 × 512, T 256, B 4, V 256", {**SMALL, "n_embd": 512, "n_head": 8, "block_size": 256, "batch_size": 4}, "float32", False),
    ("2 × 256, T 512, B 4, V 256", {**SMALL, "n_layer": 2, "block_size": 512, "batch_size": 4}, "float32", False),
    ("2 × 256, T 128, B 8, V 50304", {**SMALL, "n_layer": 2, "vocab_size": 50304, "batch_size": 8}, "float32", False),
    ("4 × 384, T 256, B 4, V 50304", {**SMALL, "n_embd": 384, "n_head": 6, "block_size": 256, "batch_size": 4, "vocab_size": 50304}, "float32", False),
    ("4 × 256, T 128, B 8 × 3, V 256", {**SMALL, "batch_size": 8, "gradient_accumulation_steps": 3}, "float32", False),
    ("4 × 256, T 128, B 16, V 256", SMALL, "bfloat16", False),
    ("4 × 512, T 256, B 4, V 256", {**SMALL, "n_embd": 512, "n_head": 8, "block_size": 256, "batch_size": 4}, "bfloat16", False),
    ("2 × 256, T 128, B 8, V 50304", {**SMALL, "n_layer": 2, "vocab_size": 50304, "batch_size": 8}, "bfloat16", False),
    ("4 × 256, T 128, B 16, V 256", SMALL, "float32", True),
    ("4 × 512, T 256, B 4, V 256", {**SMALL, "n_embd": 512, "n_head": 8, "block_size": 256, "batch_size": 4}, "float32", True),
    ("2 × 256, T 128, B 8, V 50304", {**SMALL, "n_layer": 2, "vocab_size": 50304, "batch_size": 8}, "float32", True),
    ("4 × 256, T 128, B 16, V 256", SMALL, "bfloat16", True),
]  # fmt: skip
ROUNDS, STEPS = 2, 6


def main() -> None:
    options = arguments("step_time", __doc__ or "", eager="leave out the compiled half")
    keep_memory()  # as the trainer does
    placement = place(RunConfig(compile=not options.eager))
    dtypes = usual_dtypes(placement.device, quick=False)
    modes = [False] if options.eager else modes_for(placement)
    calibration = calibrate(placement, dtypes, modes, lambda what, share: None)
    print(f"calibrated in {calibration.took_s:.0f} s", file=sys.stderr, flush=True)
    gpu = placement.gpu.model_copy(update={"calibration": calibration})
    cases = [case for case in CASES if case[2] in dtypes and case[3] in modes]
    configs = [RunConfig(**{"gradient_accumulation_steps": 1, **knobs}, dropout=0.0) for _, knobs, _, _ in cases]
    forecasts = []
    for config, (_, _, dtype, compiled) in zip(configs, cases, strict=True):
        forecasts.append(step_time(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled)))
    samples: list[list[float]] = [[] for _ in cases]
    for _ in range(ROUNDS):
        for i, (config, (name, _, dtype, compiled)) in enumerate(zip(configs, cases, strict=True)):
            torch._dynamo.reset()
            samples[i] += Stepper(config, placement, dtype, compiled=compiled).times(STEPS)
            print(f"{name} {dtype} {'compiled' if compiled else 'eager'}", file=sys.stderr, flush=True)
    rows, records = [], []
    for (name, knobs, dtype, compiled), forecast, times in zip(cases, forecasts, samples, strict=True):
        assert forecast
        measured_s = sorted(times)[len(times) // 4]
        error = forecast.expected_s / measured_s - 1
        mode = "compiled" if compiled else "eager"
        rows.append(
            [name, dtype, mode, f"{forecast.expected_s * 1e3:,.1f}", f"{measured_s * 1e3:,.1f}", f"{error:+.1%}",
             "yes" if forecast.low_s <= measured_s <= forecast.high_s else "no"]
        )  # fmt: skip
        records.append(
            {"config": name, "knobs": knobs, "dtype": dtype, "mode": mode, "predicted": forecast.model_dump(),
             "measured_s": measured_s, "steps_s": times, "error": error}
        )  # fmt: skip
    errors = sorted(abs(record["error"]) for record in records)
    summary = {"median_abs_error": errors[len(errors) // 2], "worst_abs_error": errors[-1], "configs": len(errors)}
    report(
        options.out,
        "Step time after calibration, predicted against measured",
        ["config", "dtype", "mode", "predicted ms", "measured ms", "error", "in range"],
        rows,
        {"what": (__doc__ or "").splitlines()[0], "device": placement.gpu.name, **summary, "cases": records},
    )
    print(f"median |error| {summary['median_abs_error']:.1%}, worst {summary['worst_abs_error']:.1%}")


if __name__ == "__main__":
    main()

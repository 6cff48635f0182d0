"""Steps on this CPU: as `foretrain calibrate` predicts them, with freed memory kept, and the first of a compiled run.

    python benchmarks/step_time.py                   (after calibration: eight minutes; leave the machine idle)
    python benchmarks/step_time.py --eager           (without the compiled half)
    python benchmarks/step_time.py --kept            (what keeping freed memory in the process does)
    python benchmarks/step_time.py --start           (a cold start of the whole model compiled, and of compile_blocks)

Every config is forecast before any is measured. The steps are those of the trainer on random tokens. Each config is
measured in two rounds, one after all others, so that a machine that drifts shows; the quicker quarter of all steps
counts, as it does in the calibration. With --kept and --start each setting is a process of its own, in turn: glibc is
asked once, and the compiler's caches are empty.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

import torch
from common import RESULTS, arguments, report

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


def calibrated(*, eager: bool) -> dict[str, Any]:
    keep_memory()  # as the trainer does
    placement = place(RunConfig(compile=not eager))
    dtypes = usual_dtypes(placement.device, quick=False)
    modes = [False] if eager else modes_for(placement)
    calibration = calibrate(placement, dtypes, modes, lambda what, share: None)
    print(f"calibrated in {calibration.took_s:.0f} s", file=sys.stderr, flush=True)
    gpu = placement.gpu.model_copy(update={"calibration": calibration})
    cases = [case for case in CASES if case[2] in dtypes and case[3] in modes]
    configs = [RunConfig(**{"gradient_accumulation_steps": 1, **settings}, dropout=0.0) for _, settings, _, _ in cases]
    specs = [StepSpec.of(config, gpu, dtype=c[2], compiled=c[3]) for config, c in zip(configs, cases, strict=True)]
    forecasts = [step_time(spec) for spec in specs]
    samples: list[list[float]] = [[] for _ in cases]
    for _ in range(ROUNDS):
        for i, (config, (name, _, dtype, compiled)) in enumerate(zip(configs, cases, strict=True)):
            torch._dynamo.reset()
            samples[i] += Stepper(config, placement, dtype, compiled=compiled).times(STEPS)
            print(f"{name} {dtype} {'compiled' if compiled else 'eager'}", file=sys.stderr, flush=True)
    records = []
    for (name, settings, dtype, compiled), forecast, times in zip(cases, forecasts, samples, strict=True):
        assert forecast
        measured_s = sorted(times)[len(times) // 4]
        records.append({
            "config": name, "knobs": settings, "dtype": dtype, "mode": "compiled" if compiled else "eager",
            "predicted": forecast.model_dump(), "measured_s": measured_s, "steps_s": times,
            "error": forecast.expected_s / measured_s - 1,
        })  # fmt: skip
    errors = sorted(abs(record["error"]) for record in records)
    summary = {"median_abs_error": errors[len(errors) // 2], "worst_abs_error": errors[-1], "configs": len(errors)}
    return {"device": placement.gpu.name, **summary, "cases": records}


def child(code: str, asked: Any, **environment: str) -> Any:
    """Return what a process of its own prints as JSON."""
    words = [sys.executable, "-c", code, json.dumps(asked)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    return json.loads(done.stdout)


KEPT_CASES = {
    "2 × 256, T 128, B 8, V 50304, fp32": ({"n_layer": 2, "vocab_size": 50304}, "float32"),
    "2 × 256, T 128, B 8, V 50304, bf16": ({"n_layer": 2, "vocab_size": 50304}, "bfloat16"),
    "4 × 256, T 128, B 8, V 256, fp32": ({"n_layer": 4, "vocab_size": 256}, "float32"),
}
KEPT = {
    "n_head": 4,
    "n_embd": 256,
    "block_size": 128,
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "compile": False,
}
KEPT_CODE = """
import json, sys
from foretrain.config.options import RunConfig
from foretrain.measure.timer import Stepper
from foretrain.training.device import keep_memory, place
from foretrain.base.process_memory import peak_bytes
knobs, dtype, keep = json.loads(sys.argv[1])
if keep:
    assert keep_memory(), "this C library does not keep memory"
config = RunConfig(device="cpu", **knobs)
times = Stepper(config, place(config), dtype, compiled=False).times(6)
print(json.dumps([sorted(times)[1], peak_bytes()]))
"""


def kept() -> dict[str, Any]:
    cases = []
    for name, (own, dtype) in KEPT_CASES.items():
        settings = {**KEPT, **own}
        rounds = [[child(KEPT_CODE, [settings, dtype, keep]) for keep in (False, True)] for _ in range(3)]
        given_s, kept_s = (median(each[keep][0] for each in rounds) for keep in (False, True))
        given, held = (max(each[keep][1] or 0 for each in rounds) for keep in (False, True))
        cases.append({
            "config": name, "knobs": settings, "dtype": dtype, "given_back_s": given_s, "kept_s": kept_s,
            "faster": given_s / kept_s, "given_back_peak_bytes": given, "kept_peak_bytes": held,
        })  # fmt: skip
    return {"cases": cases}


START = {
    "n_layer": 12, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 256, "batch_size": 8,
    "gradient_accumulation_steps": 1, "attention": "bmm", "device": "cpu",
}  # fmt: skip
# The first step by the clock, as compilers are programs of their own, the others by CPU time.
START_CODE = """
import json, sys, time
import torch
torch.set_num_threads(1)
import torch._inductor.config as inductor
inductor.force_disable_caches = True
from foretrain.config.options import RunConfig
from foretrain.model.step import build, train_step
config = RunConfig(**json.loads(sys.argv[1]))
state = build(config, torch.device("cpu"), torch.bfloat16, compile=True)
ids = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
def timed(clock):
    began = clock()
    train_step(state, [batch], 1e-4)
    return clock() - began
print(json.dumps([timed(time.perf_counter), sorted(timed(time.process_time) for _ in range(12))[6]]))
"""


def start() -> dict[str, Any]:
    rows = []
    for blocks, name in ((False, "the whole model"), (True, "one block (`compile_blocks`)")):
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                found.append(child(START_CODE, {**START, "compile_blocks": blocks}, TORCHINDUCTOR_CACHE_DIR=folder))
        first_s, step_s = (median(times) for times in zip(*found, strict=True))
        rows.append({"compiled": name, "first_s": first_s, "step_s": step_s})
    return {"knobs": START, "rows": rows}


def main() -> None:
    flags = {
        "eager": "leave out the compiled half",
        "kept": "freed memory kept in the process",
        "start": "a cold start",
    }
    options = arguments("step_time", __doc__ or "", **flags)
    name, made = ("kept_memory", kept()) if options.kept else ("compile_start", start()) if options.start else ("", {})
    out = RESULTS / f"{name}.json" if name and options.out == RESULTS / "step_time.json" else options.out
    report(out, {"what": (__doc__ or "").splitlines()[0], **(made or calibrated(eager=options.eager))})


if __name__ == "__main__":
    main()

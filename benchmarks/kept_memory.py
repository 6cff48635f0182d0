"""What keeping freed memory in the process does for a training step on a CPU (training/host_memory.py).

    python benchmarks/kept_memory.py

Each setting is a child process of its own, as glibc is asked once; settings are run in turn, three rounds. Ratios count.
"""

import json
import subprocess
import sys
from statistics import median

from common import arguments, report

CASES = {
    "2 × 256, T 128, B 8, V 50304, fp32": ({"n_layer": 2, "vocab_size": 50304}, "float32"),
    "2 × 256, T 128, B 8, V 50304, bf16": ({"n_layer": 2, "vocab_size": 50304}, "bfloat16"),
    "4 × 256, T 128, B 8, V 256, fp32": ({"n_layer": 4, "vocab_size": 256}, "float32"),
}
BASE = {
    "n_head": 4,
    "n_embd": 256,
    "block_size": 128,
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "compile": False,
}
ROUNDS = 3
CHILD = """
import json, sys
from foretrain.config.options import RunConfig
from foretrain.measure.timer import Stepper
from foretrain.training.device import place
from foretrain.training.device import keep_memory
from foretrain.base.process_memory import peak_bytes
knobs, dtype, keep = json.loads(sys.argv[1])
if keep:
    assert keep_memory(), "this C library does not keep memory"
config = RunConfig(device="cpu", **knobs)
times = Stepper(config, place(config), dtype, compiled=False).times(6)
print(json.dumps([sorted(times)[1], peak_bytes()]))
"""


def measured(knobs: dict[str, int | bool], dtype: str, keep: bool) -> tuple[float, int]:
    words = [sys.executable, "-c", CHILD, json.dumps([knobs, dtype, keep])]
    return tuple(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    options = arguments("kept_memory", __doc__ or "")
    rows, cases = [], []
    for name, (own, dtype) in CASES.items():
        knobs = {**BASE, **own}
        samples: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for keep in (False, True):
                samples[keep].append(measured(knobs, dtype, keep))
        given_s, kept_s = (median(time_s for time_s, _ in samples[keep]) for keep in (False, True))
        given, kept = (max(size or 0 for _, size in samples[keep]) for keep in (False, True))
        rows.append(
            [name, f"{given_s * 1e3:,.0f}", f"{kept_s * 1e3:,.0f}", f"{given_s / kept_s:.2f}", f"{kept / given:.2f}"]
        )
        cases.append(
            {"config": name, "knobs": knobs, "dtype": dtype, "given_back_s": given_s, "kept_s": kept_s,
             "faster": given_s / kept_s, "given_back_peak_bytes": given, "kept_peak_bytes": kept}
        )  # fmt: skip
    columns = ["config", "given back ms", "kept ms", "times as fast", "process's peak"]
    report(
        options.out,
        "Freed memory kept in the process",
        columns,
        rows,
        {"what": (__doc__ or "").splitlines()[0], "cases": cases},
    )


if __name__ == "__main__":
    main()

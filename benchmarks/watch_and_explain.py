"""The cost of `foretrain watch` to its command, and `foretrain explain` on a real run on a CPU.

python benchmarks/watch_and_explain.py

A script that computes for some seconds and prints ten steps per second runs alone and watched, in turn; its own clock
is read, so that starting foretrain does not count. Then a small model is trained and the run explained.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import arguments, console, report

PAIRS = 6
FORETRAIN = [sys.executable, "-c", "from foretrain.cli import main; main()"]
SCRIPT = """
import time
began = time.perf_counter()
total = 0
for step in range(40):
    for i in range(1_200_000):
        total += i * step
    print(f"iter {step}: loss {4 - step / 50:.4f}, time 100.00ms, mfu 1.00%", flush=True)
print("took", time.perf_counter() - began)
"""
TRAIN = [
    "train", "--dataset=python-stdlib", "--vocab_size=256", "--n_layer=4", "--n_head=4", "--n_embd=128",
    "--block_size=128", "--batch_size=16", "--gradient_accumulation_steps=2", "--max_iters=60", "--lr_decay_iters=60",
    "--warmup_iters=5", "--eval_interval=20", "--eval_iters=8", "--log_interval=1", "--device=cpu", "--dtype=float32",
    "--compile=false", "--out_dir=out-small", "--cpu_threads=1", "--quiet",
]  # fmt: skip


def seconds(words: list[str], folder: Path) -> float:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return float(done.stdout.rpartition("took ")[2])


def main() -> None:
    options = arguments("watch_and_explain", __doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        plain = [sys.executable, "train.py"]
        watched = [*FORETRAIN, "watch", "--quiet", "--", *plain]
        pairs = [(seconds(plain, folder), seconds(watched, folder)) for _ in range(PAIRS)]
        records = [json.loads(path.read_text()) for path in folder.glob("watch*/run.json")]
        per_sample_s = median(r["sampling_s"] / r["samples"] for r in records)
        subprocess.run([*FORETRAIN, *TRAIN], cwd=folder, check=True)
        shown = console(["explain", "out-small"], folder)
    overhead = median(b / a for a, b in pairs) - 1
    spread = max(a for a, _ in pairs) / min(a for a, _ in pairs) - 1
    data = {"pairs_s": pairs, "median_overhead": overhead, "spread_alone": spread, "sample_s": per_sample_s}
    report(options.out, {**data, "console": shown})


if __name__ == "__main__":
    main()

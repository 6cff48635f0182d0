"""The demo from beginning to end: time, loss, and how far the forecast was off.

    python benchmarks/demo.py

Runs `foretrain demo --json` in an empty directory and keeps what the README quotes.
"""

import json
import subprocess
import sys
import tempfile
import time

from common import arguments, report


def main() -> None:
    options = arguments("demo", __doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        before = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", "from foretrain.cli import main; main()", "demo", "--json"],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        wall_s = time.perf_counter() - before
    found = json.loads(result.stdout)
    run, comparison = found["run"], found["comparison"]
    rows = []
    for row in (*comparison["memory"], *comparison["time"]):
        unit, scale = ("MiB", 2**20) if row["kind"] == "bytes" else ("s", 1)
        error = row["predicted"] / row["measured"] - 1
        rows.append(
            [
                row["id"],
                f"{row['predicted'] / scale:.3f} {unit}",
                f"{row['measured'] / scale:.3f} {unit}",
                f"{error:+.2%}",
            ]
        )
    keys = ("steps_done", "first_val_loss", "val_loss", "step_s", "tokens_per_s", "mfu", "n_params", "wall_s")
    data = {
        "what": (__doc__ or "").splitlines()[0], "wall_s": wall_s, "unigram_entropy": found["unigram_entropy"],
        "run": {key: run[key] for key in keys}, "comparison": comparison,
    }  # fmt: skip
    report(options.out, "foretrain demo", ["quantity", "predicted", "measured", "error"], rows, data)
    print(f"{wall_s:.0f} s in all; validation loss {run['first_val_loss']:.3f} -> {run['val_loss']:.3f} nats a byte")


if __name__ == "__main__":
    main()

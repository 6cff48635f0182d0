"""The demo from beginning to end: time, loss, and how far the forecast was off.

    python benchmarks/demo.py

Runs `foretrain demo --json` in an empty directory and keeps what the README quotes.
"""

import json
import tempfile
import time

from common import arguments, console, report


def main() -> None:
    options = arguments("demo", __doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        before = time.perf_counter()
        found = json.loads(console(["demo", "--json"], folder))
        wall_s = time.perf_counter() - before
    run, comparison = found["run"], found["comparison"]
    keys = ("steps_done", "first_val_loss", "val_loss", "step_s", "tokens_per_s", "mfu", "n_params", "wall_s")
    data = {
        "what": (__doc__ or "").splitlines()[0], "wall_s": wall_s, "unigram_entropy": found["unigram_entropy"],
        "run": {key: run[key] for key in keys}, "comparison": comparison,
    }  # fmt: skip
    report(options.out, data)


if __name__ == "__main__":
    main()

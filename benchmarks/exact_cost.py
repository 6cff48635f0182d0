"""What an exact plan costs: seconds cold and cached, and the memory of the process that traces.

    python benchmarks/exact_cost.py

Whole processes, from start to end, each with an empty cache first and with a full one then. Both foretrain's and
nanoGPT's steps are traced, side by side.
"""

import os
import subprocess
import sys
import tempfile
import time

from common import arguments, report

from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace.service import Request, traces

FORETRAIN = "from foretrain.cli import main; main()"
PLANS = {
    "124M eager": ["gpt2-124m", "--compile=false"],
    "124M eager, batch 64": ["gpt2-124m", "--compile=false", "--batch_size=64"],
    "124M compiled": ["gpt2-124m"],
    "1558M eager": ["gpt2-1558m", "--compile=false"],
    "case A compiled": ["examples/real-cases/a.py"],
}


def seconds(words: list[str], cache: str) -> float:
    before = time.perf_counter()
    command = [sys.executable, "-c", FORETRAIN, "plan", *words, "--gpu", "4070", "--exact", "--json"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "FORETRAIN_CACHE": cache})
    return time.perf_counter() - before


def main() -> None:
    options = arguments("exact_cost", __doc__ or "")
    rows, table = [], []
    for name, words in PLANS.items():
        with tempfile.TemporaryDirectory() as cache:
            cold, cached = seconds(words, cache), min(seconds(words, cache) for _ in range(3))
        rows.append({"plan": name, "cold_s": cold, "cached_s": cached})
        table.append([name, f"{cold:.1f}", f"{cached:.2f}"])
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FORETRAIN_CACHE"] = cache
        memory = {}
        for mode in ("eager", "compiled"):
            request = Request(
                StepSpec.of(RunConfig(), find("RTX 4070"), "nanogpt", dtype="bfloat16", compiled=mode == "compiled")
            )
            memory[mode] = traces([request])[0].facts["peak_rss_bytes"]
    data = {"what": (__doc__ or "").splitlines()[0], "rows": rows, "worker_peak_rss_bytes": memory}
    report(options.out, "plan --exact (both steps)", ["plan", "cold s", "cached s"], table, data)
    print("peak RSS of a worker: " + ", ".join(f"{mode} {size / MIB:.0f} MiB" for mode, size in memory.items()))


if __name__ == "__main__":
    main()

"""How long the commands that need no torch take, from the process's start to its end.

    python benchmarks/startup.py

Each is run ten times in turn with `python -c pass` and with `import torch`, with an empty cache; minimum and median are
given.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from common import arguments, report

RUNS = 10
FORETRAIN = "from foretrain.cli import main; main()"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "foretrain --help": ["-c", FORETRAIN, "--help"],
    "foretrain plan --help": ["-c", FORETRAIN, "plan", "--help"],
    "foretrain plan gpt2-124m --gpu 4070": ["-c", FORETRAIN, "plan", "gpt2-124m", "--gpu", "4070"],
    "foretrain plan gpt2-1558m --gpu 3060,4070,4090": [
        "-c",
        FORETRAIN,
        "plan",
        "gpt2-1558m",
        "--gpu",
        "3060,4070,4090",
    ],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    options = arguments("startup", __doc__ or "")
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, words in COMMANDS.items():
            with tempfile.TemporaryDirectory() as empty:
                environment = {**os.environ, "FORETRAIN_CACHE": empty}
                before = time.perf_counter()
                subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True, env=environment)
                times[name].append(time.perf_counter() - before)
    trace = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMANDS["foretrain plan gpt2-124m --gpu 4070"]],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    imported = {
        line.split("|")[-1].strip().split(".")[0] for line in trace.splitlines() if line.startswith("import time")
    }
    heavy = sorted({"torch", "numpy", "safetensors", "tokenizers"} & imported)
    rows = [[name, f"{min(t):.3f}", f"{median(t):.3f}"] for name, t in times.items()]
    data = {"what": (__doc__ or "").splitlines()[0], "seconds": times, "heavy_imports_of_plan": heavy}
    report(options.out, "Start-up", ["command", "min s", "median s"], rows, data)
    print(f"heavy packages imported by plan (python -X importtime): {heavy or 'none'}")


if __name__ == "__main__":
    main()

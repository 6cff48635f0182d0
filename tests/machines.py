"""The suite on made-up machines: `python -m tests.machines [-c CONDITION] … [pytest's own words]`, or `make test-machines`.

Every test sees the CPU of tests/data/machines, not the one it runs on (conftest.py), so its result cannot depend on
where it runs. This runs the tests once for each of these machines; then on one core, and beside eight busy processes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

REPO = Path(__file__).parent.parent
FILES = {path.stem: path for path in sorted((Path(__file__).parent / "data" / "machines").glob("*.json"))}
USUAL = "intel"
VARIABLE = "FORETRAIN_TEST_MACHINE"

# What else makes PyTorch compute as on an older CPU: its own kernels, oneDNN's and MKL's.
OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ARITHMETIC = {"intel": OLDER, "arm": OLDEST}
BUSY = 8


@contextmanager
def busy() -> Iterator[None]:
    """Other programs that want the processor all the time."""
    with ExitStack() as stack:
        for _ in range(BUSY):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def run(condition: str, words: list[str]) -> int:
    made_up = FILES.get(condition, FILES[USUAL])
    command = [sys.executable, "-m", "pytest", "-m", "not gpu and (long or not slow)", *words]  # the last -m counts
    environment = {**os.environ, VARIABLE: str(made_up), **ARITHMETIC.get(condition, {})}
    # Inductor keeps C++ for the instructions of the machine that it was made on.
    environment["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix=f"inductor-{condition}-")
    one_core = (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})) if condition == "one-core" else None
    with ExitStack() as stack:
        if condition == "load":
            stack.enter_context(busy())
        return subprocess.run(command, cwd=REPO, env=environment, preexec_fn=one_core, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    conditions = [*FILES, "one-core", "load"]
    parser.add_argument(
        "-c", "--condition", action="append", choices=conditions, help="only this one (may be repeated)"
    )
    asked, words = parser.parse_known_args()
    codes = {}
    for condition in asked.condition or conditions:
        print(f"== {condition}", flush=True)  # noqa: T201
        codes[condition] = run(condition, words)
    for condition, code in codes.items():
        print(f"{condition:10} {'passed' if code == 0 else f'FAILED (exit code {code})'}")  # noqa: T201
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The tests of traces with the torch of other environments: what `--python PATH` and `foretrain.trace(python=)` rest on.

    python -m tests.torch_versions PATH …      each an environment's folder or its Python; without any, this one

The tests compare traces with PyTorch's own CPU allocator, op by op, and with what was recorded on cards. pytest and what
else the environment lacks are borrowed from this one, so it needs the same version of Python. Exit code 1 where a test
fails. Left out is what OWN and REFUSED name.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.predict.software import parse
from foretrain.predict.trace import interpreter

REPO = Path(__file__).parent.parent
FILES = ("backward", "any_code", "attention", "values", "subclasses", "streams", "memory_calls")
# What torch before 2.11 is refused: compiled code, and meshes of DTensors.
REFUSED = "compile or compiled or inductor or meta_are_weights or sharded-16 or gathered-16 or its_shards"
# Of this environment: what torch says on stderr, the command line and other libraries that another one may lack, and
# the cuDNN of its wheel.
OWN = "says_nothing_of_its_own or runs_as_a_module or transformers or wheel or H200"
START = """
import os, sys
sys.path += os.environ["FORETRAIN_BORROWED"].split(os.pathsep)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(python: interpreter.Interpreter) -> tuple[Counter[str], list[str]]:
    """How many tests passed, failed, …, and the ids of those that failed. Each file has a process of its own: one that
    computed gradients on a card that is stood in for cannot fork afterwards."""
    counts, failed = Counter[str](), []
    torch = parse(python.torch)
    left_out = OWN if torch is not None and torch >= (2, 11) else f"{OWN} or {REFUSED}"
    options = ["-n", "0", "-p", "no:cacheprovider", "-m", "not gpu and (long or not slow)", "-k", f"not ({left_out})"]
    borrowed = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    environment = {**os.environ, "PYTHONPATH": str(REPO), "FORETRAIN_BORROWED": borrowed, "CUDA_VISIBLE_DEVICES": ""}
    for name in FILES:
        done = subprocess.run(
            [python.path, "-c", START, *options, f"tests/predict/trace/test_{name}.py"],
            cwd=REPO, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        ended = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), lines[-1])
        counts.update({what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", ended.partition(" in ")[0])})
        lost = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
        failed += lost or ([] if done.returncode == 0 else [f"{name}: {ended.strip('= ')}"])
    return counts, failed


def main(paths: list[str]) -> int:
    found = []
    for path in paths or [sys.executable]:
        try:
            found.append(interpreter.find_interpreter(path))
        except UserError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    bad = 0
    for python in found:
        counts, failed = run(python)
        told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        sys.stdout.write("\n  ".join([f"torch {python.torch}: {told}", *failed]) + "\n")
        sys.stdout.flush()
        bad += bool(failed)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

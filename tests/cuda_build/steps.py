"""Peaks and every allocation of the steps in tests/kit/kernel_steps.py, in PyTorch's CUDA build.

    python -m tests.cuda_build.steps [NAME …] [--write]

`--write` keeps them in tests/data/kernel_steps.json, to which the fast suite holds traces of the same code without
the CUDA build. It needs the environment that `make cuda-truth` makes. Each step runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from tests.cuda_build.environment import PYTHON, on_the_card
from tests.cuda_build.grid import REPO

KEPT = REPO / "tests" / "data" / "kernel_steps.json"


def measured(name: str) -> dict[str, Any]:
    """Of a step: peaks in bytes, and what was allocated in its order."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.cuda_build.steps", "--child", name], env=on_the_card(), cwd=REPO, capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the CUDA build failed in {name}: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(name: str) -> None:
    """Runs in the CUDA build."""
    import torch

    from tests.kit.kernel_steps import FLEX, STEPS

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)
    (STEPS | FLEX)[name]()
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    sizes = [each["size"] for each in snapshot["device_traces"][0] if each["action"] == "alloc"]
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(json.dumps({"allocated_bytes": peaks[0], "reserved_bytes": peaks[1], "allocations": sizes}))


def main() -> int:
    from tests.kit.kernel_steps import FLEX, STEPS

    names = [*STEPS, *FLEX]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--write", action="store_true", help=f"keep them in {KEPT.relative_to(REPO)}")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.names[0])
        return 0
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in args.names or names:
        kept[name] = measured(name)
        found = kept[name]
        print(f"{name}: {found['allocated_bytes']:,} allocated, {found['reserved_bytes']:,} reserved", flush=True)
    if args.write:
        rows = [
            f"{json.dumps(name)}: {json.dumps(kept[name], separators=(',', ':'))}" for name in names if name in kept
        ]
        KEPT.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

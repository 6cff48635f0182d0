"""The parent's side of measure.py: one process a job, in a group of its own, killed as a whole whatever happens."""

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from foretrain.base import apart

# A run has the allocator as PyTorch brings it; these change what is measured, and a trace does not know them.
_NOT_PASSED_ON = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING",
    "TORCH_COMPILE_DISABLE",
)  # fmt: skip


class Timeout(Exception):
    """The job took longer than it may."""


class Ended(Exception):
    """The process ended without an answer; its exit code, or the negative number of a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def ask(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The answer to a job (measure.py). Raises Timeout, Ended."""
    with tempfile.TemporaryDirectory(prefix="foretrain-verify-") as folder:
        out = Path(folder) / "answer.json"
        with (Path(folder) / "log").open("wb") as log:
            kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
            process = apart.start(
                "foretrain.verification.measure", env=kept, cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert process.stdin is not None
        try:
            with contextlib.suppress(OSError):  # it has ended; `wait` says so
                process.stdin.write(json.dumps({**job, "out": str(out)}).encode() + b"\n")
                process.stdin.flush()
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise Timeout from None
        finally:
            apart.end(process)
        try:
            found = json.loads(out.read_text("utf-8"))
        except (OSError, ValueError):
            raise Ended(code) from None
        return found

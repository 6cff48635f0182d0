"""Processes that the page starts for work that would make the server large or slow: JSON goes in, lines come out."""

import os
import subprocess
import sys
from pathlib import Path

import foretrain


def start(module: str) -> subprocess.Popen[str]:
    """Python with a module of foretrain, this one's own foretrain, in a process group of its own."""
    source = str(Path(foretrain.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path}, text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip

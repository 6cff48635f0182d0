"""Processes that the page starts for work that would make the server large or slow: JSON goes in, lines come out."""

import subprocess

from foretrain.base import apart


def start(module: str) -> subprocess.Popen[str]:
    """Python with a module of foretrain, this one's own foretrain, in a process group of its own."""
    return apart.start(
        module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    )

"""Which Python traces: this one, or that of the environment that will train (`--python PATH`). No torch here.

PyTorch allocates otherwise from version to version: a trace with torch 2.13 of a run on 2.9 was 28 % off. The other
environment needs torch; what foretrain itself needs (pydantic) is borrowed from here where it lacks that.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import NamedTuple

from foretrain.base import apart
from foretrain.base.errors import UserError
from foretrain.base.installation import installed, installed_torch
from foretrain.predict import software

PROBE_S = 120  # a cold disk is slow; importing torch is not part of it
FINE_TUNING: tuple[str, ...] = (
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "trl",
)  # packages whose code such runs are made of
PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
names = sys.argv[1:]
print(json.dumps({"torch": version("torch"), "python": sys.version_info[:2],
    "packages": [version(name) for name in names], "lacks": u.find_spec("pydantic_core") is None}))
"""
# -c puts the working directory first, which may hold an os.py.
START = """
import sys
sys.path = [path for path in sys.path if path]
import os, runpy
sys.path += filter(None, os.environ["FORETRAIN_BORROWED"].split(os.pathsep))
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


class Interpreter(NamedTuple):
    """A Python that can trace: its path, its version, and that of its torch ('' without). `borrows`: packages that
    foretrain needs come from this environment, after its own. `packages`: versions of FINE_TUNING, where it is not
    this Python."""

    path: str
    python: tuple[int, int]
    torch: str
    borrows: bool = False
    packages: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        """The version of each package of FINE_TUNING, '' where it is not there."""
        if self.path == sys.executable:
            return {name: installed(name) for name in FINE_TUNING}
        return dict.fromkeys(FINE_TUNING, "") | dict(zip(FINE_TUNING, self.packages, strict=False))

    def worker(self, module: str = "foretrain.predict.trace.worker") -> tuple[list[str], dict[str, str]]:
        """The command that starts a module of ours, and the variables that it needs beside the usual ones."""
        if self.path == sys.executable:
            return [self.path, "-P", "-m", module], {"PYTHONPATH": apart.search_path()}
        borrowed = [path for path in sys.path if path.endswith("-packages")] if self.borrows else []
        told = {"PYTHONPATH": apart.SOURCE, "FORETRAIN_BORROWED": os.pathsep.join(borrowed)}
        return [self.path, "-c", START, module], told


_chosen: ContextVar[Interpreter | None] = ContextVar("interpreter", default=None)


def now() -> Interpreter:
    """The one that traces: this one, unless another is in use."""
    return _chosen.get() or Interpreter(sys.executable, sys.version_info[:2], installed_torch())


@contextlib.contextmanager
def using(path: str) -> Iterator[None]:
    """Within it another environment traces; '' is this one. Raises UserError where that cannot be."""
    chosen = found(path) if path else None
    token = _chosen.set(chosen)
    try:
        with software.meant(chosen.torch if chosen else ""):
            yield
    finally:
        _chosen.reset(token)


@cache
def found(path: str) -> Interpreter:
    """The interpreter at a path, or of the environment in a folder. Raises UserError with what is wrong about it."""
    at = Path(path).expanduser()
    if at.is_dir():
        at = at / "bin" / "python"
    at = at.absolute()  # not resolved: an environment's Python is a link out of it
    if not at.exists():
        raise UserError("usage.python_missing", path=path)
    try:
        ask = [at, "-c", PROBE, *FINE_TUNING]
        # -c imports from the working directory first, so that is one in which nothing of the user's lies.
        done = subprocess.run(ask, cwd=at.parent, capture_output=True, text=True, timeout=PROBE_S, check=True)
        told = json.loads(done.stdout)
        major, minor = told["python"]
        version, torch, lacks = (int(major), int(minor)), str(told["torch"]), bool(told["lacks"])
        packages = tuple(str(each) for each in told.get("packages", ()))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, IndexError):
        raise UserError("usage.python_broken", path=path) from None
    if not torch:
        raise UserError("usage.python_without_torch", path=path)
    if lacks and version != sys.version_info[:2]:
        raise UserError("usage.python_needs_pydantic", path=path, python=f"{version[0]}.{version[1]}")
    return Interpreter(str(at), version, torch, borrows=lacks, packages=packages)

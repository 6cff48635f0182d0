"""Which Python traces: this one, or that of the environment that will train (`--python PATH`), as allocations differ
between versions of PyTorch: a trace with 2.13 of a run on 2.9 was 28% off. No torch here."""

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

from foretrain.base import processes
from foretrain.base.errors import UserError
from foretrain.base.installation import installed, installed_torch
from foretrain.base.units import format_bytes
from foretrain.predict import software
from foretrain.predict.software import Software, parse
from foretrain.predict.trace.record import Trace

FUSED_NORM = Software(2, 9)  # on CUDA rms_norm is one kernel from here on
NORM_IN_FP32 = Software(2, 12)  # autocast casts what goes into rms_norm
SAME_SLICE = Software(2, 9)  # x[:] is x itself; before, its backward made another gradient
ERAS = (
    ("torch 2.8 and before", Software(2, 6)),
    ("torch 2.9 to 2.11", FUSED_NORM),
    ("torch 2.12 and later", NORM_IN_FP32),
)


class Norm(NamedTuple):
    first: int
    end: int
    elements: int
    narrow: bool  # its input has 16 bits
    weight: str  # "none", "same" dtype as its input, or "other"
    autocast: bool

    def kept_bytes(self, torch: Software) -> int:
        """Return what it saves for backward beside its input and the result, as seen in traces of each version."""
        if torch >= NORM_IN_FP32 and self.autocast:
            each = 4 if self.narrow else 0  # the input in fp32
        elif torch >= FUSED_NORM:
            each = 8 if self.narrow and self.weight == "other" else 0
        else:
            each = (4 if self.narrow else 0) + (0 if self.weight == "none" else 2 if self.narrow else 4)
        return each * self.elements


def notes(trace: Trace, trains: str = "") -> tuple[str, ...]:
    """Return a sentence with its size for each known difference that the step meets. `trains`: '' is unknown."""
    traced, training = parse(trace.facts.get("torch", "")), parse(trains)
    if traced is None or (training is not None and training == traced):
        return ()
    others = [(f"torch {training}", training)] if training else [era for era in ERAS if _era(era[1]) != _era(traced)]
    found = [sentence for sentence in (_of_norms(trace, traced, others), _of_slices(trace, traced, others)) if sentence]
    if not found:
        return ()
    head = f"traced with torch {trace.facts['torch']}"
    assumed = "" if training else ", which is taken to be the one that trains"
    return tuple(f"{head}{assumed}: {sentence}; python=PATH traces with another torch" for sentence in found)


def _era(torch: Software) -> int:
    return sum(torch >= first for _, first in ERAS)


def _of_norms(trace: Trace, traced: Software, others: list[tuple[str, Software]]) -> str:
    if count := trace.facts.get("compiled_norms", 0):
        other = [name for name, torch in others if (torch >= NORM_IN_FP32) != (traced >= NORM_IN_FP32)]
        more = "less" if traced >= NORM_IN_FP32 else "more"
        results = f"the results of the {count} calls of rms_norm under autocast, and what is made of them, take up to 2"
        return f"{results} bytes of each element {more} with {' and '.join(other)}, where compiled" if other else ""
    norms = [Norm(*each) for each in trace.facts.get("rms_norms", ())]
    if not norms:
        return ""
    at_peak = max(trace.peaks().values(), default=(0, 0))[1]
    alive = {a.id for a in trace.alive_at(at_peak)}
    held = [norm for norm in norms if not alive.isdisjoint(range(norm.first, norm.end))]
    changes = [
        f"about {_signed(more)} with {name}"
        for name, torch in others
        if (more := sum(norm.kept_bytes(torch) - norm.kept_bytes(traced) for norm in held))
    ]
    return f"the {len(held)} calls of rms_norm at the peak keep {' and '.join(changes)}" if changes else ""


def _of_slices(trace: Trace, traced: Software, others: list[tuple[str, Software]]) -> str:
    nbytes = int(trace.facts.get("whole_slices_bytes", 0))
    names = [name for name, torch in others if (torch >= SAME_SLICE) != (traced >= SAME_SLICE)]
    if not nbytes or not names:
        return ""
    more = _signed(nbytes if traced >= SAME_SLICE else -nbytes)
    return f"slices of whole dimensions, such as x[:], take for a moment of backward up to {more} with {names[0]}"


def _signed(nbytes: int) -> str:
    return f"{format_bytes(abs(nbytes))} {'more' if nbytes > 0 else 'less'}"


PROBE_S = 120  # a cold disk is slow; torch is not imported
# packages of whose code such runs are made
FINE_TUNING: tuple[str, ...] = ("transformers", "peft", "accelerate", "bitsandbytes", "trl")
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
    """A Python that can trace: its path, its version, its torch's ('' without). `borrows`: packages from here, after
    its own; `packages`: versions of FINE_TUNING, where it is not this Python."""

    path: str
    python: tuple[int, int]
    torch: str
    borrows: bool = False
    packages: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        if self.path == sys.executable:
            return {name: installed(name) for name in FINE_TUNING}
        return dict.fromkeys(FINE_TUNING, "") | dict(zip(FINE_TUNING, self.packages, strict=False))

    def worker(self, module: str = "foretrain.predict.trace.worker") -> tuple[list[str], dict[str, str]]:
        if self.path == sys.executable:
            return [self.path, "-P", "-m", module], {"PYTHONPATH": processes.search_path()}
        borrowed = [path for path in sys.path if path.endswith("-packages")] if self.borrows else []
        environment = {"PYTHONPATH": processes.SOURCE, "FORETRAIN_BORROWED": os.pathsep.join(borrowed)}
        return [self.path, "-c", START, module], environment


_chosen: ContextVar[Interpreter | None] = ContextVar("interpreter", default=None)


def now() -> Interpreter:
    return _chosen.get() or Interpreter(sys.executable, sys.version_info[:2], installed_torch())


@contextlib.contextmanager
def use_interpreter(path: str) -> Iterator[None]:
    """Let another environment trace within; '' is this one. Raises UserError where that cannot be."""
    chosen = find_interpreter(path) if path else None
    token = _chosen.set(chosen)
    try:
        with software.meant(chosen.torch if chosen else ""):
            yield
    finally:
        _chosen.reset(token)


@cache
def find_interpreter(path: str) -> Interpreter:
    """Return the interpreter at a path, or of the environment in a folder. Raises UserError with its fault."""
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
        answer = json.loads(done.stdout)
        major, minor = answer["python"]
        version, torch, lacks = (int(major), int(minor)), str(answer["torch"]), bool(answer["lacks"])
        packages = tuple(str(each) for each in answer.get("packages", ()))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, IndexError):
        raise UserError("usage.python_broken", path=path) from None
    if not torch:
        raise UserError("usage.python_without_torch", path=path)
    if lacks and version != sys.version_info[:2]:
        raise UserError("usage.python_needs_pydantic", path=path, python=f"{version[0]}.{version[1]}")
    return Interpreter(str(at), version, torch, borrows=lacks, packages=packages)

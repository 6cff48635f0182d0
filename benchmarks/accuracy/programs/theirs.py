"""Helpers of other projects' drivers: imports from a checkout, and stand-ins for what a trace omits."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def use(*folders: Path) -> None:
    sys.path[:0] = [str(folder) for folder in folders]


def stand_in(name: str, **what: Any) -> ModuleType:
    """Stand in for a module that a trace omits: plots, tokenizers, downloads."""
    module = ModuleType(name)
    module.__dict__.update(what)
    if "." in name:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
    return module


class Anything:
    def __getattr__(self, name: str) -> "Anything":
        return self

    def __setitem__(self, key: object, value: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> "Anything":
        return self


def no_plots() -> None:
    plots = Anything()
    stand_in("matplotlib", use=plots)
    stand_in("matplotlib.pyplot", rcParams=plots, subplots=plots, __getattr__=_all_but_own(plots))
    stand_in("matplotlib.ticker", __getattr__=_all_but_own(plots))


def _all_but_own(value: Any) -> Callable[[str], Any]:
    """Return this value for every name but Python's own: torch.compile asks for __file__."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return value

    return get


def load(path: Path, name: str, changes: dict[str, str] | None = None) -> ModuleType:
    """Load a file as a module. `changes`: what to replace in its text; a missing part is an error."""
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    text = path.read_text("utf-8")
    for old, new in (changes or {}).items():
        if old not in text:
            raise ValueError(f"{path}: has no {old!r}: not the commit that was measured")
        text = text.replace(old, new)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def records_nothing() -> None:
    """Turn off recordings of memory: the trace is one already."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history = lambda *args, **kwargs: None
    memory._dump_snapshot = lambda *args, **kwargs: None


def stand_in_version(*packages: str) -> None:
    """Give a version to a package that reads its own and is not installed."""
    import importlib.metadata as metadata

    known = metadata.version
    metadata.version = lambda name: "0" if name in packages else known(name)

"""What this machine has for each command, and what is missing, with the command that cures it."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foretrain.base.errors import UserError
from foretrain.base.installation import cache_folder, installed
from foretrain.base.process_memory import system
from foretrain.base.processes import starts
from foretrain.base.records import Record
from foretrain.base.units import GIB
from foretrain.hardware.card import Cards
from foretrain.hardware.catalogue import match
from foretrain.hardware.cpu import available_memory_bytes, cpu_has_bf16, total_memory_bytes

# {extra: (what it installs, the commands that need it)}
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("torch", "numpy", "safetensors"), "train, tune, sample, verify, calibrate, plan --exact"),
    "hf": (("transformers", "peft", "accelerate", "huggingface-hub"), "plan --exact --method, plan hf:MODEL"),
    "data": (("tokenizers", "tiktoken", "huggingface-hub", "numpy", "pyarrow"), "prepare, data"),
    "serve": (("starlette", "uvicorn"), "serve"),
    "eval": (("lm-eval", "transformers", "accelerate"), "eval --tasks"),
    "export": (("gguf", "huggingface-hub"), "export --to gguf, export --push"),
    "onnx": (("onnx", "onnxscript"), "export --to onnx"),
    "mcp": (("mcp",), "mcp"),
    **{name: ((name,), f"train --report-to {name}") for name in ("tensorboard", "trackio", "wandb")},
}
# {package manager: (command for a C++ compiler, for Python's headers)}
TOOLS = {
    "apt-get": ("sudo apt-get install -y g++", "sudo apt-get install -y python3-dev"),
    "dnf": ("sudo dnf install -y gcc-c++", "sudo dnf install -y python3-devel"),
    "pacman": ("sudo pacman -S gcc", ""),
    "xcode-select": ("xcode-select --install", ""),
}
# CUDA releases that torch is built for, newest first, and the compute capabilities that have kernels there
# (github.com/pytorch/pytorch/issues/172352; until torch 2.10 builds for 12.8 had 7.0, too).
BUILDS = {(13, 0): ((7, 5), (12, 1)), (12, 8): ((7, 5), (12, 1)), (12, 6): ((5, 0), (9, 0))}

NOTES = ("no_card", "no_bf16")  # what is not a fault
LOW_BYTES = 2 * GIB  # of a disk: less holds hardly a checkpoint


class Check(Record):
    """`id`: of what was looked at and how it is. `cure`: a command, or "" where none is needed or known."""

    id: str
    state: Literal["ok", "note", "missing"]
    values: dict[str, Any]
    cure: str = ""


def _check(id: str, cure: str | None = None, **values: Any) -> Check:
    state = "note" if id in NOTES else "ok" if cure is None else "missing"
    return Check(id=id, state=state, values=values, cure=cure or "")


def torch_cuda() -> tuple[int, ...]:
    """Return the CUDA release that the installed torch is built for; () for none. Its file is read, not run."""
    found, text = importlib.util.find_spec("torch"), ""
    with contextlib.suppress(OSError):
        text = (Path(found.origin or "").parent / "version.py").read_text("utf-8") if found else ""
    release = re.search(r"^cuda\b[^=]*= '(\d+)\.(\d+)", text, re.MULTILINE)
    return tuple(map(int, release.groups())) if release else ()


@dataclass(frozen=True)
class Machine:
    """How this machine is asked; tests have one of their own."""

    nvml: Any = None
    version: Callable[[str], str] = installed
    find: Callable[[str], str | None] = shutil.which
    torch_cuda: Callable[[], tuple[int, ...]] = torch_cuda
    starts: Callable[[str], bool] = starts
    name_of: Callable[[int], str] = lambda pid: system().Process(pid).name()
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    memory: Callable[[], tuple[int | None, int]] = lambda: (available_memory_bytes(), total_memory_bytes())
    has_bf16: Callable[[], bool] = cpu_has_bf16
    headers: Path = Path(sysconfig.get_path("include"))


def examine(machine: Machine | None = None) -> list[Check]:
    """Return what was looked at, in the order in which it matters."""
    here = machine or Machine()
    python = {"python": platform.python_version(), "system": platform.platform()}
    with contextlib.closing(Cards(here.nvml)) as cards:
        of_cards = [*_cards(here, cards), *_torch(here, cards), _compiler(here, cards)]
    program = _check("program", version=installed("foretrain"), **python)
    return [program, *of_cards, *_room(here), *_extras(here)]


def _cards(here: Machine, cards: Cards) -> Iterator[Check]:
    if not cards.facts:
        yield _check("no_card", reason=cards.problem or "NVML")
    for card in cards.facts:
        sample, values = cards.one(card.index, ()), {"name": card.name, "driver": card.driver, "index": card.index}
        if card.total_bytes is None or sample is None or sample.used_bytes is None:
            yield _check("card_silent", "nvidia-smi", **values)
            continue
        free, users = card.total_bytes - sample.used_bytes, [_name(here, pid) for pid in cards.users(card.index)]
        yield _check("card_used" if users else "card", total=card.total_bytes, free=free, users=users, **values)
        try:
            match(card.name, card.total_bytes / GIB, cards.sm_count(card.index))
        except UserError:
            yield _check("card_unknown", "", **values)


def _name(here: Machine, pid: int) -> str:
    with contextlib.suppress(Exception):  # of psutil: it ended, or is somebody else's
        return f"{here.name_of(pid)} ({pid})"
    return f"({pid})"


def _torch(here: Machine, cards: Cards) -> Iterator[Check]:
    version, cuda, has = here.version("torch"), here.torch_cuda(), cards.cuda()
    card = cards.facts[0] if cards.facts else None
    capability = cards.capability(card.index) if card else None
    cure = _newest_torch(has, capability) if card else ""
    values = {"version": version, "cuda": "{}.{}".format(*cuda) if cuda else "", "name": card.name if card else "CPU"}
    if not version:
        yield _check("no_torch", "pip install 'foretrain[train]'")
    elif not here.starts("torch"):
        yield _check("torch_broken", "python -c 'import torch'", **values)
    elif not cuda:
        yield _check("torch_blind", cure, **values) if card else _check("torch_cpu", **values)
    elif card and has and has[0] < cuda[0]:
        yield _check("torch_driver", cure, has="{}.{}".format(*has), driver=card.driver, **values)
    elif capability and not _has_kernels(cuda, capability):
        yield _check("torch_kernels", cure, capability="{}.{}".format(*capability), **values)
    else:
        yield _check("torch", **values)
    if capability >= (8, 0) if capability else here.has_bf16():
        yield _check("bf16", **values)
    else:
        yield _check("no_bf16", dtype="float16" if card else "float32", **values)


def _has_kernels(cuda: tuple[int, ...], capability: tuple[int, ...]) -> bool:
    low, high = next((BUILDS[each] for each in BUILDS if cuda >= each), ((0, 0), capability))
    return low <= capability <= high


def _newest_torch(has: tuple[int, ...] | None, capability: tuple[int, ...] | None) -> str:
    """Return the command that installs the newest build which this driver and card run; "" where none does."""
    driven = [each for each in BUILDS if not has or each[0] <= has[0]]
    fits = ["".join(map(str, each)) for each in driven if not capability or _has_kernels(each, capability)]
    return f"pip install uv && uv pip install --reinstall torch --torch-backend=cu{fits[0]}" if fits else ""


def _compiler(here: Machine, cards: Cards) -> Check:
    found = next(filter(None, map(here.find, (os.environ.get("CXX", ""), "g++", "clang++"))), "")
    for_compiler, for_headers = next((TOOLS[each] for each in TOOLS if here.find(each)), ("", ""))
    if not found:
        return _check("no_compiler", for_compiler)
    if not (here.headers / "Python.h").is_file():
        return _check("no_headers", for_headers, path=str(here.headers))
    if cards.facts and here.torch_cuda() and not here.version("triton"):
        return _check("no_triton", "pip install triton")
    return _check("compiler", path=found, triton=here.version("triton") or "–")


def _room(here: Machine) -> Iterator[Check]:
    free, total = here.memory()
    yield _check("memory", free=free, total=total)
    for id, path in (("disk", Path()), ("cache", cache_folder())):
        try:
            existing = next(each for each in (path, *path.absolute().parents) if each.is_dir())
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) if id == "cache" else 0
            values = {"path": str(path.absolute()), "free": here.free_bytes(existing), "size": size}
        except OSError as error:
            yield _check("disk_unread", "", path=str(path), reason=error.strerror or "")
            continue
        bad = "disk_locked" if not os.access(existing, os.W_OK) else "disk_low" if values["free"] < LOW_BYTES else ""
        yield _check(bad, "", **values) if bad else _check(id, **values)


def _extras(here: Machine) -> Iterator[Check]:
    for extra, (packages, commands) in EXTRAS.items():
        absent = [name for name in packages if not here.version(name)]
        cure, values = f"pip install 'foretrain[{extra}]'", {"commands": commands, "packages": absent or list(packages)}
        yield _check("no_extra", cure, **values) if absent else _check("extra", **values)

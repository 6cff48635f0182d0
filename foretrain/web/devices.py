"""The devices that the page can plan for: the catalogue, the card of this machine, and its processor."""

import sys
from functools import cache
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.units import parse_bytes
from foretrain.hardware.catalogue import DetectedGpu, Gpu, catalogue, detect, find
from foretrain.hardware.cpu import available_memory_bytes, cpu_device

HERE, CPU = "auto", "cpu"
NO_MACHINE = sys.platform == "emscripten"  # Python in a browser: what it runs on cannot be seen


@cache
def _card_here() -> DetectedGpu | None:
    """The card of this machine, asked for once; None where there is none, or one that the catalogue lacks."""
    try:
        return detect()
    except UserError:
        return None


@cache
def _cpu_here() -> Gpu:
    return cpu_device()


def listed() -> list[dict[str, Any]]:
    """Every device with what a chooser shows, this machine's first. Memory in bytes, None where unknown."""
    here = None if NO_MACHINE else _card_here()
    rows = [{"id": HERE, "name": here.gpu.name, "memory_bytes": here.memory_bytes, "here": True}] if here else []
    rows += [
        {"id": g.name, "name": g.name, "memory_bytes": g.memory_bytes, "here": False} for g in catalogue().values()
    ]
    if NO_MACHINE:
        return rows
    cpu = _cpu_here()
    return [*rows, {"id": CPU, "name": cpu.name, "memory_bytes": cpu.memory_bytes, "here": True}]


def target(name: str, others: str) -> tuple[Gpu, int]:
    """(device, bytes that others hold there) of what was chosen. Raises UserError.

    Where nothing is said of others, what they hold now is taken on this machine, and nothing elsewhere.
    """
    stated = _size(others) if others.strip() else None
    if NO_MACHINE and name in (HERE, CPU):
        raise UserError("page.no_machine")
    if name == CPU:
        gpu, available = _cpu_here(), available_memory_bytes()
        used = max(0, gpu.memory_bytes - available) if gpu.memory_bytes and available else 0
    elif name == HERE and (here := _card_here()):
        gpu, used = here.gpu, here.used_bytes
    elif name == HERE:
        raise UserError("gpu.none_here", count=len(catalogue()))
    else:
        gpu, used = find(name), 0
    used_by_others_bytes = used if stated is None else stated
    if gpu.memory_bytes is not None and used_by_others_bytes > gpu.memory_bytes:
        raise UserError("gpu.others_beyond", others=used_by_others_bytes, memory=gpu.memory_bytes, gpu=gpu.name)
    return gpu, used_by_others_bytes


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise UserError("page.bad_others", value=text[:40]) from None

"""The devices that the page can plan for: the catalogue, the card of this machine, and its processor."""

import sys
import time
from functools import lru_cache
from typing import Any

from foretrain.app.plan import target_of
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_bytes, read
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import DetectedGpu, catalogue, detect
from foretrain.hardware.cpu import cpu_device
from foretrain.hardware.devices import CPU, HERE, Target

ASKED_EVERY_S = 5.0
NO_MACHINE = sys.platform == "emscripten"  # Python in a browser: what it runs on cannot be seen


@lru_cache(maxsize=2)
def _asked(index: int, moment: int) -> DetectedGpu | None:
    return detect(index)


def _card(index: int = 0) -> DetectedGpu | None:
    """The card of this machine; asked for every few seconds, as sliders ask for plans much faster than a driver
    answers. Raises UserError for one that the catalogue lacks."""
    return _asked(index, int(time.monotonic() / ASKED_EVERY_S))


def _card_here() -> DetectedGpu | None:
    try:
        return _card()
    except UserError:
        return None


def listed() -> list[dict[str, Any]]:
    """Every device with what a chooser shows, this machine's first. Memory in bytes, None where unknown."""
    here = None if NO_MACHINE else _card_here()
    rows = [{"id": HERE, "name": here.gpu.name, "memory_bytes": here.memory_bytes, "here": True}] if here else []
    rows += [
        {"id": g.name, "name": g.name, "memory_bytes": g.memory_bytes, "here": False} for g in catalogue().values()
    ]
    if NO_MACHINE:
        return rows
    cpu = cpu_device()
    return [*rows, {"id": CPU, "name": cpu.name, "memory_bytes": cpu.memory_bytes, "here": True}]


def target(name: str, others: str, config: RunConfig) -> Target:
    """What was chosen, with the memory that other programs use there: as said, else as measured on this machine.

    Raises UserError.
    """
    if NO_MACHINE and name in (HERE, CPU):
        raise UserError("page.no_machine")
    bad = UserError("page.bad_others", value=others[:40])
    return target_of(name, read(parse_bytes, others, bad) if others.strip() else None, config, _card)

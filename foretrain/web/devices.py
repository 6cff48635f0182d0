"""The devices that the page can plan for: the catalogue, the card of this machine, and its processor."""

import sys
import time
from functools import lru_cache

from foretrain.app.plan import target_of
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, isolated, say
from foretrain.base.quantities import parse_bytes, read
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import DetectedGpu, catalogue, detect
from foretrain.hardware.cpu import cpu_device
from foretrain.hardware.devices import CPU, HERE, Target

ASKED_EVERY_S = 5.0
_ANY = RunConfig()  # asks for no device of its own
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


def listed() -> list[dict[str, str]]:
    """Every device as a chooser shows it, this machine's first: `text` has its memory, too, where that is known."""
    here = None if NO_MACHINE else _card_here()
    rows = [_listed(HERE, here.gpu.name, here.gpu.memory_bytes, here=True)] if here else []
    rows += [_listed(gpu.name, gpu.name, gpu.memory_bytes) for gpu in catalogue().values()]
    if NO_MACHINE:
        return rows
    cpu = cpu_device()
    return [*rows, _listed(CPU, cpu.name, cpu.memory_bytes, here=True)]


def _listed(id: str, name: str, memory_bytes: int | None, *, here: bool = False) -> dict[str, str]:
    memory = [format_value(memory_bytes, "bytes")] if memory_bytes else []
    text = " · ".join([isolated(name), *memory, *([say("page.here")] if here else [])])
    return {"id": id, "text": text}


def target(name: str, others: str, config: RunConfig = _ANY) -> Target:
    """What was chosen, with the memory that other programs use there: as said, else as measured on this machine.

    Raises UserError.
    """
    if NO_MACHINE and name in (HERE, CPU):
        raise UserError("page.no_machine")
    bad = UserError("page.bad_others", value=others[:40])
    return target_of(name, read(parse_bytes, others, bad) if others.strip() else None, config, _card)

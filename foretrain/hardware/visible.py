"""Which of NVML's cards CUDA shows a process, and as which numbers. No torch.

NVML lists every card, by its PCI address. CUDA lists those that CUDA_VISIBLE_DEVICES names, in its order. Numbers in it
are NVML's where CUDA_DEVICE_ORDER is PCI_BUS_ID. By default CUDA counts from the card that it takes for the fastest
(FASTEST_FIRST), and does not say how: its numbers are NVML's where all cards are alike, and uncertain where they are
not. The id and the PCI address that torch knows of a card leave no doubt, so they come first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(uuids: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, ...]:
    """NVML's index of each card that CUDA shows, by CUDA's number; None for a part of a card (MIG).

    `uuids`: of NVML's cards, as 'GPU-…', in its order. As CUDA does: what names no card ends the list, and a card that
    is named twice empties it. Its first word says whether the list is one of numbers or of ids.
    """
    if VARIABLE not in environ:
        return tuple(range(len(uuids)))
    words = [word.strip() for word in environ[VARIABLE].split(",")]
    prefix = next((each for each in ("GPU-", "MIG-") if words[0].startswith(each)), "")
    found: list[int | None] = []
    for word in words:
        if prefix == "MIG-" and word.startswith(prefix):
            found.append(None)
            continue
        at = _by_id(word, uuids) if prefix == "GPU-" else None if prefix else _by_number(word, len(uuids))
        if at is None:
            break
        if at in found:
            return ()
        found.append(at)
    return tuple(found)


def _by_id(word: str, uuids: Sequence[str]) -> int | None:
    """The card whose id begins so, if it is one alone."""
    matching = [i for i, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _by_number(word: str, count: int) -> int | None:
    number = re.match(r"\+?(\d+)", word)  # CUDA reads a number as far as it goes
    return int(number[1]) if number and int(number[1]) < count else None


def identity(properties: Any) -> dict[str, str]:
    """{"uuid", "bus_id"} of a card, as NVML writes them, from torch.cuda.get_device_properties; '' where this torch
    does not say."""
    uuid = getattr(properties, "uuid", "")
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = all(isinstance(number, int) for number in address)
    return {
        "uuid": f"GPU-{uuid}" if uuid else "",
        "bus_id": "{:08x}:{:02x}:{:02x}.0".format(*address) if known else "",
    }

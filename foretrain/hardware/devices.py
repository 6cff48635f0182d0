"""Which device is meant: by its name, or the one of this machine, and what other programs use there.

The one place for it: commands, the page, comparisons and Python programs all ask here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretrain.base.errors import UserError
from foretrain.hardware.catalogue import DetectedGpu, Gpu, catalogue, detect, find
from foretrain.hardware.cluster import is_counted
from foretrain.hardware.cpu import available_memory_bytes, cpu_device

HERE, CPU = "auto", "cpu"


@dataclass(frozen=True)
class Target:
    """A device to plan for, and the memory that other programs use there."""

    gpu: Gpu
    used_by_others_bytes: int


def named(name: str) -> Gpu:
    """A card of the catalogue, or this machine's CPU. Raises UserError 'gpu.unknown', and 'usage.count_in_gpu' for a
    count of cards."""
    if is_counted(name):
        raise UserError("usage.count_in_gpu", value=name[:80])
    return cpu_device() if name.lower() == CPU else find(name)


def target(
    name: str, stated_bytes: int | None = None, *, index: int = 0,
    detect: Callable[[int], DetectedGpu | None] = detect,
) -> Target:  # fmt: skip
    """The device of this name with what other programs use there: as stated, else measured on this machine's devices.

    "auto": card `index` of this machine, which `detect` looks for. Raises UserError where there is none, where the
    name is not known, and where others are said to use more than the card has.
    """
    used_bytes = 0
    if name.lower() == HERE:
        found = detect(index)
        if found is None:
            raise UserError("gpu.none_here", count=len(catalogue()))
        gpu, used_bytes = found.gpu, found.used_bytes
    else:
        gpu = named(name)
        if gpu.kind == "cpu":
            used_bytes = used_here_bytes(gpu)
    return checked(gpu, used_bytes if stated_bytes is None else stated_bytes)


def checked(gpu: Gpu, used_by_others_bytes: int) -> Target:
    """The target. Raises UserError where others are said to use more than the card has."""
    if gpu.memory_bytes is not None and used_by_others_bytes > gpu.memory_bytes:
        raise UserError("gpu.others_beyond", others=used_by_others_bytes, memory=gpu.memory_bytes, gpu=gpu.name)
    return Target(gpu, used_by_others_bytes)


def used_here_bytes(gpu: Gpu, index: int = 0) -> int:
    """Bytes that other programs use now on this machine's CPU, or on its card of this index; 0 where nobody says."""
    if gpu.kind == "cpu":
        total, free = gpu.memory_bytes, available_memory_bytes()
        return max(0, total - free) if total and free else 0
    try:
        found = detect(index)
    except UserError:
        return 0
    return found.used_bytes if found else 0


def found(name: str, seen: Sequence[str] = (), tell: Callable[[UserError], object] = lambda error: None) -> Gpu | None:
    """The card of this name; for "auto" the first one that somebody has `seen` at work, else the one of this machine.

    None where there is none, or where the catalogue lacks it, which `tell` hears. Raises UserError for a name that is
    typed and not known.
    """
    if name.lower() != HERE:
        return named(name)
    try:
        if seen:
            return find(seen[0])
        here = detect()
    except UserError as error:
        tell(error)
        return None
    return here.gpu if here else None

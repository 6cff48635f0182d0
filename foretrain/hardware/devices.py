"""The device of a name, or of this machine, and what other programs use there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.hardware.catalogue import DetectedGpu, Gpu, catalogue, detect, find
from foretrain.hardware.cluster import is_counted
from foretrain.hardware.cpu import available_memory_bytes, cpu_device

LATER_KERNELS_BYTES = 64 * MIB  # modules that a run loads and the calibration did not; an allowance, not measured

Range = tuple[int, int, int]  # low, expected, high
# 0.13 GiB (RTX A2000) to 0.62 GiB (RTX 5090) reported, about 0.25 on an RTX 4070.
USUAL: Range = (133 * MIB, 300 * MIB, 700 * MIB)
# H100 SXM, driver 580, torch 2.11 with CUDA 13.0, 43 runs of benchmarks/gpu/suite.py on one stream: 610 MiB before the
# first kernel, 742 (fp32) to 758 MiB (half precision) at the end; 762 MiB after `foretrain calibrate`. One had 936 MiB
# at the end (activation_memory_budget, compiled), for an unknown reason.
HOPPER, HOPPER_CAPABILITY = (610 * MIB, 758 * MIB, 936 * MIB), (9, 0)
# The other five, whose copies run on a stream of their own (one or two of them), had 828 MiB instead of 758.
STREAMS_BYTES = 70 * MIB
# A run of 124M in 5 micro-batches had 76 MiB more as one CUDA graph, whose steps run on a stream of their own (the same
# card, benchmarks/results/gpu_h100_real.json): 6 MiB for the kernels of 72 blocks, evaluation included. Other graphs
# are reported at up to four times that: 10 KB for a kernel (github.com/NVIDIA/cccl/pull/3768).
GRAPHED_BLOCK_BYTES, GRAPHED_BLOCK_HIGH_BYTES = MIB // 12, 4 * MIB // 12
# Other cards with as many SMs as the H100 (132): 426 MiB on an RTX 6000 Ada (142) before any kernel
# (github.com/unslothai/unsloth-zoo/pull/1053), 0.62 GiB on an RTX 5090 (170); at most what Hopper takes.
LARGE, LARGE_SMS = (426 * MIB, 635 * MIB, HOPPER[2]), 132


def published_context_bytes(gpu: Gpu) -> Range:
    if gpu.capability == HOPPER_CAPABILITY:
        return HOPPER
    return LARGE if gpu.kind == "cuda" and (gpu.sm_count or 0) >= LARGE_SMS else USUAL


class Context(Record):
    low_bytes: int = USUAL[0]
    expected_bytes: int = USUAL[1]
    high_bytes: int = USUAL[2]
    source: Literal["published", "calibrated"] = "published"

    def with_streams(self, graphed_blocks: int = 0) -> "Context":
        """Add a stream of the run's own, and graphs of so many blocks; the low end stays that before any kernel."""
        expected = self.expected_bytes + STREAMS_BYTES + graphed_blocks * GRAPHED_BLOCK_BYTES
        high = self.high_bytes + STREAMS_BYTES + graphed_blocks * GRAPHED_BLOCK_HIGH_BYTES
        return self.model_copy(update={"expected_bytes": expected, "high_bytes": high})

    @classmethod
    def of(cls, gpu: Gpu) -> "Context":
        """Return the card's own context, give or take kernels loaded later, or the published range."""
        measured = gpu.calibration.context_bytes if gpu.calibration else None
        if measured is None:
            low, expected, high = published_context_bytes(gpu)
            return cls(low_bytes=low, expected_bytes=expected, high_bytes=high)
        return cls(
            low_bytes=measured, expected_bytes=measured, high_bytes=measured + LATER_KERNELS_BYTES, source="calibrated"
        )


HERE, CPU = "auto", "cpu"


@dataclass(frozen=True)
class Target:
    gpu: Gpu
    used_by_others_bytes: int


def device_named(name: str) -> Gpu:
    """Return a card of the catalogue, or this machine's CPU. Raises UserError for another name or a count."""
    if is_counted(name):
        raise UserError("usage.count_in_gpu", value=name[:80])
    return cpu_device() if name.lower() == CPU else find(name)


def target(
    name: str, stated_bytes: int | None = None, *, index: int = 0, detect: Callable[[int], DetectedGpu | None] = detect
) -> Target:
    """Return the device of this name ("auto": card `index` here) with other programs' use, stated or measured. Raises
    UserError where the card is absent or unknown, or others use more than it has."""
    used_bytes = 0
    if name.lower() == HERE:
        found = detect(index)
        if found is None:
            raise UserError("gpu.none_here", count=len(catalogue()))
        gpu, used_bytes = found.gpu, found.used_bytes
    else:
        gpu = device_named(name)
        if gpu.kind == "cpu":
            used_bytes = used_here_bytes(gpu)
    return checked(gpu, used_bytes if stated_bytes is None else stated_bytes)


def checked(gpu: Gpu, used_by_others_bytes: int) -> Target:
    if gpu.memory_bytes is not None and used_by_others_bytes > gpu.memory_bytes:
        raise UserError("gpu.others_beyond", others=used_by_others_bytes, memory=gpu.memory_bytes, gpu=gpu.name)
    return Target(gpu, used_by_others_bytes)


def used_here_bytes(gpu: Gpu, index: int = 0) -> int:
    if gpu.kind == "cpu":
        total, free = gpu.memory_bytes, available_memory_bytes()
        return max(0, total - free) if total and free else 0
    try:
        found = detect(index)
    except UserError:
        return 0
    return found.used_bytes if found else 0


def find_device(
    name: str, seen: Sequence[str] = (), tell: Callable[[UserError], object] = lambda error: None
) -> Gpu | None:
    """Return the card of this name; for "auto" the first one `seen` at work, else this machine's; None where the
    catalogue lacks it, which `tell` gets. Raises UserError for an unknown name."""
    if name.lower() != HERE:
        return device_named(name)
    try:
        if seen:
            return find(seen[0])
        here = detect()
    except UserError as error:
        tell(error)
        return None
    return here.gpu if here else None

"""What a process holds on a card beside PyTorch's allocator: the CUDA context and the kernels that it has loaded.

It grows with the card, whose every SM has its own stacks (RTX A2000 with 26 SMs: 0.13 GiB, RTX 4070 with 46: about
0.25), but also changes with driver and torch, so that no rule of the SMs alone meets all that is known: 3.7 MiB for
each SM of an RTX 5090, 5.7 for each of an H100.
"""

from typing import Literal

from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.hardware.catalogue import Gpu

LATER_KERNELS_BYTES = 64 * MIB  # modules that a run loads and the calibration did not; an allowance, not measured

Range = tuple[int, int, int]  # low, expected, high
# 0.13 GiB (RTX A2000) to 0.62 GiB (RTX 5090) reported, about 0.25 on an RTX 4070.
USUAL: Range = (133 * MIB, 300 * MIB, 700 * MIB)
# H100 SXM, driver 580, torch 2.11 with CUDA 13.0, 43 runs of benchmarks/gpu/suite.py on one stream: 610 MiB before the
# first kernel, 742 (fp32) to 758 MiB (half precision) at the end; 762 MiB after `foretrain calibrate`. One of them had
# 936 MiB at the end (activation_memory_budget, compiled); why is not known.
HOPPER, HOPPER_CAPABILITY = (610 * MIB, 758 * MIB, 936 * MIB), (9, 0)
# The other five, whose copies run on a stream of their own (one or two of them), had 828 MiB instead of 758.
STREAMS_BYTES = 70 * MIB
# A run of 124M in 5 micro-batches had 76 MiB more as one CUDA graph, whose steps run on a stream of their own (the same
# card, benchmarks/results/gpu_h100_real.json): 6 MiB for the kernels of 72 blocks, evaluation included. Of other graphs
# as much as four times that is told: 10 KB for a kernel (github.com/NVIDIA/cccl/pull/3768).
GRAPHED_BLOCK_BYTES, GRAPHED_BLOCK_HIGH_BYTES = MIB // 12, 4 * MIB // 12
# Other cards with as many SMs as the H100 (132): 426 MiB on an RTX 6000 Ada (142) before any kernel
# (github.com/unslothai/unsloth-zoo/pull/1053), 0.62 GiB on an RTX 5090 (170); at most what Hopper takes.
LARGE, LARGE_SMS = (426 * MIB, 635 * MIB, HOPPER[2]), 132


def published(gpu: Gpu) -> Range:
    """(low, expected, high) bytes by what was measured or published of cards like this one."""
    if gpu.capability == HOPPER_CAPABILITY:
        return HOPPER
    return LARGE if gpu.kind == "cuda" and (gpu.sm_count or 0) >= LARGE_SMS else USUAL


class Context(Record):
    """The range for a card: measured where `foretrain calibrate` ran on it, else what was published of its like."""

    low_bytes: int = USUAL[0]
    expected_bytes: int = USUAL[1]
    high_bytes: int = USUAL[2]
    source: Literal["published", "calibrated"] = "published"

    def with_streams(self, graphed_blocks: int = 0) -> "Context":
        """That of a run which has a stream of its own beside the usual one, and graphs with so many blocks in all; the
        low end stays that before any kernel."""
        expected = self.expected_bytes + STREAMS_BYTES + graphed_blocks * GRAPHED_BLOCK_BYTES
        high = self.high_bytes + STREAMS_BYTES + graphed_blocks * GRAPHED_BLOCK_HIGH_BYTES
        return self.model_copy(update={"expected_bytes": expected, "high_bytes": high})

    @classmethod
    def of(cls, gpu: Gpu) -> "Context":
        """The card's own, give or take the kernels that a run loads later, or the published range."""
        measured = gpu.calibration.context_bytes if gpu.calibration else None
        if measured is None:
            low, expected, high = published(gpu)
            return cls(low_bytes=low, expected_bytes=expected, high_bytes=high)
        return cls(
            low_bytes=measured, expected_bytes=measured, high_bytes=measured + LATER_KERNELS_BYTES, source="calibrated"
        )

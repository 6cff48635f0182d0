"""What a version of torch, installed or not, runs a step with; each property is a change of PyTorch. No torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

from foretrain.base.installation import installed_torch
from foretrain.base.units import KIB, MIB

COMPILED_BYTES_2_0 = 1.35
NEWEST = (2, 13)  # the newest that predictions were compared with


def _since(major: int, minor: int) -> property:
    return property(lambda self: self >= (major, minor))


class Software(NamedTuple):
    """A version of torch, (2, 13) for 2.13.0+cu130, and what it has."""

    major: int
    minor: int

    # torch 2.0 brought scaled_dot_product_attention; before it nanoGPT writes the T x T matrices out.
    fused_attention = _since(2, 0)
    # torch 2.0 brought torch.compile; without it nanoGPT runs with compile = False.
    compiles = _since(2, 0)
    # torch.cuda.is_bf16_supported(), by which nanoGPT chooses, says True of cards without bfloat16 units (pytorch
    # pull 115924, January 2024: torch 2.3; 2.2.2 says False of a V100, pytorch issue 124996).
    emulates_bf16 = _since(2, 3)
    # torch 2.2 took FlashAttention-2 (its release notes: about twice as fast as the kernel before).
    flash2 = _since(2, 2)
    # AdamW(fused=True) is stable from torch 2.0 on; nanoGPT uses it where the signature has it.
    fused_adamw = _since(2, 0)
    # A compiled kernel starts about as fast as any other. With torch 2.0 it took 0.08 ms.
    fast_launches = _since(2, 1)
    # Inductor makes one kernel of scale, mask, softmax and casts of attention that is written out (a trace with
    # torch 2.13); with 2.0 it took as long as one by one (languini-kitchen's steps on an A100 and a 3090).
    fuses_attention = _since(2, 1)
    # Inductor pads a product whose size is not a multiple of 8 (pytorch pull 101915, May 2023: torch 2.1).
    pads_matmuls = _since(2, 1)
    # Inductor takes maximum and sum of a row in one pass (pytorch pull 127011: torch 2.7).
    online_softmax = _since(2, 7)
    # The caching allocator takes the free block of the oldest segment among those of one size, not that of the
    # lowest address (BlockComparatorSize, registration_counter; seen on the CUDA builds of 2.11, 2.12 and 2.13).
    reuses_oldest = _since(2, 12)
    # Each recording of a CUDA graph has a generator's seed and offset of its own, on the default stream
    # (CUDAGeneratorImpl.cpp; seen on the CUDA builds of 2.11, 2.12 and 2.13).
    seeds_each_graph = _since(2, 12)

    @property
    def compiled_bytes(self) -> float:
        """What Inductor's kernels moved over what today's do. torch 2.0: set by the 87 ms of pytorch.org's blog
        "Accelerating Large Language Models", where FlashAttention-1 and AdamW by lists explain the rest."""
        return 1.0 if self >= (2, 1) else COMPILED_BYTES_2_0

    def cublas_workspace_bytes(self, capability: tuple[int, int]) -> int:
        """What a matmul asks for beside its result: 32 MiB on Hopper, from torch 2.12 on Blackwell too, else 8.125 MiB
        (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        large = capability[0] == 9 or (capability[0] >= 10 and self >= (2, 12))
        return 32 * MIB if large else 8 * MIB + 128 * KIB

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


ASSUMED = Software(*NEWEST)
_meant: ContextVar[Software | None] = ContextVar("torch", default=None)


def parse(text: str) -> Software | None:
    """(2, 0) for "2.0.1+cu118"; None for anything else."""
    found = re.match(r"(\d{1,3})\.(\d{1,3})(?!\d)", text)
    return Software(int(found[1]), int(found[2])) if found else None


@cache
def installed() -> Software | None:
    return parse(installed_torch())


@contextmanager
def meant(torch_version: str) -> Iterator[None]:
    """Within it plans are for this torch, that of another environment; '' is this one's."""
    token = _meant.set(parse(torch_version))
    try:
        yield
    finally:
        _meant.reset(token)


def of(torch_version: str) -> Software:
    """Return the torch of a plan: the wanted one, else the training environment's, else the newest known."""
    return (torch_version and parse(torch_version)) or _meant.get() or installed() or ASSUMED

"""The bytes of each allocation and free of PyTorch's CPU allocator, in order, from its profiler."""

import os
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise

import torch
from torch._C._profiler import _EventType
from torch.profiler import profile

KERNELS_WITH_SCRATCH = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
# Of two dtypes: a CPU's kernel reads a copy in the wider one, a card's casts as it reads (TensorIterator.cpp).
OF_TWO_DTYPES = frozenset(f"aten::{name}" for name in ("add", "add_", "sub", "mul", "mul_", "div", "div_", "where"))


def peaks_of(run: profile, scratch: frozenset[str] = frozenset()) -> tuple[int, int]:
    """Return (peak of all blocks, peak without what matmul kernels and `scratch` operations allocate and free)."""
    everything, tensors = sizes(run, scratch)
    return highest(everything), highest(tensors)


def sizes(run: profile, more: frozenset[str] = frozenset()) -> tuple[list[int], list[int]]:
    """Return (bytes allocated, and below 0 freed, in order; the same without kernels' scratch)."""
    events: list[tuple[int, int, int, Any]] = []  # time, signed size, address, the op that it happened in
    stack: list[tuple[Any, Any]] = [(n, None) for n in run.profiler.kineto_results.experimental_event_tree()]  # type: ignore[union-attr]
    while stack:
        node, op = stack.pop()
        if node.tag == _EventType.TorchOp and op is None and node.name in KERNELS_WITH_SCRATCH | more:
            op = node
        stack.extend((child, op) for child in node.children)
        if node.tag == _EventType.Allocation:
            fields: Any = node.extra_fields
            if fields.device.type == "cpu":
                events.append((node.start_time_ns, fields.alloc_size, fields.ptr, op))
    events.sort(key=lambda event: event[0])
    live: dict[int, tuple[int, Any]] = {}
    scratch: set[int] = set()
    for i, (_, size, address, op) in enumerate(events):
        if size > 0:
            live[address] = (i, op)
        elif address in live:
            start, inside = live.pop(address)
            if inside is not None and inside is op:
                scratch |= {start, i}
    return [event[1] for event in events], [event[1] for i, event in enumerate(events) if i not in scratch]


def highest(sizes: Iterable[int]) -> int:
    return max(accumulate(sizes), default=0)


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind these tensors; of a DTensor, those of this rank's part."""
    storages = [own_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a DTensor that are here. An attribute tells one, as importing its module takes long."""
    return getattr(tensor, "_local_tensor", tensor)

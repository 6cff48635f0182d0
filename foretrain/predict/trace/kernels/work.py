"""The kernels that a traced step runs: what each multiplies, reads and writes, from which its time follows."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# They read as many rows of their first tensor as they write, and not all of it.
GATHERS = {"embedding", "index", "index_select", "gather", "_unsafe_index", "take"}
# They write over what was there, which they do not read.
FILLS = {"fill_", "zero_", "copy_", "normal_", "uniform_"}
MAKES = ("empty", "new_empty", "resize", "set_", "lift_fresh", "detach", "_local_scalar_dense")
QUANTIZED = {"gemm_4bit", "dequantize_4bit"}
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # which argument is the first factor
OF_LISTS = ("_fused_", "_foreach_")


class Work:
    """Counts kernels by (part of the step, kind, shape, dtype, FLOPs, bytes read, bytes written)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Any, ...]] = Counter()

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, part: str) -> None:
        op = func.overloadpacket.__name__
        if func.is_view or op.startswith(MAKES) or func.namespace == "c10d":  # a collective takes no time of its own
            return
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and t.device.type != "meta"]
        made = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        read, written = sum(map(_nbytes, given)), sum(map(_nbytes, made))
        if op.startswith(OF_LISTS) and not made:  # in place
            written = read
        if op in GATHERS:
            read = written
        elif op in FILLS:
            read = sum(map(_nbytes, given[1:]))
        if op in QUANTIZED:
            self._add_unpacked(op, args, part)
            return
        flops, (kind, shape) = _flops(func, args, kwargs, out), _kind(op, args, made)
        if flops and not kind.startswith("attention"):  # a convolution, or several matmuls: as one
            kind, shape = "matmul", _as_matmul(op, args, flops)
        if not read + written or not all(shape):
            return
        floats = [t for t in (*given, *made) if t.is_floating_point()]
        dtype = str(floats[0].dtype)[6:] if floats else "float32"
        self.counts[part, kind, shape, dtype, flops, read, written] += 1

    def _add_unpacked(self, op: str, args: tuple[Any, ...], part: str) -> None:
        """A weight in 4 bits is written in 16 before a matmul reads it; the matmul itself comes here too."""
        shape, packed = (args[2], args[1]) if op == "gemm_4bit" else (args[4], args[0])
        elements = torch.Size(shape).numel()
        self.counts[part, "fill", (elements,), "bfloat16", 0, _nbytes(packed), 2 * elements] += 1

    def rows(self) -> list[list[Any]]:
        return [[*key, runs] for key, runs in self.counts.items()]


def _nbytes(tensor: Tensor) -> int:
    """What a kernel moves of a tensor: an expanded one has fewer bytes than elements."""
    if tensor.layout != torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs by FlopCounterMode's convention."""
    op = func.overloadpacket.__name__.rstrip("_")
    if op in MATMULS:
        return 2 * out.numel() * args[MATMULS[op]].shape[-1]
    if op == "_grouped_mm":  # each row with the matrix of its expert
        return 2 * args[0].numel() * args[1].shape[-1]
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _kind(op: str, args: tuple[Any, ...], made: list[Tensor]) -> tuple[str, tuple[int, ...]]:
    if "scaled_dot_product" in op or op in ("_flash_attention_forward", "_flash_attention_backward"):
        backward = op.endswith("backward")
        return f"attention{'_backward' * backward}", tuple(args[1 if backward else 0].shape)
    if "softmax" in op:
        return f"softmax{'_backward' * ('backward' in op)}", (_elements(args, made),)
    if op.startswith("_fused_"):
        return "adamw", (_elements(args, made),)
    kind = "gather" if op in GATHERS else "fill" if op in FILLS else "add"
    return kind, (_elements(args, made),)


def _elements(args: tuple[Any, ...], made: list[Tensor]) -> int:
    return max((t.numel() for t in (*made, *tree_iter(args)) if isinstance(t, Tensor)), default=0)


def _as_matmul(op: str, args: tuple[Any, ...], flops: int) -> tuple[int, int, int]:
    """(m, n, k) of a matmul with these FLOPs: batches are rows, a convolution's positions too."""
    op = op.rstrip("_")
    weight = args[2 if op == "convolution_backward" else MATMULS.get(op, 0) + 1]
    if "conv" in op:
        n, k = weight.shape[0], weight[0].numel()
    else:
        k, n = weight.shape[-2:]
    return max(1, flops // (2 * n * k)), n, k

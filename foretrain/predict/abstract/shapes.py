"""Shapes and dtypes of results, as PyTorch's broadcasting and type promotion give them. No torch."""

from collections.abc import Sequence
from typing import Any

from foretrain.predict.abstract.tensors import DType, Tensor
from foretrain.predict.abstract.views import alike

ORDER = {"bool": 0, "int8": 1, "int32": 1, "int64": 1, "float16": 2, "bfloat16": 2, "float32": 3, "float64": 4}


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if len(a) < len(b):
        a, b = b, a
    b = (1,) * (len(a) - len(b)) + tuple(b)
    return tuple(y if x == 1 and y != 1 else x for x, y in zip(a, b, strict=True))


def promoted(a: DType, b: DType) -> DType:
    return a if ORDER[a.name] >= ORDER[b.name] else b


def result_of(x: Tensor, y: Tensor) -> tuple[tuple[int, ...], DType]:
    """Shape and dtype of an operation on both; a scalar's dtype does not count beside a tensor's."""
    dtype = promoted(x.dtype, y.dtype) if len(x.shape) and len(y.shape) else (x if len(x.shape) else y).dtype
    return broadcast(x.shape, y.shape), dtype


def reduced(x: Tensor, dim: Any, keepdim: bool) -> tuple[int, ...]:
    """The shape of a sum over dimensions; None: over all."""
    if dim is None:
        return ()
    dims = {d % len(x.shape) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    return tuple(1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims)


def joined(parts: Sequence[Tensor], dim: int) -> list[int]:
    """The shape of the parts one after the other; sizes with the same letters are multiplied, not added."""
    shape = list(parts[0].shape)
    for part in parts[1:]:
        same = alike(part.shape[dim], parts[0].shape[dim])
        shape[dim] = parts[0].shape[dim] * len(parts) if same else shape[dim] + part.shape[dim]
    return shape


def product(sizes: Sequence[int]) -> int:
    found: int = 1
    for size in sizes:
        found = size if found == 1 else found * size
    return found

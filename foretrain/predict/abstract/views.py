"""Views: the same storage in another shape, and copies where that is impossible. No torch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.tensors import DType, Tensor, contiguous_strides


def is_contiguous(x: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _filled(x: Tensor, shape: Sequence[Any]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    sizes = list(shape)
    if -1 in sizes:
        at = sizes.index(-1)
        rest: int = 1
        for i, size in enumerate(sizes):
            if i != at:
                rest = size * rest
        sizes[at] = _quotient(x, rest, [s for i, s in enumerate(sizes) if i != at])
    return tuple(sizes)


def alike(a: int, b: int) -> bool:
    return a == b and getattr(a, "letters", ()) == getattr(b, "letters", ())


def _quotient(x: Tensor, rest: int, others: list[int]) -> int:
    left = list(x.shape)
    for size in others:
        for i, own in enumerate(left):
            if alike(own, size):
                left[i] = 1
                break
        else:
            whole = math.prod(x.shape) // int(rest)
            heads = getattr(others[-1] if others else 1, "letters", ())
            if left and getattr(left[-1], "letters", ()) == ("C",) and heads == ("H",):
                found = left[-1] // others[-1]  # C over H is D, 2·C over 2·H too
                return found if int(found) == whole else whole
            return whole
    found: int = 1
    for size in left:
        found = found * size if isinstance(found, Dim) else (size if found == 1 else size * found)
    return found


def _viewed_strides(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides with which x can be viewed in another shape, or None where it has to be copied."""
    if is_contiguous(x):
        return contiguous_strides(shape)
    old = [(s, st) for s, st in zip(x.shape, x.strides, strict=True) if s != 1]
    new: list[int] = []
    i = 0
    sizes = [int(s) for s in shape]
    j = 0
    while j < len(sizes):
        if sizes[j] == 1:
            new.append(1)
            j += 1
            continue
        if i >= len(old):
            return None
        size, last = old[i][0], old[i][1]
        target, group = sizes[j], [sizes[j]]
        while size != target:
            if size < target:
                i += 1
                if i >= len(old) or old[i][1] * old[i][0] != last:
                    return None
                size, last = size * old[i][0], old[i][1]
            else:
                j += 1
                target *= sizes[j]
                group.append(sizes[j])
        step = last
        found = []
        for s in reversed(group):
            found.append(step)
            step *= s
        new += reversed(found)
        i += 1
        j += 1
    return tuple(new)


def view(x: Tensor, *shape: Any) -> Tensor:
    sizes = _filled(x, shape)
    strides = _viewed_strides(x, sizes)
    assert strides is not None, f"{x.shape} cannot be seen as {sizes}"
    out = x.viewed(sizes, strides)
    if wants(x):
        record(out, _view_backward(x.shape), (x,))
    return out


def _view_backward(shape: tuple[int, ...]) -> Callable[..., Grads]:
    def run(saved: Any, grad: Tensor) -> Grads:
        return (_seen(grad, shape),)

    return run


def _seen(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    strides = _viewed_strides(x, shape)
    if strides is None:
        return x.made(shape, x.dtype)
    found = x.viewed(shape, strides)
    found.base = x.storage  # as all views that autograd makes, backward too, have it
    return found


def reshape(x: Tensor, *shape: Any) -> Tensor:
    sizes = _filled(x, shape)
    if _viewed_strides(x, sizes) is not None:
        return view(x, sizes)
    return view(clone(x), sizes)


def clone(x: Tensor) -> Tensor:
    out = x.made(x.shape, x.dtype)
    if wants(x):
        record(out, identity, (x,))
    return out


def expand(x: Tensor, *shape: Any) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    strides = [
        0 if own == 1 and size != 1 else stride for own, size, stride in zip(x.shape, sizes, x.strides, strict=True)
    ]
    out = x.viewed(tuple(sizes), strides)
    if wants(x):
        record(out, identity, (x,))
    return out


def contiguous(x: Tensor) -> Tensor:
    return x if is_contiguous(x) else clone(x)


def identity(saved: Any, grad: Tensor) -> Grads:
    return (grad,)


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    out = _transposed(x, a, b)
    if wants(x):
        record(out, lambda saved, grad: (_transposed(grad, a, b),), (x,))
    return out


def _transposed(x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return x.viewed([x.shape[i] for i in order], [x.strides[i] for i in order])


def split(x: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    sizes = list(size) if isinstance(size, list | tuple) else [size] * (int(x.shape[dim]) // int(size))
    outs = x.pieces([(*x.shape[:dim], each, *x.shape[dim + 1 :]) for each in sizes])
    if wants(x):
        shape, dtype = x.shape, x.dtype

        def run(saved: Any, *grads: Tensor | None) -> Grads:
            return (_laid_out_as(shape, dtype, grads),)

        record(outs, run, (x,))
    return tuple(outs)


def _laid_out_as(shape: tuple[int, ...], dtype: DType, grads: Sequence[Tensor | None]) -> Tensor:
    """Join the gradients in their layout, as cat chooses it."""
    first, *others = (grad for grad in grads if grad is not None)
    out = first.made(shape, dtype, *others)
    if len(shape) == 4 and first.strides[1] < first.strides[2]:  # B x T x H x D, seen as B x H x T x D
        strides = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
        out.strides = (strides[0], strides[2], strides[1], strides[3])
    return out


def chunk(x: Tensor, count: int, dim: int = 0) -> tuple[Tensor, ...]:
    return split(x, x.shape[dim] // count, dim)


def t(x: Tensor) -> Tensor:
    return transpose(x, 0, 1)


def flatten(x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    start, end = start % len(x.shape), end % len(x.shape)
    merged: int = 1
    for size in x.shape[start : end + 1]:
        merged = size if merged == 1 else merged * size
    return reshape(x, (*x.shape[:start], merged, *x.shape[end + 1 :]))


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    dim %= len(x.shape) + 1
    return view(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def squeeze(x: Tensor, dim: int) -> Tensor:
    dim %= len(x.shape)
    return view(x, (*x.shape[:dim], *x.shape[dim + 1 :]))


def _taken(key: slice, start: int, stop: int, size: int) -> int:
    """Return the length of a slice, with its letters: a context, a chunk of tokens, a half."""
    count = stop - start
    if isinstance(key.stop, Dim) and not start and key.stop == stop:
        return key.stop
    if m.machine() is not None and count == m.machine().t.symbols["n"]:
        return Dim(count, 1, ("n",))
    return size // 2 if size == 2 * count else count


def getitem(x: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(x.shape) - len([k for k in keys if k is not None]) + 1)
    shape, strides = [], []
    dims = iter(range(len(x.shape)))
    for each in keys:
        if each is None:
            shape.append(1)
            strides.append(0)
            continue
        i = next(dims)
        if isinstance(each, slice):
            start, stop, step = each.indices(int(x.shape[i]))
            whole = (start, stop, step) == (0, int(x.shape[i]), 1)
            taken = x.shape[i] // step if step > 1 else _taken(each, start, stop, x.shape[i])
            shape.append(x.shape[i] if whole else taken)
            strides.append(x.strides[i] * step)
    for i in dims:
        shape.append(x.shape[i])
        strides.append(x.strides[i])
    out = x.viewed(shape, strides)
    if wants(x):
        full, dtype = x.shape, x.dtype
        sliced = tuple(out.shape) != tuple(full)

        def run(saved: Any, grad: Tensor) -> Grads:
            return (grad.made(full, dtype) if sliced else grad,)

        record(out, run, (x,))
    return out


ORDER = {"bool": 0, "int8": 1, "int32": 1, "int64": 1, "float16": 2, "bfloat16": 2, "float32": 3, "float64": 4}


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if len(a) < len(b):
        a, b = b, a
    b = (1,) * (len(a) - len(b)) + tuple(b)
    return tuple(y if x == 1 and y != 1 else x for x, y in zip(a, b, strict=True))


def promoted(a: DType, b: DType) -> DType:
    return a if ORDER[a.name] >= ORDER[b.name] else b


def result_of(x: Tensor, y: Tensor) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of an operation on both; a scalar's dtype does not count beside a tensor's."""
    dtype = promoted(x.dtype, y.dtype) if len(x.shape) and len(y.shape) else (x if len(x.shape) else y).dtype
    return broadcast(x.shape, y.shape), dtype


def reduced(x: Tensor, dim: Any, keepdim: bool) -> tuple[int, ...]:
    if dim is None:
        return ()
    dims = {d % len(x.shape) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    return tuple(1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims)


def joined(parts: Sequence[Tensor], dim: int) -> list[int]:
    """Return the shape of the joined parts; sizes with the same letters are multiplied, not added."""
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

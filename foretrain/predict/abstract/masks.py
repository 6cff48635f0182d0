"""Booleans on tensors without values: comparisons, and elements that a mask picks, which are all that there are: which
of them it picks, no value says. No torch.

aten native/IndexingUtils.h (expandTensors), native/cuda/Nonzero.cu, derivatives.yaml (masked_scatter, masked_fill).
"""

from typing import Any

from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import routing
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.shapes import broadcast, product
from foretrain.predict.abstract.tensors import Tensor, allocate, bool_, int64, make, ran


def compared(x: Tensor, y: Any = None) -> Tensor:
    """Booleans, of two tensors or of one."""
    if isinstance(y, Tensor):
        return make("add", broadcast(x.shape, y.shape), bool_, x, y)
    return F.compared(x)


def getitem(x: Tensor, key: Any) -> Tensor:
    """The rows of x that a mask of its first dimensions picks, by where they stand; else routing.getitem."""
    if not isinstance(key, Tensor) or key.dtype != bool_:
        return routing.getitem(x, key)
    count = product(key.shape)
    places = _places(key, count)
    out = make("gather", (count, *x.shape[len(key.shape) :]), x.dtype, x, places)
    if wants(x):
        shape = x.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            found = make("fill", shape, grad.dtype)
            places = _places(saved[0], count)
            sorting = [allocate((count,), int64, "workspace") for _ in range(4 if m.machine.cuda else 0)]
            ran("scatter", found.viewed((), ()), grad, places)
            del sorting
            return (found,)

        record(out, run, (x,), (key,))
    return out


def _places(mask: Tensor, count: int) -> Tensor:
    """Where a mask is true: an index for each of its dimensions."""
    return make("range", (count, len(mask.shape)), int64, mask, component="workspace")


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x, with the elements of a source where the mask is true."""
    out = make("gather", x.shape, x.dtype, x, mask, source)
    if wants(source):
        shape = source.shape
        record(out, lambda saved, grad: (make("gather", shape, grad.dtype, grad, *saved),), (source,), (mask,))
    return out


def masked_fill(x: Tensor, mask: Tensor, _: Any) -> Tensor:
    """x, with one value where the mask is true."""
    out = make("add", broadcast(x.shape, mask.shape), x.dtype, x, mask)
    if wants(x):
        record(out, lambda saved, grad: (make("add", grad.shape, grad.dtype, grad, *saved),), (x,), (mask,))
    return out


METHODS = {
    "__getitem__": getitem, "masked_scatter": masked_scatter, "masked_fill": masked_fill,
    **dict.fromkeys(("__ne__", "__eq__", "__lt__", "__ge__", "__gt__", "__and__", "__invert__"), compared),
}  # fmt: skip

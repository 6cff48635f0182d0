"""What model code calls on a tensor: the methods and attributes of torch.Tensor that the estimate knows."""

from typing import Any

from foretrain.predict.abstract import autograd, routing, views
from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.shapes import broadcast, product
from foretrain.predict.abstract.tensors import Tensor, allocate, bool_, int64, make, ran

# Booleans on tensors without values: comparisons, and elements that a mask picks, which are all that there are: which
# of them it picks, no value says. No torch.
#
# aten native/IndexingUtils.h (expandTensors), native/cuda/Nonzero.cu, derivatives.yaml (masked_scatter, masked_fill).


def compared(x: Tensor, y: Any = None) -> Tensor:
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
            sorting = [allocate((count,), int64, "workspace") for _ in range(4 if m.machine().cuda else 0)]
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


MASK_METHODS = {
    "__getitem__": getitem, "masked_scatter": masked_scatter, "masked_fill": masked_fill,
    **dict.fromkeys(("__ne__", "__eq__", "__lt__", "__ge__", "__gt__", "__and__", "__invert__"), compared),
}  # fmt: skip


class Device:
    @property
    def type(self) -> str:
        return "cuda" if m.machine().cuda else "cpu"


DEVICE = Device()
VIEWS = (
    "view", "reshape", "transpose", "split", "chunk", "t", "flatten", "unsqueeze", "squeeze", "contiguous", "clone",
    "expand",
)  # fmt: skip
# Not differentiated here.
SAME_SHAPE = ("clamp", "tril", "triu", "cos", "sin", "log", "__rpow__", "reciprocal", "round")
IN_PLACE = (
    "square_", "mul_", "add_", "sub_", "rsqrt_", "exp_", "neg_", "clamp_", "div_",
)  # fmt: skip
METHODS: dict[str, Any] = {
    **{name: getattr(views, name) for name in VIEWS},
    "add": F.add, "__add__": F.add, "__radd__": F.add, "sub": F.add, "__sub__": F.add, "__rsub__": F.add,
    "mul": F.mul, "__mul__": F.mul, "__rmul__": F.mul, "div": F.div, "__truediv__": F.div, "__neg__": F.neg,
    "pow": F.pow, "rsqrt": F.rsqrt,
    "to": F.to, "float": F.to_float, "type_as": lambda x, y: F.to(x, y.dtype), "roll": F.roll,
    "mean": F.mean, "amax": F.along, "detach": Tensor.detach, "addmm_": F.addmm_,
    "gather": lambda x, dim, index: m.make("gather", index.shape, x.dtype, index), "__matmul__": F.matmul,
    "__iadd__": F.accumulate_, "scatter_add_": F.scatter_, "index_add_": F.scatter_,
    "requires_grad_": lambda x, wanted=True: autograd.leaf(x) if wanted else x,
    "new_empty": lambda x, shape, dtype: m.allocate(shape, dtype),
    "new_zeros": lambda x, shape, dtype: m.make("fill", shape, dtype),
    "copy_": F.copy_, "zero_": F.fill_, "fill_": F.fill_,
    **dict.fromkeys(SAME_SHAPE, F.pointwise), **dict.fromkeys(IN_PLACE, F.in_place),
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim], "dim": lambda x: len(x.shape),
    "__len__": lambda x: int(x.shape[0]), "__hash__": object.__hash__,
    "ndim": property(lambda x: len(x.shape)), "device": property(lambda x: DEVICE),
    **routing.METHODS, **MASK_METHODS,
    "is_cuda": property(lambda x: m.machine().cuda), "is_cpu": property(lambda x: not m.machine().cuda),
}  # fmt: skip
for _name, _value in METHODS.items():
    setattr(Tensor, _name, _value)

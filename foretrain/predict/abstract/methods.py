"""What model code calls on a tensor: the methods and attributes of torch.Tensor that the estimate knows."""

from typing import Any

from foretrain.predict.abstract import autograd, masks, routing, views
from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.tensors import Tensor


class Device:
    """Where the program runs."""

    @property
    def type(self) -> str:
        """cuda or cpu."""
        return "cuda" if m.machine.cuda else "cpu"


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
    **routing.METHODS, **masks.METHODS,
    "is_cuda": property(lambda x: m.machine.cuda), "is_cpu": property(lambda x: not m.machine.cuda),
}  # fmt: skip
for _name, _value in METHODS.items():
    setattr(Tensor, _name, _value)

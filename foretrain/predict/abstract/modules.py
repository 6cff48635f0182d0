"""torch.nn on tensors without values: the module that runs names what is allocated."""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from foretrain.config.families import FAMILIES
from foretrain.predict.abstract import autograd, routing, views
from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, Parameter, record, wants
from foretrain.predict.abstract.tensors import DType, Tensor, allocate, bool_, float32, int64, make, note_kernel
from foretrain.predict.abstract.views import broadcast, product

# Modules by the last word of their names, what they make, and the moment that they begin.
_PARTS = [part for family in FAMILIES.values() for part in family.parts.items()]
KINDS = {"chunked_loss": "head", **{name: kind for name, (kind, _) in _PARTS if kind}}
# Names of operations where they are not the modules' own.
OPERATIONS = {
    "attn.c_attn": "attn", "attn.c_proj": "proj", "mlp.c_fc": "fc", "mlp.c_proj": "out", "attention.out": "proj",
    "mlp.up": "fc", "mlp.down": "out", ".lm_head": "head", ".chunked_loss": "head",
}  # fmt: skip
MOMENTS = {name: moment for name, (_, moment) in _PARTS if moment}
weights: ContextVar[DType] = ContextVar("weights", default=float32)  # what they are made in


def operations() -> Any:
    return (m.machine() and m.machine().functional) or F


class Module:
    training = True
    _parts: dict[str, "Module"]
    _parameters: dict[str, Parameter]
    _kind, _moment = "", ""  # of what it makes: the last word of an activation's component, the moment of the step
    _layer: int | None = None  # of a block: its number
    _head = False
    _operation = ""  # the name of what it runs

    def __init__(self) -> None:
        self.__dict__["_parts"] = {}
        self.__dict__["_parameters"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            self._parts[name] = value
            _name_parameter(value, name)
        elif isinstance(value, Parameter):
            self._parameters[name] = value
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        machine = m.machine()
        before = machine.kind, machine.name, machine.back, machine.t.layer
        if self._kind:
            machine.kind = self._kind
        if self._operation:
            machine.name = self._operation
        if self._moment:
            machine.t.moment = f"{machine.thread}.{self._moment}"
            machine.back = "head" if self._head else ""
        if self._layer is not None:
            machine.t.layer = self._layer
        try:
            return self.forward(*args, **named)
        finally:
            machine.kind, machine.name, machine.back, machine.t.layer = before

    forward: Callable[..., Any]

    def register_buffer(self, name: str, value: Any, persistent: bool = True) -> None:
        self.__dict__[name] = value

    def modules(self) -> Iterator["Module"]:
        return (module for _, module in self.named_modules())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        yield prefix, self
        for name, part in self._parts.items():
            yield from part.named_modules(f"{prefix}.{name}".lstrip("."))

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._named(prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _named(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, parameter in self._parameters.items():
            yield f"{prefix}{name}", parameter
        for name, part in self._parts.items():
            yield from part._named(f"{prefix}{name}.")

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def apply(self, function: Callable[["Module"], None]) -> "Module":
        return self

    def train(self, mode: bool = True) -> "Module":
        for module in self.modules():
            module.__dict__["training"] = mode
        return self


def _name_parameter(module: Module, name: str) -> None:
    module.__dict__["_kind"] = KINDS.get(name, "residual" if name.isdigit() else "")
    module.__dict__["_moment"] = MOMENTS.get(name, "attention" if name.isdigit() else "")
    module.__dict__["_head"] = name == "lm_head"
    module.__dict__["_layer"] = int(name) if name.isdigit() else None


def name_operations(module: Module, path: str = "") -> None:
    for name, part in module._parts.items():
        part.__dict__["_operation"] = "residual" if name.isdigit() else OPERATIONS.get(f"{path}.{name}", name)
        name_operations(part, name)


class ModuleList(Module):
    def __init__(self, parts: Iterable[Module] = ()) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            setattr(self, str(i), part)

    def __getitem__(self, i: int) -> Module:
        return self._parts[str(i)]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._parts.values())


class ModuleDict(Module):
    def __init__(self, parts: dict[str, Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def __getitem__(self, name: str) -> Module:
        return self._parts[name]


class Linear(Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter((out_features, in_features), weights.get())
        self.bias = Parameter((out_features,), weights.get()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return operations().linear(x, self.weight, self.bias)


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = Parameter((num_embeddings, embedding_dim), weights.get())

    def forward(self, idx: Tensor) -> Tensor:
        return operations().embedding(idx, self.weight)


class LayerNorm(Module):
    def __init__(self, shape: int, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = Parameter((shape,), weights.get())
        self.bias = Parameter((shape,), weights.get()) if bias else None
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return operations().layer_norm(x, (self.shape,), self.weight, self.bias)


class RMSNorm(Module):
    def __init__(self, shape: int, eps: float | None = None) -> None:
        super().__init__()
        self.weight = Parameter((shape,), weights.get())
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return operations().rms_norm(x, (self.shape,), self.weight)


class Dropout(Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return operations().dropout(x, self.p, self.training)


class GELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return operations().gelu(x)


# Boolean tensors without values: comparisons, and masked elements: all, or as many as the machine keeps. aten
# native/IndexingUtils.h (expandTensors), native/cuda/Nonzero.cu, derivatives.yaml (masked_scatter, masked_fill).


def compared(x: Tensor, y: Any = None) -> Tensor:
    if isinstance(y, Tensor):
        return make("add", broadcast(x.shape, y.shape), bool_, x, y)
    return F.compared(x)


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return the rows of x that a mask of its first dimensions selects, by their places; else routing.getitem."""
    if not isinstance(key, Tensor) or key.dtype != bool_:
        return routing.getitem(x, key)
    count = m.machine().kept or product(key.shape)
    places = _places(key, count)
    out = make("gather", (count, *x.shape[len(key.shape) :]), x.dtype, x, places)
    if wants(x):
        shape = x.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            found = make("fill", shape, grad.dtype)
            places = _places(saved[0], count)
            sorting = [allocate((count,), int64, "workspace") for _ in range(4 if m.machine().cuda else 0)]
            note_kernel("scatter", found.viewed((), ()), grad, places)
            del sorting
            return (found,)

        record(out, run, (x,), (key,))
    return out


def _places(mask: Tensor, count: int) -> Tensor:
    return make("range", (count, len(mask.shape)), int64, mask, component="workspace")


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    out = make("gather", x.shape, x.dtype, x, mask, source)
    if wants(source):
        shape = source.shape
        record(out, lambda saved, grad: (make("gather", shape, grad.dtype, grad, *saved),), (source,), (mask,))
    return out


def masked_fill(x: Tensor, mask: Tensor, _: Any) -> Tensor:
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
SAME_SHAPE = ("clamp", "tril", "triu", "cos", "sin", "log", "floor", "__rpow__", "reciprocal", "round")
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

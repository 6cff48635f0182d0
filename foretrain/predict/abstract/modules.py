"""torch.nn on tensors without values: modules know their parts, and which of them runs names what is allocated."""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from foretrain.config.families import FAMILIES
from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.tensors import DType, Tensor, float32

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
            _name(value, name)
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
        """A constant beside the weights; its memory is the run's."""
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
        """Weights have no values to draw."""
        return self

    def train(self, mode: bool = True) -> "Module":
        for module in self.modules():
            module.__dict__["training"] = mode
        return self


def _name(module: Module, name: str) -> None:
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

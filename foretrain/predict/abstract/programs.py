"""Ordinary PyTorch code, run without torch: a module's file is loaded with this package in the place of torch.

Only models are: no file or socket is touched, and nothing of torch is there but what this package knows.
"""

import builtins
import importlib.util
from functools import cache
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from foretrain.predict.abstract import attention, autograd, methods, modules
from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m

HERE = "foretrain.model."
assert methods.METHODS  # model code calls them


class Unknown:
    """Whatever of torch a file names and does not use here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Unknown":
        return Unknown(f"{self._name}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not known to the estimate")


def _namespace(name: str, known: dict[str, Any]) -> ModuleType:
    found = ModuleType(name)
    found.__dict__.update(known)
    found.__getattr__ = lambda attribute: Unknown(f"{name}.{attribute}")  # type: ignore[method-assign]
    return found


def _zeros(*shape: Any, dtype: m.DType = m.float32, **_: Any) -> m.Tensor:
    whole = len(shape) == 1 and isinstance(shape[0], tuple | list)
    return m.allocate(shape[0] if whole else shape, dtype)


def _like(x: m.Tensor, *, dtype: m.DType | None = None, **_: Any) -> m.Tensor:
    return m.allocate(x.shape, dtype or x.dtype)


def _arange(*bounds: Any, dtype: m.DType = m.int64, **_: Any) -> m.Tensor:
    first, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return m.allocate((end if not first and step == 1 else -(-(end - first) // step),), dtype)


def _vector_norm(x: m.Tensor, dim: int, keepdim: bool = False, dtype: m.DType | None = None) -> m.Tensor:
    return F.along(x, dim, keepdim, dtype)


def _parameter(x: Any) -> autograd.Parameter:
    return autograd.Parameter(x.shape if isinstance(x, m.Tensor) else x, modules.WEIGHTS[0])


nn = _namespace("torch.nn", {
    name: getattr(modules, name)
    for name in ("Module", "ModuleList", "ModuleDict", "Linear", "Embedding", "LayerNorm", "RMSNorm", "Dropout", "GELU")
} | {"Parameter": _parameter})  # fmt: skip
functional = _namespace("torch.nn.functional", {
    name: getattr(F, name)
    for name in (
        "linear", "embedding", "layer_norm", "rms_norm", "dropout", "cross_entropy", "gelu", "silu", "relu",
        "scaled_dot_product_attention",
    )
})  # fmt: skip
_init = ModuleType("torch.nn.init")
_init.__getattr__ = lambda name: lambda *_, **__: None  # weights have no values to draw
nn.init = _init  # type: ignore[attr-defined]
nn.functional = functional  # type: ignore[attr-defined]
torch = _namespace("torch", {
    "nn": nn, "Tensor": m.Tensor, "float32": m.float32, "float16": m.float16, "bfloat16": m.bfloat16,
    "float64": m.float64, "int64": m.int64, "long": m.int64, "bool": m.bool_, "dtype": m.DType, "device": str,
    "autograd": SimpleNamespace(Function=autograd.Function),
    "linalg": SimpleNamespace(vector_norm=_vector_norm),
    "compiler": SimpleNamespace(is_compiling=lambda: False),
    "finfo": lambda dtype: SimpleNamespace(tiny=0.0),
    "is_grad_enabled": lambda: m.machine.grad,
    "is_autocast_enabled": lambda device="cuda": m.machine.autocasting,
    "get_autocast_dtype": lambda device: m.machine.low,
    "no_grad": lambda: _no_grad, "compile": lambda f, **_: f,
    "arange": _arange, "zeros": _zeros, "ones": _zeros, "zeros_like": _like, "empty_like": _like,
    "mul": F.mul, "add": F.add, "addcmul": F.addcmul, "cat": F.cat, "mm": F.mm, "rsqrt": F.pointwise,
    "where": lambda a, b, c: m.allocate(b.shape, b.dtype),
})  # fmt: skip


def _no_grad(function: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        with autograd.no_grad():
            return function(*args, **named)

    return call


_checkpoint = _namespace("torch.utils.checkpoint", {
    "checkpoint": lambda call, *args, **named: autograd.checkpoint(call, *args),
})  # fmt: skip
_STANDS_FOR = {
    "torch": torch,
    "torch.nn": nn,
    "torch.nn.functional": functional,
    "torch.utils.checkpoint": _checkpoint,
    "foretrain.model.attention": _namespace("attention", {"causal_attention": attention.causal_attention}),
}
_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType:
    """A module of foretrain.model, for tensors without values."""
    if name in _STANDS_FOR:
        return _STANDS_FOR[name]
    if name not in _loaded:
        made = _loaded[name] = ModuleType(name)
        made.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        exec(_code_of(name), made.__dict__)
    return _loaded[name]


@cache
def _code_of(name: str) -> CodeType:
    """Compiled, as Python keeps it beside the file."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    loader: Any = spec.loader
    return loader.get_code(name)


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name == "torch" or name.startswith("torch."):
        found = _STANDS_FOR.get(name) or Unknown(name)
        return found if fromlist else torch
    if name == "foretrain.model" and fromlist:
        return SimpleNamespace(**{part: load(f"{name}.{part}") for part in fromlist})
    if name.startswith(HERE) and _needs_torch(name):
        return load(name)
    return builtins.__import__(name, globals, locals, fromlist, level)


def _needs_torch(name: str) -> bool:
    return any(used == "torch" or used.startswith("torch.") for used in _code_of(name).co_names)

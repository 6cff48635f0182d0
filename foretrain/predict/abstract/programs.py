"""Ordinary PyTorch code of models, run without torch: a module's file is loaded with this package in its place."""

import builtins
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from foretrain.predict.abstract import attention, autograd, modules, routing
from foretrain.predict.abstract import functional as eager
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Checkpoint, checkpointed
from foretrain.predict.abstract.tensors import Tensor


class Inputs:
    """Calls checkpointed blocks. An input ends after its block, and is placed again when the next is recomputed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._places: dict[int, Tensor] = {}

    def call(self, i: int, block: Callable[..., Any], x: Tensor, *others: Tensor) -> Any:
        result, frame = checkpointed(block, (x, *others), whole=False)
        if frame is not None:
            stays = i == self.count - 1
            if not stays:
                frame.leave()
            frame.arriving = partial(self._arriving, i, stays)
        return result

    def _arriving(self, i: int, stays: bool, frame: Checkpoint) -> Tensor:
        like: Tensor = frame.args[0]
        found = like if stays else self._places.pop(i)
        if i:
            self._places[i - 1] = m.allocate(like.shape, like.dtype, "activations.residual")
        return found


HERE, TECHNIQUES = "foretrain.model.", "foretrain.model.techniques"  # the latter import torch where they are called
assert modules.METHODS  # model code calls them
LAYERS = ("Module", "ModuleList", "ModuleDict", "Linear", "Embedding", "LayerNorm", "RMSNorm", "Dropout", "GELU")
FUNCTIONS = (
    "linear", "embedding", "layer_norm", "rms_norm", "dropout", "cross_entropy", "gelu", "silu", "relu",
)  # fmt: skip
OPERATIONS = (
    "mul", "add", "addcmul", "cat", "mm", "addmm", "pow", "rsqrt", "where", "arange", "zeros", "zeros_like", "tanh",
)  # fmt: skip
MORE = ("empty", "eye", "matmul", "exp", "log", "stack")  # that only eager code calls
ROUTING = ("topk", "sort", "histc", "cumsum", "baddbmm", "sigmoid")


class Unknown:
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


def _parameter(x: Any) -> autograd.Parameter:
    return autograd.Parameter(x.shape if isinstance(x, m.Tensor) else x, modules.weights.get())


def _capability() -> tuple[int, int]:
    """Return the card's capability as far as models ask: whether it has FlashAttention."""
    return (8, 0) if m.machine().attention(True) in ("flash", "cudnn") else (7, 5)


def _no_grad(function: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        with autograd.no_grad():
            return function(*args, **named)

    return call


class Loader:
    """Loads model files with `operations`, a module of functions, and `attention`s instead of torch's."""

    def __init__(
        self, operations: ModuleType, *, attention: Any, own_attention: Any, checkpoint: Any, compiling: bool
    ) -> None:
        init = ModuleType("torch.nn.init")
        init.__getattr__ = lambda name: lambda *_, **__: None  # weights have no values to draw
        functional = _namespace("torch.nn.functional", {
            **{name: getattr(operations, name) for name in FUNCTIONS}, "scaled_dot_product_attention": attention,
            "pad": operations.pad, "softmax": eager.softmax, "grouped_mm": routing.grouped_mm,
            "logsigmoid": eager.silu,  # which saves its input, too
        })  # fmt: skip
        parts = {name: getattr(modules, name) for name in LAYERS}
        nn = _namespace("torch.nn", {**parts, "Parameter": _parameter, "init": init, "functional": functional})
        self.torch = _namespace("torch", {
            "nn": nn, "Tensor": m.Tensor, "float32": m.float32, "float16": m.float16, "bfloat16": m.bfloat16,
            "float64": m.float64, "int64": m.int64, "long": m.int64,
            "int32": m.int32, "int8": m.int8, "bool": m.bool_, "dtype": m.DType, "device": str,
            "autograd": SimpleNamespace(Function=autograd.Function),
            "linalg": SimpleNamespace(vector_norm=operations.vector_norm),
            "cuda": SimpleNamespace(get_device_capability=_capability),
            "compiler": SimpleNamespace(is_compiling=lambda: compiling),
            "finfo": lambda dtype: SimpleNamespace(tiny=0.0, min=-1.0, max=1.0),
            "is_grad_enabled": lambda: m.machine().grad,
            "is_autocast_enabled": lambda device="cuda": m.machine().autocasting,
            "get_autocast_dtype": lambda device: m.machine().low,
            "no_grad": lambda: _no_grad, "compile": lambda f, **_: f,
            **{name: getattr(operations, name) for name in OPERATIONS},
            **{name: getattr(eager, name) for name in MORE},
            **{name: getattr(routing, name) for name in ROUTING},
            "ones": operations.zeros, "empty_like": getattr(operations, "empty_like", operations.zeros_like),
            **{name: getattr(m, name) for name in ("int8", "int32", "float8_e4m3fn", "float8_e5m2")},
            "aminmax": eager.aminmax, "maximum": eager.add, "_scaled_mm": eager.mm, "_int_mm": eager.int_mm,
        })  # fmt: skip
        again = _namespace("torch.utils.checkpoint", {"checkpoint": checkpoint})
        self.stands_for = {
            "torch": self.torch,
            "torch.nn": nn,
            "torch.nn.functional": functional,
            "torch.utils.checkpoint": again,
            "foretrain.model.host_memory": _namespace("host_memory", {"Inputs": Inputs}),
            "foretrain.model.attention": _namespace("attention", {"causal_attention": own_attention}),
            "foretrain.model.hub.kernels": _namespace("kernels", {
                "launch": m.note_kernel, "processors": lambda device: m.machine().card.processors,
                "column_sums": eager.column_sums,
                "room_for_logits": lambda like, shape, dtype: m.allocate(shape, dtype, "logits"),
                "sums_half_in_fp32": lambda device: m.machine().cuda and m.machine().card.capability >= (8, 0),
                "card_bytes": lambda device: m.machine().card.nbytes, "offloaded": autograd.offloaded,
            }),
        }  # fmt: skip
        self.loaded: dict[str, ModuleType] = {}

    @m.one_thread_at_a_time
    def load(self, name: str) -> ModuleType:
        if name in self.stands_for:
            return self.stands_for[name]
        if name not in self.loaded:
            spec = _spec_of(name)
            made = self.loaded[name] = ModuleType(name)
            made.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
            made.__path__ = spec.submodule_search_locations or ()  # type: ignore[attr-defined]
            exec(_code_of(name), made.__dict__)
        return self.loaded[name]

    def model(self, name: str, kind: str, config: Any) -> Any:
        """Return a model of this class, changed by the config's techniques."""
        made = getattr(self.load(name), kind)(config)
        self.load(TECHNIQUES).change(made, config)
        return made

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "torch" or name.startswith("torch."):
            found = self.stands_for.get(name) or Unknown(name)
            return found if fromlist else self.torch
        if name in ("foretrain.model", "foretrain.model.hub") and fromlist:
            return SimpleNamespace(**{part: self.load(f"{name}.{part}") for part in fromlist})
        if name.startswith(TECHNIQUES) or (name.startswith(HERE) and _needs_torch(name)):
            return self.load(name)
        return builtins.__import__(name, globals, locals, fromlist, level)


@cache
def _spec_of(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return spec


@cache
def _code_of(name: str) -> CodeType:
    loader: Any = _spec_of(name).loader
    return loader.get_code(name)


def _needs_torch(name: str) -> bool:
    return any(used == "torch" or used.startswith("torch.") for used in _code_of(name).co_names)


EAGER = Loader(
    eager, attention=eager.scaled_dot_product_attention, own_attention=attention.causal_attention,
    checkpoint=autograd.checkpoint, compiling=False,
)  # fmt: skip
load = EAGER.load

"""Tensors without values: a shape, a dtype, and a storage that ends with Python's last reference to it, as PyTorch's,
so that code on these allocates and frees as on real ones. No torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from threading import RLock
from typing import Any, NamedTuple, TypeVar, cast

from foretrain.predict.abstract.dims import Kernel
from foretrain.predict.abstract.passage import Recorder

F = TypeVar("F", bound=Callable[..., Any])


class DType(NamedTuple):
    name: str
    itemsize: int


float32, float16, bfloat16 = DType("float32", 4), DType("float16", 2), DType("bfloat16", 2)
float64, int64, bool_ = DType("float64", 8), DType("int64", 8), DType("bool", 1)
float8_e4m3fn, float8_e5m2 = DType("float8_e4m3fn", 1), DType("float8_e5m2", 1)
int32, int8 = DType("int32", 4), DType("int8", 1)


class Card(NamedTuple):
    """The device for kernels (model/hub/kernels.py). `processors`: 1 of a CPU. `nbytes`: of a card's memory."""

    cuda: bool
    capability: tuple[int, int] = (8, 0)
    processors: int = 1
    nbytes: int = 0


class Machine:
    """The machine of a program: where allocations are written, and torch's per-thread state."""

    traces = False  # whether it writes a graph instead of allocations
    wide_gradients = True  # of weights in half precision, whose masters are fp32
    grouped = "looped"  # matmuls of several experts: "at once", one after the other, or by transformers' "own" code

    def __init__(
        self, *, cuda: bool, low: DType | None, attention: Callable[[bool], str], functional: Any = None
    ) -> None:
        self.cuda = cuda
        self.functional = functional  # the module with the operations; None: eager ones
        self.low = low  # autocast's dtype; None: autocast is off
        self.attention = attention  # the kernel of scaled_dot_product_attention, with a graph or without
        self.grad = True
        self.thread = "forward"
        self.autocasting = False
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}  # autocast's cache: what was cast, and its copy
        self.workspaces: dict[str, Storage] = {}  # cuBLAS's, by thread
        self.kind = self.name = ""  # of the module that runs: what it makes, and what its operations are called
        self.back = ""  # the moment of the backward pass that nodes made now belong to, where it has another name
        self.sequence = 0
        self.again = False  # a checkpoint recomputes activations
        self.packing: list[Any] = []  # checkpoints that are open
        self.card = Card(cuda)
        self.kept: int | None = None  # true elements of a mask, where the run knows
        self.t: Recorder  # where it is written

    @property
    def in_backward(self) -> bool:
        """Return whether a gradient is being made, and not a recomputed activation."""
        return self.thread == "backward" and not self.again

    def component(self, shape: Sequence[int]) -> str:
        if "V" in getattr(shape[-1], "letters", ()) if shape else False:
            return "logits"
        if self.in_backward:
            return "temporaries"
        return f"activations.{self.kind or 'residual'}"

    def tangent(self, root: "Tensor") -> "Tensor":
        return make("fill", root.shape, root.dtype, component="temporaries")

    def accumulate(self, parameter: Any, gradient: Any) -> None:
        """Make the first gradient .grad, as AccumulateGrad; later ones are added in place (passage.py, later)."""
        self.t.take(gradient.storage.serial)
        parameter.grad = gradient

    def workspace(self) -> None:
        """Keep cuBLAS's workspace of the thread: the main one's, and autograd's."""
        if self.cuda and self.thread not in self.workspaces:
            serial = self.t.allocate("workspace", 1, (), (1, "cuBLAS"), ours=False)
            self.workspaces[self.thread] = Storage(self.t, serial)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Use half precision in matmuls; copies of weights live until the outermost context ends."""
        before, self.autocasting = self.autocasting, self.low is not None
        try:
            yield
        finally:
            self.autocasting = before
            if not before:
                self.casts.clear()


_running: ContextVar[Any] = ContextVar("machine", default=None)
machine: Callable[[], Machine] = _running.get  # the one that runs now, in this thread or task
_turn = RLock()


def one_thread_at_a_time(function: F) -> F:
    """Serialize calls of such functions: their caches are shared by all threads."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with _turn:
            return function(*args, **named)

    return cast(F, call)


@contextmanager
def running(on: Machine) -> Iterator[None]:
    token = _running.set(on)
    try:
        yield
    finally:
        _running.reset(token)


class Storage:
    """One allocation, freed when nobody has it any more."""

    __slots__ = ("serial", "t")

    def __init__(self, t: Recorder, serial: int) -> None:
        self.t, self.serial = t, serial

    def __del__(self) -> None:
        self.t.free(self.serial)


class Tensor:
    """A view of a storage. `node`: what made it, for autograd; `slot`: which of that node's results it is."""

    __slots__ = ("base", "dtype", "node", "requires_grad", "shape", "slot", "storage", "strides")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, storage: Storage | None) -> None:
        self.shape, self.strides, self.dtype, self.storage = shape, strides, dtype, storage
        self.node: Any = None
        self.base: Storage | None = None  # of a view that autograd made: it holds the storage twice
        self.slot = 0
        self.requires_grad = False

    @property
    def component(self) -> str:
        return self.storage.t.allocated[self.storage.serial].component if self.storage else ""

    def detach(self) -> "Tensor":
        return Tensor(self.shape, self.strides, self.dtype, self.storage)

    def viewed(self, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> "Tensor":
        """Return the storage, viewed in a shape with strides; `start` distinguishes slices."""
        return Tensor(tuple(shape), tuple(strides), self.dtype, self.storage)

    def pieces(self, shapes: Sequence[tuple[int, ...]]) -> list["Tensor"]:
        return [self.viewed(shape, self.strides) for shape in shapes]

    def made(
        self, shape: Sequence[int], dtype: DType, *others: "Tensor | None", component: str | None = None
    ) -> "Tensor":
        return make("join", shape, dtype, self, *others, component=component)

    def cast(self, dtype: DType, component: str | None = None) -> "Tensor":
        return make("cast", self.shape, dtype, self, component=component)

    def reduced(self, shape: tuple[int, ...]) -> "Tensor":
        """Sum over what was broadcast; over all rows, it is made of partial sums."""
        out = make("add", shape, self.dtype, self)
        letters = getattr(shape[0], "letters", ()) if len(shape) == 1 else ()
        if machine().cuda and letters == ("C",):
            take_temporary(1, f"sums{getattr(shape[0], 'coefficient', 0)}")
        return out

    def summed(self, other: "Tensor") -> "Tensor":
        return make("add", self.shape, self.dtype, self, other)

    def numel(self) -> int:
        return math.prod(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return _by_rows(tuple(shape))


@lru_cache(maxsize=4096)  # a model has few shapes
def elements(shape: tuple[int, ...]) -> int:
    return math.prod(map(int, shape))


@lru_cache(maxsize=4096)
def _by_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(found))


def without_storage(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """Return a contiguous tensor without a storage, which it gets once backward has its saved tensors."""
    return Tensor(shape, contiguous_strides(shape), dtype, None)


def allocate(shape: Sequence[int], dtype: DType, component: str | None = None) -> Tensor:
    """Return a new contiguous tensor; without a storage outside a program, as while a model is built."""
    shape = tuple(shape)
    on = machine()
    if on is None:
        return without_storage(shape, dtype)
    if component is None:
        component = "batch" if dtype is int64 else on.component(shape)
    serial = on.t.allocate(component, dtype.itemsize, shape)
    return Tensor(shape, contiguous_strides(shape), dtype, Storage(on.t, serial))


def note_kernel(
    kind: str, out: Tensor | Sequence[Tensor], *inputs: Tensor | None, shape: Sequence[int] = (), times: int = 1
) -> None:
    """Record a kernel that reads the inputs and writes its results, each once; or one run `times` times."""
    on = machine()
    if on is None or on.traces:
        return
    outs = (out,) if isinstance(out, Tensor) else out
    read = [x for x in inputs if x is not None]
    on.t.kernels.append(
        Kernel(
            on.t.layer, on.name, kind, "recompute" if on.again else on.thread,
            (*read, *outs)[0].dtype.itemsize, tuple(shape), tuple([_moved(x) for x in read]),
            tuple([_moved(x) for x in outs]), tuple([_which(x) for x in read]), tuple([_which(x) for x in outs]), times,
        )
    )  # fmt: skip


def _which(x: Tensor) -> int:
    """Distinguish weights and constants, which have no storage, by their shapes."""
    return x.storage.serial if x.storage is not None else -abs(hash((x.dtype.itemsize, x.shape))) - 10**6


def _moved(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return bytes of an element, and the shape without expanded dimensions."""
    shape = x.shape
    if 0 in x.strides:
        shape = tuple(size for size, stride in zip(shape, x.strides, strict=True) if stride)
    return x.dtype.itemsize, shape


def make(
    kind: str, shape: Sequence[int], dtype: DType, *inputs: Tensor | None, component: str | None = None,
    of: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    out = allocate(shape, dtype, component)
    if kind in ELEMENTWISE and len(shape) > 1:
        like = next((x for x in inputs if x is not None and len(x.shape) == len(shape)), None)
        out.strides = (dense_like(like, out.shape) if like is not None else None) or out.strides
    note_kernel(kind, out, *inputs, shape=of)
    return out


ELEMENTWISE = frozenset({"add", "cast", "gelu", "gelu_backward"})


def dense_like(x: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return dense strides of a result in x's order, as TensorIterator makes it; None for row-major."""
    order = sorted(range(len(shape)), key=lambda i: (-int(x.strides[i]), i))
    if order == list(range(len(shape))) or any(a != b for a, b in zip(x.shape, shape, strict=True)):
        return None
    found, step = [0] * len(shape), 1
    for i in reversed(order):
        found[i] = step
        step *= int(shape[i])
    return tuple(found)


def take_temporary(coefficient: int, letter: str) -> None:
    t = machine().t
    if t.symbols.get(letter):
        t.free(t.allocate("workspace", 1, (), (coefficient, letter)))


def take_temporaries(sizes: Sequence[int]) -> None:
    t = machine().t
    for serial in [t.allocate("workspace", 1, (), (nbytes,)) for nbytes in sizes]:
        t.free(serial)

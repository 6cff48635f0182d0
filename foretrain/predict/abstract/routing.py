"""A mixture of experts without values: sizes follow from counts, never from the choice (aten native/cuda/GroupMM.cpp,
Indexing.cu index_put_, derivatives.yaml). No torch."""

from typing import Any

from foretrain.predict.abstract import functional as F
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract import views
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.tensors import (
    DType,
    Tensor,
    allocate,
    bfloat16,
    contiguous_strides,
    int32,
    int64,
    make,
    note_kernel,
    without_storage,
)
from foretrain.predict.abstract.views import product


def _numbers(x: Tensor, shape: Any) -> Tensor:
    """Make whole numbers that belong to the pass, not to its batch."""
    return allocate(shape, int64, m.machine().component(shape))


def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    found, places = allocate(shape, x.dtype), _numbers(x, shape)
    note_kernel("range", (found, places), x)
    if wants(x):
        whole, dtype = x.shape, x.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            out = make("fill", whole, dtype)
            note_kernel("scatter", out.viewed((), ()), grad, *saved)
            return (out,)

        record(found, run, (x,), (places,))
    return found, places


def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    found = _numbers(x, x.shape), _numbers(x, x.shape)
    note_kernel("range", found, x)
    return found


def histc(x: Tensor, *, bins: int, **_: Any) -> Tensor:
    return make("add", (bins,), x.dtype, x)


def cumsum(x: Tensor, *, dim: int, dtype: Any) -> Tensor:
    return make("add", x.shape, dtype, x)


def quotient(x: Tensor, _: int) -> Tensor:
    return make("add", x.shape, x.dtype, x, component=m.machine().component(x.shape))


def to_int(x: Tensor) -> Tensor:
    return x.cast(int32, m.machine().component(x.shape))


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return rows by their numbers, else views.getitem; a card sorts them to add gradients of repeated rows."""
    if not isinstance(key, Tensor):
        return views.getitem(x, key)
    sizes = (*key.shape, *x.shape[1:])
    out = without_storage(sizes, x.dtype)
    if wants(x):
        shape = x.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            found = make("fill", shape, grad.dtype)
            sorting = [allocate(saved[0].shape, int64, "workspace") for _ in range(6 if m.machine().cuda else 0)]
            del sorting
            note_kernel("scatter", found.viewed((), ()), grad, *saved, grad)
            return (found,)

        record(out, run, (x,), (key,))
    out.storage = allocate(sizes, x.dtype).storage  # where only what backward needs is recomputed, it is not made
    note_kernel("gather", out, out, key)
    return out


def setitem(x: Tensor, key: Tensor, value: Tensor) -> None:
    note_kernel("scatter", x.viewed((), ()), key, value)


def permute(x: Tensor, *order: int) -> Tensor:
    out = x.viewed([x.shape[i] for i in order], [x.strides[i] for i in order])
    if wants(x):
        back = [order.index(i) for i in range(len(order))]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            return (grad.viewed([grad.shape[i] for i in back], [grad.strides[i] for i in back]),)

        record(out, run, (x,))
    return out


def total(x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    out = F.along(x, dim, keepdim, **named)
    if wants(x):
        shape, at = x.shape, None if dim is None else dim % len(x.shape)

        def run(saved: list[Any], grad: Tensor) -> Grads:
            strides = list(grad.strides)
            if at is None:
                strides = [0] * len(shape)
            elif keepdim:
                strides[at] = 0
            else:
                strides.insert(at, 0)
            return (grad.viewed(shape, strides),)

        record(out, run, (x,))
    return out


def grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply rows by the matrix of their expert, X x in x out; its gradient comes first."""
    rows, n_in, n_out = x.shape[0], weight.shape[-2], weight.shape[-1]
    sizes = rows, n_out
    out = without_storage(sizes, x.dtype)
    if wants(x, weight):
        own = m.machine().grouped == "own"
        for_x, for_weight = x.requires_grad or own, weight.requires_grad or own
        shape, dtype = weight.shape, weight.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, weight, _ = saved
            m.machine().workspace()
            dx = _for_rows(grad, weight) if own else None
            dw = _for_weight(grad, x, shape, dtype) if for_weight else None
            if for_x and not own:
                dx = _for_rows(grad, weight)
            return dx, dw

        record(out, run, (x, weight), (x if for_weight else None, weight if for_x else None, offs))
    out.storage = allocate(sizes, x.dtype).storage
    m.machine().workspace()
    _each("matmul", out, x, weight, shape=(rows, n_out, n_in), many=0)
    return out


def _for_rows(grad: Tensor, weight: Tensor) -> Tensor:
    shape = grad.shape[0], weight.shape[-2]
    out = allocate(shape, grad.dtype)
    _each("matmul_input", out, grad, weight, shape=(*shape, grad.shape[-1]), many=0)
    return out


def _for_weight(grad: Tensor, x: Tensor, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """Return the weight's gradient, out x in of each expert in memory, viewed as in x out."""
    count, n_in, n_out = shape
    made = allocate((count, n_out, n_in), dtype)
    _each("matmul_weight", made, grad, x, shape=(n_out, n_in, grad.shape[0]), many=2)
    return made.viewed(shape, (made.strides[0], 1, made.strides[1]))


def _each(kind: str, out: Tensor, x: Tensor, y: Tensor, *, shape: tuple[int, int, int], many: int) -> None:
    """Run one kernel for all experts where there is one, in bfloat16; else one each (native/cuda/GroupedBlas.cpp)."""
    machine = m.machine()
    rows = shape[many]
    count = max(1, min(int(out.shape[0] if many else y.shape[0]), int(rows)))
    if count == 1 or (machine.grouped == "at once" and x.dtype == bfloat16):
        note_kernel(kind, out, x, y, shape=shape)
        return
    shares = _of_one(out, rows, count), _of_one(x, rows, count), _of_one(y, rows, count)
    each, more = divmod(int(rows), count)
    for n, times in ((each + 1, more), (each, count - more)):
        if times:
            note_kernel(kind, *shares, shape=(*shape[:many], n, *shape[many + 1 :]), times=times)


def _of_one(x: Tensor, rows: int, count: int) -> Tensor:
    shape = x.shape[1:] if len(x.shape) == 3 else (int(rows) // count, *x.shape[1:])
    return x.viewed(shape, contiguous_strides(shape))


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    """Return x + alpha·a·b of as many matrices; each gradient is multiplied by alpha after it was made."""
    (count, rows, inner), columns = a.shape, b.shape[-1]
    out = allocate(x.shape, x.dtype)
    m.machine().workspace()
    note_kernel("matmul", out, x, a, b, shape=(product((count, rows)), columns, inner))
    if wants(x, a, b):
        for_x = x.requires_grad

        def run(saved: list[Any], grad: Tensor) -> Grads:
            a, b = saved
            m.machine().workspace()
            of = product((count, rows)), inner, columns
            da = make("matmul_input", (count, rows, inner), grad.dtype, grad, b, of=of)
            da = make("add", da.shape, da.dtype, da)
            db = make("matmul_weight", (count, inner, columns), grad.dtype, a, grad, of=of)
            db = make("add", db.shape, db.dtype, db)
            return grad if for_x else None, da, db

        record(out, run, (x, a, b), (a, b))
    return out


def sigmoid(x: Tensor) -> Tensor:
    return F.tanh(x)


def repeat_interleave(x: Tensor, times: int, dim: int = 0) -> Tensor:
    dim %= len(x.shape)
    return make("join", (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]), x.dtype, x)


METHODS = {
    "repeat_interleave": repeat_interleave, "permute": permute, "int": to_int, "sum": total, "__setitem__": setitem,
    "__floordiv__": quotient, "__itruediv__": F.div,
}  # fmt: skip

"""What operations allocate, save and give backward. Each follows PyTorch's own kernels and derivatives.yaml."""

from collections.abc import Callable, Sequence
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.attention import attend
from foretrain.predict.abstract.autograd import Grads, Parameter, record, wants
from foretrain.predict.abstract.shapes import broadcast, joined, promoted, reduced, result_of
from foretrain.predict.abstract.tensors import DType, Tensor, allocate, bool_, float32, int64, passing
from foretrain.predict.abstract.views import identity

# -- one element at a time ---------------------------------------------------------------------------------


def _result(x: Tensor, y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        return allocate(x.shape, x.dtype)
    return allocate(*result_of(x, y))


def add(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
    """x + y; the gradient goes to both."""
    out = _result(x, y)
    inputs = (x, y) if isinstance(y, Tensor) else (x,)
    if wants(*inputs):
        count = len(inputs)  # a name that holds the inputs would keep them
        record(out, lambda saved, grad: (grad,) * count, inputs)
    return out


def mul(x: Tensor, y: Any) -> Tensor:
    """x·y; each is kept for the gradient of the other."""
    out = _result(x, y)
    if not isinstance(y, Tensor):
        if wants(x):
            record(out, _of_its_shape, (x,))
    elif wants(x, y):
        record(out, _product_backward(x, y), (x, y), _factors(x, y))
    return out


def _of_its_shape(saved: list[Any], grad: Tensor) -> Grads:
    """A new gradient like the one that comes."""
    return (allocate(grad.shape, grad.dtype),)


def _factors(x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a product keeps: each factor for the gradient of the other."""
    return x if y.requires_grad else None, y if x.requires_grad else None


def _product_backward(x: Tensor, y: Tensor) -> Callable[..., Grads]:
    for_x, for_y = x.requires_grad, y.requires_grad

    def run(saved: list[Any], grad: Tensor) -> Grads:
        return (_result(grad, saved[1]) if for_x else None, _result(grad, saved[0]) if for_y else None)

    return run


def neg(x: Tensor) -> Tensor:
    """-x."""
    return mul(x, -1)


def div(x: Tensor, y: Any) -> Tensor:
    """x / y."""
    return mul(x, y)


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + a·b in one kernel."""
    out = allocate(broadcast(x.shape, broadcast(a.shape, b.shape)), promoted(x.dtype, promoted(a.dtype, b.dtype)))
    if wants(x, a, b):
        product = _product_backward(a, b)
        record(out, lambda saved, grad: (grad, *product(saved, grad)), (x, a, b), _factors(a, b))
    return out


def in_place(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Changes values alone."""
    return x


def to(x: Tensor, dtype: Any, *_: Any, **__: Any) -> Tensor:
    """x in another dtype, or x itself."""
    if not isinstance(dtype, DType) or x.dtype == dtype:
        return x
    gradient = m.machine is None or m.machine.in_backward
    return _cast(x, dtype, None if gradient else x.component or None)


def _cast(x: Tensor, dtype: DType, component: str | None) -> Tensor:
    out = x.cast(dtype, component)
    if wants(x):
        own = x.dtype
        record(out, lambda saved, grad: (grad.cast(own),), (x,))
    return out


def to_float(x: Tensor) -> Tensor:
    """x in fp32."""
    return to(x, float32)


def roll(x: Tensor, *_: Any) -> Tensor:
    """A copy with its elements moved."""
    out = allocate(x.shape, x.dtype)
    if wants(x):
        record(out, _of_its_shape, (x,))
    return out


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts one after the other, in a new tensor."""
    dim %= len(parts[0].shape)
    out = allocate(joined(parts, dim), parts[0].dtype)
    if wants(*parts):
        shapes = [part.shape for part in parts]
        record(out, lambda saved, grad: tuple(grad.viewed(s, grad.strides) for s in shapes), parts)
    return out


def _unary(save: str) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor, **_: Any) -> Tensor:
        out = allocate(x.shape, x.dtype)
        if wants(x):
            record(out, _of_its_shape, (x,), (x if save == "input" else out,))
        return out

    return call


def arange(*bounds: Any, dtype: DType = int64, **_: Any) -> Tensor:
    """Numbers in steps."""
    first, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return allocate((end if not first and step == 1 else -(-(end - first) // step),), dtype)


def zeros(*shape: Any, dtype: DType = float32, **_: Any) -> Tensor:
    """Zeros."""
    whole = len(shape) == 1 and isinstance(shape[0], tuple | list)
    return allocate(shape[0] if whole else shape, dtype)


def zeros_like(x: Tensor, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """Zeros of the shape of x."""
    return allocate(x.shape, dtype or x.dtype)


gelu, silu, relu = _unary("input"), _unary("input"), _unary("result")


def pointwise(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A function that is not differentiated here."""
    return allocate(x.shape, x.dtype)


rsqrt = pointwise


def compared(x: Tensor, *_: Any) -> Tensor:
    """Booleans of the shape of x."""
    return allocate(x.shape, bool_)


def along(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    """A sum, mean or maximum over dimensions."""
    kept = dtype or (int64 if x.dtype in (bool_, int64) else x.dtype)
    return allocate(reduced(x, dim, keepdim), kept)


def vector_norm(x: Tensor, *, dim: int, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The root of the sum of squares over a dimension."""
    return along(x, dim, keepdim, dtype)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x or y."""
    return allocate(x.shape, x.dtype)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    """The mean over dimensions; its gradient is of the whole shape."""
    out = along(x, dim, keepdim, dtype)
    if wants(x):
        shape, own = x.shape, x.dtype
        record(out, lambda saved, grad: (allocate(shape, own),), (x,))
    return out


# -- matmuls -----------------------------------------------------------------------------------------------


def autocast(x: Tensor | None) -> Tensor | None:
    """x as a matmul takes it; the copy of a weight is kept until the context ends."""
    machine = m.machine
    low = machine.low
    if x is None or not machine.autocasting or low is None or x.dtype.itemsize < 4 or x.dtype == int64:
        return x
    weight = isinstance(x, Parameter)
    if weight and id(x) in machine.casts:
        return machine.casts[id(x)]
    out = _cast(x, low, "weight_copies" if weight else x.component)
    if weight:
        machine.casts[id(x)] = out
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b over the last dimension. Without a bias the weight's gradient is made before x's (mm), with one after it
    (addmm)."""
    x = autocast(x)  # type: ignore[assignment]
    weight = autocast(weight)  # type: ignore[assignment]
    bias = autocast(bias)
    out = allocate((*x.shape[:-1], weight.shape[0]), x.dtype)
    m.machine.workspace()
    if wants(x, weight, bias):
        shape = x.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            weight = saved[1]
            if bias_shape is None:
                dw = _turned_back(allocate(weight.shape, grad.dtype))
                m.machine.workspace()
                return (allocate(shape, grad.dtype) if for_x else None, dw, None)
            dx = allocate(shape, grad.dtype) if for_x else None
            m.machine.workspace()
            dw = _turned_back(allocate(weight.shape, grad.dtype))
            _column_sum(bias_shape)
            return (dx, dw, allocate(bias_shape, grad.dtype))

        for_x, bias_shape = x.requires_grad, None if bias is None else bias.shape
        # The node of the weight's transposition comes before the matmul's, so its cast comes right after.
        record(out, run, (x, _turned(weight), bias), (x, weight))
    return out


def _turned_back(gradient: Tensor) -> Tensor:
    """A weight's gradient is made for its transposition."""
    gradient.base = gradient.storage
    return gradient


def _turned(weight: Tensor) -> Tensor:
    out = weight.viewed(weight.shape, weight.strides)
    if wants(weight):
        record(out, identity, (weight,))
    return out


def _column_sum(shape: tuple[int, ...]) -> None:
    """Partial sums of a bias's gradient."""
    if m.machine.cuda:
        passing(1, f"sums{getattr(shape[0], 'coefficient', 0)}")


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x·y over the last dimensions, where nobody differentiates it."""
    x, y = autocast(x), autocast(y)  # type: ignore[assignment]
    out = allocate((*x.shape[:-1], y.shape[-1]), x.dtype)
    m.machine.workspace()
    assert not wants(x, y), "matmul is not differentiated here; use linear"
    return out


def mm(x: Tensor, y: Tensor, *, out: Tensor | None = None, out_dtype: DType | None = None) -> Tensor:
    """x·y of two matrices, where nobody differentiates it."""
    made = out if out is not None else allocate((x.shape[0], y.shape[1]), out_dtype or x.dtype)
    m.machine.workspace()
    return made


# -- layers ------------------------------------------------------------------------------------------------


def embedding(idx: Tensor, weight: Tensor) -> Tensor:
    """Rows of the weight; the gradient is one for all rows."""
    out = allocate((*idx.shape, weight.shape[1]), weight.dtype)
    if wants(weight):
        shape = weight.shape
        record(out, lambda saved, grad: (allocate(shape, grad.dtype, "temporaries"),), (weight,), (idx,))
    return out


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0
) -> Tensor:
    """LayerNorm: the result, and mean and 1/std of each row, which backward takes with x."""
    if m.machine.autocasting and x.dtype != float32:
        x = to(x, float32)
    out = allocate(x.shape, x.dtype)
    rows = (*x.shape[:-1], 1)
    stats = [allocate(rows, float32) for _ in range(2)]
    if wants(x, weight, bias):
        affine = [p.shape for p in (weight, bias) if p is not None]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            dx = allocate(grad.shape, grad.dtype)
            return (dx, *(allocate(s, grad.dtype) for s in affine))

        record(out, run, (x, *(p for p in (weight, bias) if p is not None)), (x, *stats))
    return out


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel on a card (aten _fused_rms_norm), with a number a row for backward."""
    out = allocate(x.shape, promoted(x.dtype, weight.dtype) if weight is not None else x.dtype)
    scale = allocate((*x.shape[:-1], 1), float32)
    if wants(x, weight):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            dx = allocate(grad.shape, grad.dtype)
            return (dx, allocate(weight.shape, grad.dtype)) if weight is not None else (dx,)

        record(out, run, (x, weight) if weight is not None else (x,), (x, scale))
    return out


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Some elements zero; a mask is kept, on a CPU noise in the dtype of x."""
    if not training or not p:
        return x
    out = allocate(x.shape, x.dtype)
    mask = allocate(x.shape, bool_ if m.machine.cuda else x.dtype, "activations.dropout")
    if wants(x):
        record(out, _of_its_shape, (x,), (mask,))
    return out


def cross_entropy(logits: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """log_softmax and nll_loss. On CUDA log_softmax keeps the dtype of the logits and nll_loss takes an fp32 copy
    (aten LossNLL.cpp); on a CPU autocast casts the logits to fp32 first."""
    machine = m.machine
    if machine.autocasting and not machine.cuda:
        logits = to(logits, float32)
    logs = allocate(logits.shape, logits.dtype)
    if wants(logits):
        dtype = logits.dtype
        record(logs, lambda saved, grad: (allocate(grad.shape, dtype),), (logits,), (logs,))
    if machine.autocasting:
        logs = to(logs, float32)
    return nll_loss(logs, targets)


def nll_loss(logs: Tensor, targets: Tensor) -> Tensor:
    """The mean of what stands at the targets; its gradient is as large as the logarithms."""
    out, weight = allocate((), logs.dtype), allocate((), logs.dtype)
    if wants(logs):
        shape, dtype = logs.shape, logs.dtype
        record(out, lambda saved, grad: (allocate(shape, dtype),), (logs,), (logs, targets, weight))
    return out


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """See attention.py."""
    q, k, v = autocast(q), autocast(k), autocast(v)  # type: ignore[assignment]
    return attend(q, k, v, dropout_p)

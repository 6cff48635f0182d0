"""Operations: what they allocate, save and return in backward, after PyTorch's own kernels and derivatives.yaml."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.attention import attend
from foretrain.predict.abstract.autograd import Grads, Parameter, is_leaf, record, wants
from foretrain.predict.abstract.tensors import (
    DType,
    Tensor,
    allocate,
    bool_,
    float16,
    float32,
    int8,
    int32,
    int64,
    make,
    note_kernel,
    without_storage,
)
from foretrain.predict.abstract.views import (
    broadcast,
    identity,
    is_contiguous,
    joined,
    promoted,
    reduced,
    result_of,
    transpose,
    unsqueeze,
)
from foretrain.predict.estimate.kernel_buffers import Dimension, Processors, reduction_bytes


def _result(x: Tensor, y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        return make("add", x.shape, x.dtype, x)
    return make("add", *result_of(x, y), x, y)


def add(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
    out = _result(x, y)
    inputs = (x, y) if isinstance(y, Tensor) else (x,)
    if wants(*inputs):
        count = len(inputs)  # a name that holds the inputs would keep them
        record(out, lambda saved, grad: (grad,) * count, inputs)
    return out


def mul(x: Tensor, y: Any) -> Tensor:
    """Return x·y; each is saved for the gradient of the other, before the result is made."""
    if not isinstance(y, Tensor):
        out = _result(x, y)
        if wants(x):
            record(out, _elementwise, (x,))
        return out
    if not wants(x, y):
        return _result(x, y)
    shape, dtype = result_of(x, y)
    out = without_storage(shape, dtype)
    record(out, _product_backward(x, y), (x, y), _factors(x, y))
    made = _result(x, y)
    out.storage, out.strides = made.storage, made.strides
    return out


def _elementwise(saved: list[Any], grad: Tensor, kind: str = "add") -> Grads:
    return (make(kind, grad.shape, grad.dtype, grad, *saved),)


def _factors(x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return x if y.requires_grad else None, y if x.requires_grad else None


def _product_backward(x: Tensor, y: Tensor) -> Callable[..., Grads]:
    for_x, for_y = x.requires_grad, y.requires_grad

    def run(saved: list[Any], grad: Tensor) -> Grads:
        return (_result(grad, saved[1]) if for_x else None, _result(grad, saved[0]) if for_y else None)

    return run


def neg(x: Tensor) -> Tensor:
    return mul(x, -1)


def div(x: Tensor, y: Any) -> Tensor:
    return mul(x, y)


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    dtype = promoted(x.dtype, promoted(a.dtype, b.dtype))
    out = make("add", broadcast(x.shape, broadcast(a.shape, b.shape)), dtype, x, a, b)
    if wants(x, a, b):
        product = _product_backward(a, b)
        record(out, lambda saved, grad: (grad, *product(saved, grad)), (x, a, b), _factors(a, b))
    return out


def in_place(x: Tensor, *others: Any, **_: Any) -> Tensor:
    note_kernel("add", x, x, *(y for y in others if isinstance(y, Tensor)))
    return x


def accumulate_(x: Tensor, y: Tensor) -> Tensor:
    note_kernel("accumulate", x, x, y)
    return x


def copy_(x: Tensor, y: Tensor) -> Tensor:
    if y is not x:
        note_kernel("cast", x, y)
    return x


def fill_(x: Tensor, *_: Any) -> Tensor:
    note_kernel("fill", x)
    return x


def scatter_(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    note_kernel("scatter", x.viewed((), ()), index, source)
    return x


def to(x: Tensor, dtype: Any, *_: Any, **__: Any) -> Tensor:
    if not isinstance(dtype, DType) or x.dtype == dtype:
        return x
    if m.machine() is None or m.machine().in_backward:
        return _cast(x, dtype, None)
    return _cast(x, dtype, "weight_copies" if isinstance(x, Parameter) else x.component or None)


def _cast(x: Tensor, dtype: DType, component: str | None) -> Tensor:
    out = x.cast(dtype, component)
    if wants(x):
        own = x.dtype
        record(out, lambda saved, grad: (grad.cast(own),), (x,))
    return out


def to_float(x: Tensor) -> Tensor:
    return to(x, float32)


def roll(x: Tensor, *_: Any) -> Tensor:
    out = make("add", x.shape, x.dtype, x)
    if wants(x):
        record(out, _elementwise, (x,))
    return out


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(parts[0].shape)
    out = make("join", joined(parts, dim), parts[0].dtype, *parts)
    if wants(*parts):
        shapes = [part.shape for part in parts]
        record(out, lambda saved, grad: tuple(grad.viewed(s, grad.strides) for s in shapes), parts)
    return out


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return cat([unsqueeze(part, dim) for part in parts], dim)


def _unary(save: str, kind: str, backward: str) -> Callable[[Tensor], Tensor]:
    run = partial(_elementwise, kind=backward)

    def call(x: Tensor, **_: Any) -> Tensor:
        out = make(kind, x.shape, x.dtype, x)
        if wants(x):
            record(out, run, (x,), (x if save == "input" else out,))
        return out

    return call


def arange(*bounds: Any, dtype: DType = int64, **_: Any) -> Tensor:
    first, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    shape = (end // step if not first and end % step == 0 else -(-(end - first) // step),)
    own = m.machine().component(shape) if m.machine() is not None else None  # other whole numbers are a batch's
    return make("fill", shape, dtype, component=own)


def zeros(*shape: Any, dtype: DType = float32, **_: Any) -> Tensor:
    whole = len(shape) == 1 and isinstance(shape[0], tuple | list)
    return make("fill", shape[0] if whole else shape, dtype)


def eye(n: int, *, dtype: DType = float32, **_: Any) -> Tensor:
    return make("fill", (n, n), dtype)


def zeros_like(x: Tensor, *, dtype: DType | None = None, **_: Any) -> Tensor:
    return make("fill", x.shape, dtype or x.dtype)


def empty_like(x: Tensor) -> Tensor:
    return allocate(x.shape, x.dtype, x.component if x.dtype == int64 else None)


gelu, silu = (_unary("input", "gelu", "gelu_backward") for _ in range(2))
relu, tanh, rsqrt, exp = (_unary("result", "add", "add") for _ in range(4))


def pow(x: Tensor, exponent: Any) -> Tensor:
    """Return x to a power, by autocast in fp32; its gradient is made of a lower power and that times the exponent."""
    if m.machine().autocasting:
        x = to(x, float32)
    out = make("add", x.shape, x.dtype, x)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            lower = make("add", saved[0].shape, saved[0].dtype, saved[0])  # until the whole expression is done
            scaled = make("add", lower.shape, lower.dtype, lower)
            return (make("add", grad.shape, grad.dtype, grad, scaled),)

        record(out, run, (x,), (x,))
    return out


def empty(*shape: Any, dtype: DType = float32, **_: Any) -> Tensor:
    whole = len(shape) == 1 and isinstance(shape[0], tuple | list)
    return make("dequantize", shape[0] if whole else shape, dtype, component="temporaries")


def pad(x: Tensor, sides: tuple[int, int], **_: Any) -> Tensor:
    return make("join", (*x.shape[:-1], int(x.shape[-1]) + sum(sides)), x.dtype, x)


def pointwise(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return make("add", x.shape, x.dtype, x)


log = pointwise


def compared(x: Tensor, *_: Any) -> Tensor:
    return make("add", x.shape, bool_, x)


def along(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    kept = dtype or (int64 if x.dtype in (bool_, int64) else x.dtype)
    return make("add", reduced(x, dim, keepdim), kept, x)


def column_sums(x: Tensor) -> Tensor:
    """Sum all rows of a matrix in fp32, which a card makes of partial sums."""
    rows, columns = (Dimension(int(size), int(step)) for size, step in zip(x.shape, x.strides, strict=True))
    card = m.machine().card
    processors = Processors.of(card.capability, card.processors)
    passing = reduction_bytes(processors, [rows], [columns], 4) if m.machine().cuda else []
    held = [allocate((nbytes,), int8, "workspace") for nbytes in passing]
    out = make("add", x.shape[1:], float32, x)
    del held
    return out


def aminmax(x: Tensor, dim: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    found = allocate(reduced(x, dim, keepdim), x.dtype), allocate(reduced(x, dim, keepdim), x.dtype)
    note_kernel("range", found, x)
    return found


def vector_norm(x: Tensor, *, dim: int, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """Return the root of the sum of squares over a dimension; scattered in memory, blocks make partial results."""
    out = along(x, dim, keepdim, dtype)
    if m.machine() is not None and m.machine().cuda:
        card, sizes = m.machine().card, [Dimension(int(n), int(s)) for n, s in zip(x.shape, x.strides, strict=True)]
        inner = sizes.pop(dim % len(sizes))
        processors = Processors.of(card.capability, card.processors)
        m.take_temporaries(reduction_bytes(processors, [inner], sizes, max(x.dtype.itemsize, 4)))
    return out


def where(condition: Tensor, x: Tensor, y: Any) -> Tensor:
    tensors = (condition, *(each for each in (x, y) if isinstance(each, Tensor)))
    return make("add", broadcast(condition.shape, x.shape), x.dtype, *tensors)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    out = along(x, dim, keepdim, dtype)
    if wants(x):
        shape, own = x.shape, x.dtype
        record(out, lambda saved, grad: (make("add", shape, own, grad),), (x,))
    return out


def autocast(x: Tensor | None) -> Tensor | None:
    """Return x as a matmul takes it; the copy of a leaf, and so the leaf, lives to the context's end (cached_cast)."""
    machine = m.machine()
    low = machine.low
    if x is None or not machine.autocasting or low is None or x.dtype.itemsize < 4 or x.dtype == int64:
        return x
    if id(x) in machine.casts:
        return machine.casts[id(x)][1]
    out = _cast(x, low, "weight_copies" if x.storage is None else x.component)  # of a weight that is turned, too
    if x.requires_grad and is_leaf(x):
        machine.casts[id(x)] = x, out
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b; without a bias the weight's gradient is made before x's (mm), with one after it (addmm)."""
    # GCC, which compiles autocast's wrapper, evaluates arguments from the right: x is cast last, its gradient first.
    bias = autocast(bias)
    weight = autocast(weight)  # type: ignore[assignment]
    x = autocast(x)  # type: ignore[assignment]
    sizes = (*x.shape[:-1], weight.shape[0])
    out = without_storage(sizes, x.dtype)
    if wants(x, weight, bias):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, weight = saved
            if not biased:
                dw = _weight_gradient(grad, x, shape) if for_weight else None
                m.machine().workspace()
                return (_input_gradient(grad, rows, weight) if for_x else None, dw, None)
            dx = _input_gradient(grad, rows, weight) if for_x else None
            m.machine().workspace()
            dw = _weight_gradient(grad, x, shape) if for_weight else None
            return (dx, dw, grad)  # the engine sums it, when nothing holds x any more

        for_x, for_weight, biased = x.requires_grad, weight.requires_grad, bias is not None
        rows, shape = x.shape, weight.shape
        # The transposition is newer than both casts: its node comes right after the matmul's.
        record(out, run, (x, _turned(weight), bias), (x if for_weight else None, weight if for_x else None))
    # Where only what backward needs of it is recomputed, the matmul is not.
    out.storage = allocate(sizes, x.dtype).storage
    m.machine().workspace()
    note_kernel("matmul", out, x, weight, bias, shape=_product(out.shape, x.shape[-1]))
    return out


def _product(shape: Sequence[int], inner: int) -> tuple[int, int, int]:
    """Return (m, n, k) of a matmul whose result has this shape."""
    rows: int = 1
    for size in shape[:-1]:
        rows = size if rows == 1 else rows * size
    return rows, shape[-1], inner


def _input_gradient(grad: Tensor, shape: Sequence[int], weight: Tensor) -> Tensor:
    """A gradient of more dimensions than two is a view of the matmul's result."""
    gradient = make("matmul_input", shape, grad.dtype, grad, weight, of=_product(shape, weight.shape[0]))
    gradient.base = gradient.storage if len(shape) > 2 else None
    return gradient


def _weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """It is made for the weight's transposition."""
    rows = _product(x.shape, 1)[0]
    gradient = make("matmul_weight", shape, grad.dtype, grad, x, of=(*shape, rows))
    gradient.base = gradient.storage
    return gradient


def _turned(weight: Tensor) -> Tensor:
    out = weight.viewed(weight.shape, weight.strides)
    if wants(weight):
        record(out, identity, (weight,))
    return out


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x·y over the last dimensions; differentiated for as many matrices in x as in y."""
    x, y = autocast(x), autocast(y)  # type: ignore[assignment]
    out = _ran_mm(allocate((*x.shape[:-1], y.shape[-1]), x.dtype), x, y)
    m.machine().workspace()
    if wants(x, y):
        assert len(x.shape) == len(y.shape)
        left, right, for_x, for_y = x.shape, y.shape, x.requires_grad, y.requires_grad

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, y = saved
            dx = make("matmul_input", left, grad.dtype, grad, y, of=_product(left, right[-1])) if for_x else None
            of = (_product(left, 1)[0], right[-1], left[-1])
            dy = make("matmul_weight", right, grad.dtype, x, grad, of=of) if for_y else None
            return dx, dy

        record(out, run, (x, y), (x if for_y else None, y if for_x else None))
    return out


def addmm(bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return bias + x·y of two matrices, as in Hugging Face's GPT-2: y is in x out."""
    x, y, bias = autocast(x), autocast(y), autocast(bias)  # type: ignore[assignment]
    out = _ran_mm(allocate((x.shape[0], y.shape[1]), x.dtype), x, y)
    m.machine().workspace()
    if wants(x, y, bias):
        for_x, for_y, rows, shape = x.requires_grad, y.requires_grad, x.shape, y.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, y = saved
            m.machine().workspace()
            dx = make("matmul_input", rows, grad.dtype, grad, y, of=(*rows, shape[1])) if for_x else None
            dy = make("matmul_weight", shape, grad.dtype, x, grad, of=(*shape, rows[0])) if for_y else None
            return grad, dx, dy

        record(out, run, (bias, x, y), (x if for_y else None, y if for_x else None))
    return out


def addmm_(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    m.machine().workspace()
    return _ran_mm(total, x, y)


def softmax(x: Tensor, dim: int = -1, dtype: DType | None = None) -> Tensor:
    """Return the softmax, in fp32 by autocast; a card's kernel makes that of fp16 itself (`half_to_float`)."""
    kind = dtype or (float32 if m.machine().autocasting else x.dtype)
    if not (m.machine().cuda and x.dtype == float16 and kind == float32):
        x = to(x, kind)
    out = make("softmax", x.shape, kind, x)
    if wants(x):
        record(out, partial(_softmax_backward, x.dtype), (x,), (out,))
    return out


def _softmax_backward(own: DType, saved: list[Any], grad: Tensor) -> Grads:
    """Add the gradient times the output, which a card's kernel reads (softmax_backward_cuda_out)."""
    found = make("softmax_backward", grad.shape, own, grad, *saved)
    if m.machine().cuda:
        allocate(grad.shape, grad.dtype, "workspace")
    return (found,)


def int_mm(x: Tensor, y: Tensor) -> Tensor:
    return mm(x, y, out_dtype=int32)


def mm(x: Tensor, y: Tensor, *, out: Tensor | None = None, out_dtype: DType | None = None, **_: Any) -> Tensor:
    made = out if out is not None else allocate((x.shape[0], y.shape[1]), out_dtype or x.dtype)
    m.machine().workspace()
    return _ran_mm(made, x, y)


def _ran_mm(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Distinguish a linear layer's matmuls: a weight's gradient sums over tokens, an input's reads the weight."""
    kind = "matmul"
    if len(y.shape) == 2:
        tokens = not {"B", "T", "n"}.isdisjoint(getattr(x.shape[-1], "letters", ()))
        kind = "matmul_weight" if tokens else "matmul_input" if m.machine().in_backward or is_contiguous(y) else kind
    note_kernel(kind, out, x, y, shape=_product(out.shape, x.shape[-1]))
    return out


def embedding(idx: Tensor, weight: Tensor) -> Tensor:
    out = allocate((*idx.shape, weight.shape[1]), weight.dtype)
    note_kernel("gather", out, out, idx)
    if wants(weight):
        shape = weight.shape

        def run(saved: list[Any], grad: Tensor) -> Grads:
            found = make("fill", shape, grad.dtype, component="temporaries")
            place = found.viewed((), ())
            note_kernel("scatter", place, grad, *saved, place)
            return (found,)

        record(out, run, (weight,), (idx,))
    return out


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0
) -> Tensor:
    """Return the result, and mean and 1/std of each row, which backward takes with x."""
    if m.machine().autocasting and x.dtype != float32:
        x = to(x, float32)
    out = allocate(x.shape, x.dtype)
    rows = (*x.shape[:-1], 1)
    stats = [allocate(rows, float32) for _ in range(2)]
    note_kernel("norm", (out, *stats), x, weight, bias)
    if wants(x, weight, bias):
        affine = [p.shape for p in (weight, bias) if p is not None]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            grads = [allocate(s, grad.dtype) for s in (grad.shape, *affine)]
            # another sums the weight's gradient
            note_kernel("norm_backward", grads, grad, *saved, grad if affine else None)
            return grads

        record(out, run, (x, *(p for p in (weight, bias) if p is not None)), (x, *stats))
    return out


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run one kernel on a card (aten _fused_rms_norm), with a number per row for backward."""
    out = allocate(x.shape, promoted(x.dtype, weight.dtype) if weight is not None else x.dtype)
    scale = allocate((*x.shape[:-1], 1), float32)
    note_kernel("norm", (out, scale), x, weight)
    if wants(x, weight):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            grads = [allocate(s.shape, grad.dtype) for s in (grad, weight) if s is not None]
            note_kernel("norm_backward", grads, grad, *saved, grad if weight is not None else None)
            return grads

        record(out, run, (x, weight) if weight is not None else (x,), (x, scale))
    return out


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    if not training or not p:
        return x
    out = allocate(x.shape, x.dtype)
    mask = allocate(x.shape, bool_ if m.machine().cuda else x.dtype, "activations.dropout")
    note_kernel("dropout", (out, mask), x)
    if wants(x):
        record(out, partial(_elementwise, kind="dropout"), (x,), (mask,))
    return out


def cross_entropy(logits: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """Run log_softmax and nll_loss, which on CUDA takes an fp32 copy (LossNLL.cpp); a CPU's autocast casts first."""
    machine = m.machine()
    machine.name = "loss"
    if machine.autocasting and not machine.cuda:
        logits = to(logits, float32)
    logs = make("softmax", logits.shape, logits.dtype, logits)
    if wants(logits):
        record(logs, partial(_elementwise, kind="softmax_backward"), (logits,), (logs,))
    if machine.autocasting:
        logs = to(logs, float32)
    return nll_loss(logs, targets)


def nll_loss(logs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean at the targets; its gradient is as large as the logarithms."""
    out, weight = allocate((), logs.dtype), allocate((), logs.dtype)
    note_kernel("gather", (out, weight), targets, targets)
    if wants(logs):
        shape, dtype = logs.shape, logs.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            found = make("fill", shape, dtype)
            note_kernel("scatter", (), saved[1])
            return (found,)

        record(out, run, (logs,), (logs, targets, weight))
    return out


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """See attention.py; before torch 2.0 written out. Boolean masks become numbers (convert_boolean_attn_mask)."""
    q, k, v = autocast(q), autocast(k), autocast(v)  # type: ignore[assignment]
    if m.machine().attention(wants(q, k, v)) == "written":
        m.machine().name = "attention"
        scores = mul(mul(matmul(q, transpose(k, -2, -1)), 1.0), 1.0)
        return matmul(dropout(softmax(scores), dropout_p), v)
    mask = None if attn_mask is None else make("add", attn_mask.shape, q.dtype, attn_mask)
    return attend(q, k, v, dropout_p, mask)

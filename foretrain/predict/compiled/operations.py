"""torch's functions as AOTAutograd decomposes them (torch/_inductor/decomposition.py, torch/_decomp/decompositions.py),
lowered to what is asked about: what is elementwise, a sum, or a library's kernel. No torch."""

from collections.abc import Sequence
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, Parameter, record, wants
from foretrain.predict.abstract.modules import DEVICE
from foretrain.predict.abstract.tensors import DType, Tensor, bool_, contiguous_strides, float32, int64
from foretrain.predict.abstract.views import joined, product, reduced, result_of
from foretrain.predict.compiled.graph import EXTERN, GATHER, POINTWISE, RANDOM, REDUCTION, Traced, emit, item, node_of


def point(name: str, shape: Sequence[int], dtype: DType, *inputs: Any) -> Traced:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return emit(name, POINTWISE, tensors, shape, dtype, *(x for x in inputs if not isinstance(x, Tensor)))


def total(x: Tensor, shape: Sequence[int], name: str = "sum") -> Traced:
    return emit(name, REDUCTION, (x,), shape, x.dtype)


def convert(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else traced(x).cast(dtype)


def traced(x: Tensor) -> Traced:
    return x if isinstance(x, Traced) else Traced(node_of(x), x.shape, x.strides)


def _result(name: str, x: Tensor, y: Any) -> Traced:
    if not isinstance(y, Tensor):
        out = point(name, x.shape, x.dtype, x, y)
        return Traced(out.value, x.shape, x.strides)
    shape, dtype = result_of(x, y)
    out = point(name, shape, dtype, x, y)
    same = tuple(shape) == tuple(x.shape)
    return Traced(out.value, shape, x.strides if same else None)


def add(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
    out = _result("add", x, y)
    inputs = (x, y) if isinstance(y, Tensor) else (x,)
    if wants(*inputs):
        record(out, lambda saved, grad: (grad,) * len(inputs), inputs)
    return out


def mul(x: Tensor, y: Any) -> Tensor:
    out = _result("mul", x, y)
    if not isinstance(y, Tensor):
        if wants(x):
            record(out, lambda saved, grad: (_result("mul", grad, y),), (x,))
    elif wants(x, y):
        record(out, _product_backward, (x, y), (x, y))
    return out


def _product_backward(saved: list[Any], grad: Tensor) -> Grads:
    x, y = saved
    return _result("mul", grad, y), _result("mul", grad, x)


def div(x: Tensor, y: Any) -> Tensor:
    return mul(x, y if isinstance(y, Tensor) else 1 / y)


def neg(x: Tensor) -> Tensor:
    out = _result("neg", x, -1)
    if wants(x):
        record(out, lambda saved, grad: (_result("neg", grad, -1),), (x,))
    return out


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    product = mul(a, b)
    return add(x, product if value == 1 else mul(product, value))


def to(x: Tensor, dtype: Any, *_: Any, **__: Any) -> Tensor:
    if not isinstance(dtype, DType) or x.dtype == dtype:
        return x
    out = traced(x).cast(dtype)
    if wants(x):
        own = x.dtype
        record(out, lambda saved, grad: (convert(grad, own),), (x,))
    return out


def to_float(x: Tensor) -> Tensor:
    return to(x, float32)


def roll(x: Tensor, *by: Any) -> Tensor:
    out = point("roll", x.shape, x.dtype, x, by)
    if wants(x):
        record(out, lambda saved, grad: (point("roll", grad.shape, grad.dtype, grad, by, -1),), (x,))
    return out


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(parts[0].shape)
    shape = joined(parts, dim)
    out = emit("cat", POINTWISE, list(parts), shape, parts[0].dtype, dim)
    if wants(*parts):
        sizes = [part.shape for part in parts]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            return [grad.viewed(size, grad.strides, i) for i, size in enumerate(sizes)]

        record(out, run, parts)
    return out


def gelu(x: Tensor, **_: Any) -> Tensor:
    wide = convert(x, float32)
    half, turned = point("mul", x.shape, float32, wide, 0.5), point("mul", x.shape, float32, wide, 0.7)
    erf = point("erf", x.shape, float32, turned)
    out = convert(point("mul", x.shape, float32, half, point("add", x.shape, float32, erf, 1)), x.dtype)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            grad, (x,) = convert(grad, float32), saved
            wide = convert(x, float32)
            erf = point("erf", x.shape, float32, point("mul", x.shape, float32, wide, 0.7))
            cdf = point("mul", x.shape, float32, point("add", x.shape, float32, erf, 1), 0.5)
            square = point("mul", x.shape, float32, point("mul", x.shape, float32, wide, wide), -0.5)
            pdf = point("mul", x.shape, float32, point("exp", x.shape, float32, square), 0.4)
            slope = point("add", x.shape, float32, cdf, point("mul", x.shape, float32, wide, pdf))
            return (convert(point("mul", x.shape, float32, grad, slope), x.dtype),)

        record(out, run, (x,), (x,))
    return out


def silu(x: Tensor, **_: Any) -> Tensor:
    wide, s = convert(x, float32), x.shape
    below = point("add", s, float32, point("exp", s, float32, point("neg", s, float32, wide)), 1)
    out = convert(point("div", s, float32, wide, below), x.dtype)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            wide = convert(saved[0], float32)
            sigmoid = point("sigmoid", s, float32, wide)
            product = point("mul", s, float32, convert(grad, float32), sigmoid)
            rest = point("mul", s, float32, wide, point("sub", s, float32, 1, sigmoid))
            slope = point("mul", s, float32, product, point("add", s, float32, rest, 1))
            return (convert(slope, saved[0].dtype),)

        record(out, run, (x,), (x,))
    return out


def relu(x: Tensor, **_: Any) -> Tensor:
    out = point("relu", x.shape, x.dtype, x)
    if wants(x):
        record(out, lambda saved, grad: (point("threshold", grad.shape, grad.dtype, grad, saved[0]),), (x,), (out,))
    return out


def tanh(x: Tensor) -> Tensor:
    """Return tanh; the slope is computed in fp32 from the result."""
    s, f = x.shape, float32
    out = point("tanh", s, x.dtype, x)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            wide = convert(saved[0], f)
            slope = point("sub", s, f, 1, point("mul", s, f, wide, wide))
            return (convert(point("mul", s, f, convert(grad, f), slope), grad.dtype),)

        record(out, run, (x,), (out,))
    return out


def pow(x: Tensor, power: float) -> Tensor:
    out = point("pow", x.shape, x.dtype, x, power)
    out = Traced(out.value, x.shape, x.strides)
    if wants(x):
        out_dtype = x.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            (x,) = saved
            lower = x if power == 2 else point("pow", x.shape, out_dtype, x, power - 1)
            return (point("mul", x.shape, out_dtype, grad, point("mul", x.shape, out_dtype, lower, power)),)

        record(out, run, (x,), (x,))
    return out


def rsqrt(x: Tensor, *_: Any) -> Tensor:
    """Return 1 / √x; its slope is computed from the result."""
    out = point("rsqrt", x.shape, x.dtype, x)
    if wants(x):
        s, dtype = x.shape, x.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            cube = point("pow", s, dtype, saved[0], 3)
            return (point("mul", s, dtype, point("mul", s, dtype, grad, -0.5), cube),)

        record(out, run, (x,), (out,))
    return out


def pad(x: Tensor, sides: tuple[int, int], **_: Any) -> Tensor:
    return point("pad", (*x.shape[:-1], int(x.shape[-1]) + sum(sides)), x.dtype, x, sides)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return point("where", x.shape, x.dtype, condition, x, y)


def arange(*bounds: Any, dtype: DType = int64, **_: Any) -> Tensor:
    first, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    count = end if not first and step == 1 else -(-(end - first) // step)
    return emit("iota", POINTWISE, (), (count,), dtype)


def zeros(*shape: Any, dtype: DType = float32, **_: Any) -> Tensor:
    whole = len(shape) == 1 and isinstance(shape[0], tuple | list)
    return emit("full", POINTWISE, (), shape[0] if whole else shape, dtype)


def zeros_like(x: Tensor, *, dtype: DType | None = None, **_: Any) -> Tensor:
    return emit("full", POINTWISE, (), x.shape, dtype or x.dtype)


def along(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    return total(x, reduced(x, dim, keepdim))


def vector_norm(x: Tensor, *, dim: int, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    square = point("pow", x.shape, float32, convert(x, float32), 2)
    summed = total(square, reduced(x, dim, keepdim))
    return point("pow", summed.shape, float32, summed, 0.5)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: DType | None = None, **_: Any) -> Tensor:
    out = total(convert(x, float32), reduced(x, dim, keepdim), "mean")
    out = traced(convert(out, x.dtype))
    if wants(x):
        shape, own = x.shape, x.dtype
        record(out, lambda saved, grad: (point("div", shape, own, grad),), (x,))
    return out


def autocast(x: Tensor | None) -> Tensor | None:
    machine = m.machine()
    low = machine.low
    if x is None or not machine.autocasting or low is None or x.dtype.itemsize < 4 or x.dtype == int64:
        return x
    out = traced(x).cast(low, "weight_copies" if isinstance(x, Parameter) else None)
    if wants(x):
        own = x.dtype
        record(out, lambda saved, grad: (convert(grad, own),), (x,))
    return out


def _rows(x: Tensor) -> Tensor:
    if len(x.shape) == 2:
        return x
    rows = product(x.shape[:-1])
    return traced(x).viewed((rows, x.shape[-1]), contiguous_strides((rows, x.shape[-1])))


def _matmul(x: Tensor, y: Tensor, *others: Tensor) -> Traced:
    return emit("mm", EXTERN, (x, y, *others), (x.shape[0], y.shape[1]), x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weight, bias, x = autocast(weight), autocast(bias), autocast(x)  # type: ignore[assignment]
    turned = _turned(weight)
    rows = _rows(x)
    product = _matmul(rows, turned, *(() if bias is None else (bias,)))
    shape = (*x.shape[:-1], weight.shape[0])
    out = product if len(x.shape) == 2 else product.viewed(shape, contiguous_strides(shape))
    if wants(x, weight, bias):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            rows, turned = saved
            flat = _rows(grad)
            back = traced(turned).viewed((turned.shape[1], turned.shape[0]), (1, 2))
            across = traced(flat).viewed((flat.shape[1], flat.shape[0]), (1, 2))
            if bias_shape is None:
                dw, dx = _matmul(across, rows), _matmul(flat, back) if for_x else None
            else:
                dx, dw = _matmul(flat, back) if for_x else None, _matmul(across, rows)
            if dx is not None and len(x_shape) > 2:
                dx = dx.viewed(x_shape, contiguous_strides(x_shape))
            return dx, dw, None if bias_shape is None else total(flat, bias_shape)

        for_x, x_shape, bias_shape = x.requires_grad, x.shape, None if bias is None else bias.shape
        record(out, run, (x, weight, bias), (rows, turned))
    return out


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    weight, bias, x = autocast(weight), autocast(bias), autocast(x)  # type: ignore[assignment]
    out = _matmul(x, weight, bias)
    if wants(x, weight, bias):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, weight = saved
            dx = _matmul(grad, _turned(weight)) if for_x else None
            return total(grad, bias_shape), dx, _matmul(_turned(x), grad)

        for_x, bias_shape = x.requires_grad, bias.shape
        record(out, run, (bias, x, weight), (x, weight))
    return out


def _turned(weight: Tensor) -> Traced:
    return traced(weight).viewed((weight.shape[1], weight.shape[0]), (1, 2))


def mm(x: Tensor, y: Tensor, *, out: Tensor | None = None, out_dtype: DType | None = None) -> Tensor:
    return _matmul(x, y)


def embedding(idx: Tensor, weight: Tensor) -> Tensor:
    """Return rows of the weight; the gradient's rows are added to zeros, in fp32."""
    out = emit("embedding", GATHER, (weight, idx), (*idx.shape, weight.shape[1]), weight.dtype)
    if wants(weight):
        shape, own = weight.shape, weight.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            zero = emit("full", POINTWISE, (), shape, float32)
            table = emit("index_put", EXTERN, (zero, saved[0], grad), shape, float32)
            return (convert(table, own),)

        record(out, run, (weight,), (idx,))
    return out


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0
) -> Tensor:
    own = x.dtype
    if m.machine().autocasting and own != float32:
        x = to(x, float32)
        own = float32
    rows = (*x.shape[:-1], 1)
    wide = convert(x, float32)
    both = emit("var_mean", REDUCTION, (wide,), (*rows[:-1], 2), float32).value
    var, middle = item(both, 0, rows, float32), item(both, 1, rows, float32)
    scale = point("rsqrt", rows, float32, point("add", rows, float32, var, 1e-5))
    y = point("mul", x.shape, float32, point("sub", x.shape, float32, wide, middle), scale)
    for factor, name in ((weight, "mul"), (bias, "add")):
        if factor is not None:
            y = point(name, x.shape, float32, y, factor)
    out = traced(convert(y, own))
    if wants(x, weight, bias):
        affine = [p for p in (weight, bias) if p is not None]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, middle, scale = saved
            s, f = x.shape, float32
            grad, wide = convert(grad, f), convert(x, f)
            normed = point("mul", s, f, point("sub", s, f, wide, middle), scale)
            inner = grad if weight is None else point("mul", s, f, grad, weight)
            n = point("mul", s, f, inner, "n")
            first = total(inner, rows)
            second = total(point("mul", s, f, inner, normed), rows)
            both = point("sub", s, f, point("sub", s, f, n, first), point("mul", s, f, normed, second))
            dx = point("mul", s, f, point("div", rows, f, scale, "n"), both)
            found: list[Tensor] = [convert(dx, x.dtype)]
            if weight is not None:
                found.append(convert(total(point("mul", s, f, grad, normed), weight.shape), weight.dtype))
            if bias is not None:
                found.append(convert(total(grad, bias.shape), bias.dtype))
            return found

        record(out, run, (x, *affine), (x, middle, scale))
    return out


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / rms(x)·w, in fp32 (_fused_rms_norm)."""
    s, f, rows = x.shape, float32, (*x.shape[:-1], 1)
    wide = convert(x, f)
    mean = total(point("pow", s, f, wide, 2), rows, "mean")
    scale = point("rsqrt", rows, f, point("add", rows, f, mean, eps or 0))
    y = point("mul", s, f, wide, scale)
    if weight is not None:
        y = point("mul", s, f, y, weight)
    dtype = x.dtype if weight is None else result_of(x, weight)[1]
    out = traced(convert(y, dtype))
    if wants(x, weight):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            x, scale = saved
            grad, wide = convert(grad, f), convert(x, f)
            inner = grad if weight is None else point("mul", s, f, grad, weight)
            normed = point("mul", s, f, wide, scale)
            along = total(point("mul", s, f, normed, inner), rows)
            rest = point("mul", s, f, point("div", s, f, normed, "n"), along)
            dx = point("mul", s, f, point("sub", s, f, inner, rest), scale)
            if weight is None:
                return (convert(dx, x.dtype),)
            dw = total(point("mul", s, f, grad, normed), weight.shape)
            return convert(dx, x.dtype), convert(dw, weight.dtype)

        record(out, run, (x,) if weight is None else (x, weight), (x, scale))
    return out


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    if not training or not p:
        return x
    mask = point("gt", x.shape, bool_, emit("rand", RANDOM, (), x.shape, float32), p)
    mask.value.component = "activations.dropout"
    kept = point("mul", x.shape, x.dtype, point("mul", x.shape, x.dtype, mask, x), 1 / (1 - p))
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            kept = point("convert", grad.shape, grad.dtype, saved[0])
            scaled = point("mul", grad.shape, grad.dtype, kept, 1 / (1 - p))
            return (point("mul", grad.shape, grad.dtype, grad, scaled),)

        record(kept, run, (x,), (mask,))
    return kept


def cross_entropy(logits: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """Return the mean of log-sum-exp less the logit of the target, in fp32."""
    s, f, rows = logits.shape, float32, (logits.shape[0], 1)
    wide = convert(logits, f)
    top = total(wide, rows, "amax")
    moved = point("sub", s, f, wide, top)
    log = point("log", rows, f, total(point("exp", s, f, moved), rows))
    logs = point("sub", s, f, moved, log)
    ignored = point("ne", targets.shape, bool_, targets, -1)
    column = point("where", rows, int64, ignored, targets, 0)
    at = emit("gather", POINTWISE, (logs, column), rows, f)
    lost = point("where", targets.shape, f, ignored, point("neg", targets.shape, f, at))
    count = convert(emit("sum", REDUCTION, (ignored,), (), int64), f)
    out = point("div", (), f, emit("sum", REDUCTION, (lost,), (), f), count)
    if wants(logits):
        own = logits.dtype

        def run(saved: list[Any], grad: Tensor) -> Grads:
            logs, targets, count = saved
            each = point("div", (), f, grad, count)
            ignored = point("ne", rows, bool_, targets, -1)
            column = point("where", rows, int64, ignored, targets, 0)
            hit = point("where", s, f, point("eq", s, bool_, column, "iota", int64), -1, 0)
            weight = point("where", rows, f, ignored, each, 0)
            hit = point("mul", s, f, hit, weight)
            softmax = point("mul", s, f, point("exp", s, f, logs), total(hit, rows))
            return (convert(point("sub", s, f, hit, softmax), own),)

        record(out, run, (logits,), (logs, targets, count))
    return out


def _in_place(name: str) -> Any:
    """Return a function that changes values: a new node under the old name."""

    def call(x: Any, *others: Any, **_: Any) -> Any:
        x.value = point(name, x.shape, x.dtype, x, *others).value
        return x

    return call


def _plain(name: str) -> Any:
    return lambda x, *others, **named: point(name, x.shape, x.dtype, x, *others, *named.values())


METHODS: dict[str, Any] = {
    "add": add, "__add__": add, "__radd__": add, "sub": add, "__sub__": add, "__rsub__": add,
    "mul": mul, "__mul__": mul, "__rmul__": mul, "div": div, "__truediv__": div, "__neg__": neg,
    "to": to, "float": to_float, "type_as": lambda x, y: to(x, y.dtype), "roll": roll,
    "mean": mean, "sum": along, "amax": along, "rsqrt": rsqrt, "device": property(lambda x: DEVICE),
    "pow": pow, **{name: _plain(name) for name in ("clamp", "cos", "sin", "log", "tril", "triu", "__rpow__")},
    **{name: _in_place(name.strip("_")) for name in (
        "square_", "mul_", "add_", "sub_", "rsqrt_", "exp_", "neg_", "clamp_", "div_", "__iadd__",
    )},
}  # fmt: skip
for _name, _value in METHODS.items():
    setattr(Traced, _name, _value)


def _of_machine(name: str) -> Any:
    """Return a method of weights, which are not nodes before their first use: that of the machine that runs."""
    eager, own = getattr(Tensor, name), METHODS[name]
    return lambda x, *others, **named: (own if _traces() else eager)(x, *others, **named)


def _traces() -> bool:
    return m.machine() is not None and m.machine().traces


for _name in ("add", "__add__", "__radd__", "mul", "__mul__", "__rmul__", "to", "float"):
    setattr(Parameter, _name, _of_machine(_name))

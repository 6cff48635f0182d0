"""scaled_dot_product_attention as AOTAutograd sees it: one kernel, or the math path in small operations. No torch."""

from collections.abc import Sequence
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract import views
from foretrain.predict.abstract.attention import padded
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.tensors import DType, Tensor, bool_, float32
from foretrain.predict.compiled.graph import EXTERN, REDUCTION, Traced, compiler, emit, item, node_of
from foretrain.predict.compiled.operations import add, autocast, convert, dropout, mul, point, to, total, traced


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """A kernel of PyTorch's own, or the math path, which Inductor fuses. FlashAttention takes no mask."""
    q, k, v = autocast(q), autocast(k), autocast(v)  # type: ignore[assignment]
    kind = m.machine().attention(wants(q, k, v))
    D = q.shape[-1]
    if attn_mask is not None:
        bias = point("where", attn_mask.shape, q.dtype, attn_mask)
        return _fused("efficient" if kind in ("flash", "math") else kind, q, k, v, dropout_p, bias)
    if kind == "math":
        return _math(q, k, v, dropout_p)
    width = padded(D) if kind == "flash" else D
    if width is D:
        return _fused(kind, q, k, v, dropout_p)
    return _narrowed(_fused(kind, _padded(q, width), _padded(k, width), _padded(v, width), dropout_p), D)


def _padded(x: Tensor, width: int) -> Tensor:
    """Pad heads to a multiple of 8, which FlashAttention needs."""
    own = x.shape
    out = point("pad", (*own[:-1], width), x.dtype, x)
    out = Traced(out.value, out.shape, by_rows(out.shape))
    if wants(x):
        record(out, lambda saved, grad: (traced(grad).viewed(own, grad.strides),), (x,))
    return out


def _narrowed(x: Tensor, width: int) -> Tensor:
    whole = x.shape
    out = traced(x).viewed((*whole[:-1], width), x.strides)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            wide = point("pad", whole, grad.dtype, grad)
            return (Traced(wide.value, whole, by_rows(whole)),)

        record(out, run, (x,))
    return out


def _fused(kind: str, q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: Tensor | None = None) -> Tensor:
    B, H, T, D = q.shape
    masks = () if bias is None else (bias,)
    out, lse = kernel("attention", (q, k, v, *masks), [((B, H, T, D), q.dtype), ((B, H, T), float32)], kind, dropout)
    out = Traced(out.value, (B, H, T, D), by_rows(q.shape))
    if wants(q, k, v):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            shapes = [(x.shape, x.dtype) for x in saved[:3]]
            found = kernel("attention_backward", (grad, *saved), shapes, kind, dropout)
            return [Traced(x.value, x.shape, by_rows(x.shape)) for x in found]

        record(out, run, (q, k, v), (q, k, v, out, lse, *masks))
    return out


def by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides of B x H x T x D that lie in memory as B x T x H x D."""
    _, H, T, D = shape
    return (T * H * D, D, H * D, 1)


def _math(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    low, T = q.dtype, q.shape[2]
    q, k, v = (to(x, float32) for x in (q, k, v))
    scores = _bmm(mul(q, 0.5), mul(views.transpose(k, 2, 3), 0.5), low)
    mask = point("mask", (T, T), float32)
    weights = dropout(_softmax(add(scores, mask), low), dropout_p)
    return to(_bmm(weights, v, low), low)


def _bmm(x: Tensor, y: Tensor, low: DType) -> Tensor:
    """Return x·y of each head, whose matrices are contiguous. Backward is in half precision under autocast."""
    x, y = _laid_out(x), _laid_out(y)
    out = emit("bmm", EXTERN, (x, y), (*x.shape[:-1], y.shape[-1]), x.dtype)
    if wants(x, y):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            own = grad.dtype
            grad, x, y = (convert(each, low) for each in (grad, *saved))
            over, across = views.transpose(y, 2, 3), views.transpose(x, 2, 3)
            dy = emit("bmm", EXTERN, (across, grad), y.shape, low)
            dx = emit("bmm", EXTERN, (grad, over), x.shape, low)
            return convert(dx, own), convert(dy, own)

        record(out, run, (x, y), (x, y))
    return out


def _laid_out(x: Tensor) -> Tensor:
    if views.is_contiguous(x):
        return x
    out = point("clone", x.shape, x.dtype, x)
    if wants(x):
        record(out, views.identity, (x,))
    return out


def _softmax(x: Tensor, low: DType) -> Tensor:
    s, f, rows = x.shape, float32, (*x.shape[:-1], 1)
    power = point("exp", s, f, point("sub", s, f, x, total(x, rows, "amax")))
    out = point("div", s, f, power, total(power, rows))
    if low.itemsize == 2:  # rows without a single finite score (_safe_softmax)
        hidden = point("eq", s, bool_, x, "-inf")
        some = emit("any", REDUCTION, (point("not", s, bool_, hidden),), rows, bool_)
        out = point("where", s, f, point("not", rows, bool_, some), out)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            product = point("mul", s, f, grad, saved[0])
            return (point("fma", s, f, saved[0], total(product, rows), product),)

        record(out, run, (x,), (out,))
    return out


def causal_attention(qkv: Tensor, H: int) -> Tensor:
    """model/attention.py, one operation for the compiler too: attention as batched matmuls, B x T x 3C to B x T x C."""
    B, T, width = qkv.shape
    scores = m.machine().t.symbols["kept"]
    shapes: list[tuple[tuple[int, ...], DType]] = [((B, T, width // 3), qkv.dtype), ((B, T, width), qkv.dtype)]
    if scores:
        shapes.append(((Dim(scores, 1, ("kept",)),), qkv.dtype))
    out, *saved = kernel("products", (qkv,), shapes, H)
    if wants(qkv):
        shape, dtype = qkv.shape, qkv.dtype
        record(out, lambda held, grad: kernel("products_backward", (grad, *held), [(shape, dtype)], H), (qkv,), saved)
    return out


def kernel(name: str, inputs: Sequence[Tensor], results: Any, *detail: Any) -> list[Traced]:
    of = compiler().graph.add(name, EXTERN, [node_of(x) for x in inputs], (), float32, *detail)
    return [item(of, i, shape, dtype) for i, (shape, dtype) in enumerate(results)]

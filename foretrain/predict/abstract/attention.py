"""scaled_dot_product_attention on tensors without values: what each of its kernels makes, saves and frees.

The fused kernels keep their output and a log-sum-exp for each row. The math path (aten/src/ATen/native/transformers/
attention.cpp, _scaled_dot_product_attention_math) writes the B x H x T x T scores out, in fp32 whatever the dtype.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.tensors import Tensor, allocate, bool_, float32, passing

HERE = "activations.attention"


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """B x H x T x D of queries, keys and values to the same of results."""
    kind = m.machine.attention(wants(q, k, v))
    if kind == "math":
        return _math(q, k, v, dropout)
    return _fused(kind, q, k, v, dropout)


def _place() -> str | None:
    """The component of an activation; a gradient has the default one."""
    return None if m.machine.in_backward else HERE


def _by_rows(like: Tensor, width: int) -> Tensor:
    """B x T x H x D in memory, seen as B x H x T x D: how fused kernels write their results."""
    B, H, T, _ = like.shape
    out = allocate((B, T, H, width), like.dtype, _place())
    s = out.strides
    return Tensor((B, H, T, width), (s[0], s[2], s[1], s[3]), out.dtype, out.storage)


def _padded(width: int) -> int:
    wide = -(-int(width) // 8) * 8
    return Dim(wide, 1, ("E",)) if wide != width else width


def _fused(kind: str, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    machine = m.machine
    B, H, T, D = q.shape
    width = _padded(D) if kind == "flash" else D
    inputs = [q, k, v]
    if width is not D:  # FlashAttention takes heads of a multiple of 8 only (pad_last_dim in attention.cpp)
        inputs = [_by_rows(x, width) for x in inputs]
    whole = _by_rows(q, width)
    lse = allocate((B, H, T), float32, HERE)
    if kind == "flash" and machine.cuda and not dropout:
        passing(1, "split")
    out = whole if width is D else whole.viewed(q.shape, whole.strides)
    out = out.detach()
    if wants(q, k, v):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            copies = []
            if width is not D:
                grad = _by_rows(grad, width)
                copies = [_by_rows(grad, width) for _ in range(2)] if int(H) > 1 else []
            shape = [_by_rows(x, width) for x in saved[:3]]
            if kind in ("flash", "cudnn") and machine.cuda:
                passing(1, "flash")
            copies.clear()
            return [x.viewed((*x.shape[:-1], D), x.strides) for x in shape]

        record(out, run, (q, k, v), (*inputs, whole, lse))
    return out


def _math(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Scale q and k, multiply, softmax, drop, multiply by v; in fp32."""
    machine, low, learns = m.machine, q.dtype, wants(q, k, v)
    B, H, T, D = q.shape
    heads, scores = (B, H, T, D), (B, H, T, T)
    half, lays_out = low.itemsize == 2, int(B) > 1 and int(H) > 1

    def made(shape: Sequence[int], dtype: m.DType = float32) -> Tensor:
        return allocate(shape, dtype, _place())

    casts = [made(heads) for _ in range(3)] if half else []
    factors = [made(heads)]  # q, scaled
    names = [made((T, T))]  # the causal mask
    factors.append(made(heads))  # k, scaled
    if lays_out:  # a product of batches copies factors whose batch and head cannot be seen as one dimension
        names.append(factors[0])
        factors = [factors[1], made(heads), made(heads)]
    products = made(scores)
    if lays_out:
        del factors[0]
    if not learns:
        names += [] if lays_out else factors[:1]
        factors = []
    # Rows without a single finite score are looked for in a tensor of booleans (_safe_softmax).
    rows = allocate(scores, bool_, "workspace")
    weights = [made(scores)]
    del products, rows
    if learns and dropout:
        weights += [made(scores), allocate(scores, bool_ if machine.cuda else float32, "activations.dropout")]
    if half:
        names.append(made(scores, low))  # returned besides the output
    value = made(heads) if lays_out else (casts.pop() if casts else v)
    out = made(heads)
    if half:
        names.append(out)
        out = made(heads, low)
    casts.clear()
    names.clear()
    if learns:
        run = partial(_math_backward, low, lays_out)
        record(out, run, (q, k, v), (*factors, *weights, value), composite=True)
    return out


def _math_backward(low: m.DType, lays_out: bool, saved: list[Any], grads: list[Tensor]) -> Grads:
    """Back through the product, dropout, softmax, the product of q and k, their scaling, and the casts."""
    q, k, softmax, *dropped, v = saved
    saved.clear()
    grad = grads.pop()
    half, heads, scores = low.itemsize == 2, grad.shape, softmax.shape
    if half:
        grad = grad.cast(float32)
    if lays_out:
        grad = allocate(heads, float32)
    dv, ds = allocate(heads, float32), allocate(scores, float32)
    del grad, v
    if dropped:
        del dropped[0]
        before, ds = ds, allocate(scores, float32)
        del before
        dropped.clear()
    before, ds = ds, allocate(scores, float32)
    if m.machine.cuda:  # the gradient times the output
        allocate(scores, float32, "workspace")
    del before, softmax
    dq, dk = allocate(heads, float32), allocate(heads, float32)
    del ds, q, k
    dk = allocate(heads, float32)  # scaled
    dq = allocate(heads, float32)
    return tuple(x.cast(low) for x in (dq, dk, dv)) if half else (dq, dk, dv)


def causal_attention(qkv: Tensor, H: int) -> Tensor:
    """model/attention.py: attention as batched matmuls, for CPUs. B x T x 3C to B x T x C."""
    machine = m.machine
    B, T, width = qkv.shape
    C = width // 3
    t, low = machine.t, qkv.dtype
    keeps = t.symbols["kept"] > 0
    group = "halfgroup" if low.itemsize == 2 else "group"
    heads = allocate((B, T, width), low, HERE)
    kept = [_storage(low.itemsize, "kept")] if keeps else []
    result = allocate((B, T, C), low, HERE)
    passing((1 if keeps else 2) * low.itemsize, group)
    out = allocate((B, T, C), low, HERE)
    del result
    if wants(qkv):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            dy, total = allocate((B, T, C), low), allocate((B, T, width), low)
            passing((2 if keeps else 3) * low.itemsize, group)
            laid_out = allocate((B, T, width), low)
            del dy, total
            return (laid_out,)

        record(out, run, (qkv,), (heads, *kept))
    return out


def _storage(coefficient: int, letter: str) -> Tensor:
    serial = m.machine.t.birth(HERE, 1, (), (coefficient, letter))
    return Tensor((), (), float32, m.Storage(m.machine.t, serial))

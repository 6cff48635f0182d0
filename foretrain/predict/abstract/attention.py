"""scaled_dot_product_attention on tensors without values. Fused kernels save their output and a log-sum-exp per row;
math (aten/src/ATen/native/transformers/attention.cpp) writes out the B x H x T x T scores, in fp32."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.tensors import Tensor, allocate, bool_, float32, make, note_kernel, take_temporary
from foretrain.predict.abstract.views import expand, reshape, unsqueeze

HERE = "activations.attention"


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    kind = m.machine().attention(wants(q, k, v))
    if kind == "math" and mask is not None and m.machine().cuda and int(k.shape[1]) == int(q.shape[1]):
        kind = "efficient"  # where there is a mask, keys are repeated before
    if kind == "math":
        return _math(q, k, v, dropout)
    if mask is not None and kind == "flash" and m.machine().cuda:
        kind = "efficient"
    if kind == "efficient" and int(k.shape[1]) != int(q.shape[1]):  # xformers: keys are repeated for each head
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    return _fused(kind, q, k, v, dropout, mask)


def _repeated(x: Tensor, heads: int) -> Tensor:
    B, K, T, D = x.shape
    return reshape(expand(unsqueeze(x, 2), B, K, int(heads) // int(K), T, D), B, heads, T, D)


def _place() -> str | None:
    return None if m.machine().in_backward else HERE


def _by_rows(like: Tensor, width: int, place: str | None = None) -> Tensor:
    """Return B x T x H x D in memory, viewed as B x H x T x D, as fused kernels write their results."""
    B, H, T, _ = like.shape
    out = allocate((B, T, H, width), like.dtype, place or _place())
    s = out.strides
    return Tensor((B, H, T, width), (s[0], s[2], s[1], s[3]), out.dtype, out.storage)


def _laid_out(kind: str, like: Tensor, width: int) -> Tensor:
    """Lay out as FlashAttention and cuDNN write it, in the input's order (flash_api.cpp); others write by rows."""
    B, H, T, _ = like.shape
    if kind in ("flash", "cudnn") and m.machine().cuda and like.strides[1] > like.strides[2] and int(T) > 1:
        return allocate((B, H, T, width), like.dtype, _place())
    return _by_rows(like, width)


def _copied(x: Tensor, width: int, place: str | None = None) -> Tensor:
    out = _by_rows(x, width, place)
    note_kernel("join", out, x)
    return out


def padded(width: int) -> int:
    """Return the width of a head that FlashAttention takes: a multiple of 8."""
    wide = -(-int(width) // 8) * 8
    return Dim(wide, 1, ("E",)) if wide != width else width


def _fused(kind: str, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None) -> Tensor:
    machine = m.machine()
    B, H, T, D = q.shape
    width = padded(D) if kind == "flash" else D
    inputs = [q, k, v]
    if width is not D:  # FlashAttention takes heads of a multiple of 8 only (pad_last_dim in attention.cpp)
        inputs = [_copied(x, width) for x in inputs]
    whole = _laid_out(kind, q, width)
    lse = allocate((B, H, T), float32, HERE)
    if kind == "flash" and machine.cuda and not dropout:
        take_temporary(1, "split")
    machine.name = "attention"
    note_kernel("attention", (whole, lse), *inputs, shape=(B, H, T, D))
    out = whole.detach()
    if wants(q, k, v):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            copies = [_copied(grad, width, "workspace") for _ in range(2)] if width is not D and int(H) > 1 else []
            shape = [_laid_out(kind, x, width) for x in saved[:3]]
            if kind in ("flash", "cudnn") and machine.cuda:
                take_temporary(1, "flash")
            note_kernel("attention_backward", shape, grad, *saved, shape=(B, H, T, D))
            copies.clear()
            return [x.viewed((*x.shape[:-1], D), x.strides) for x in shape]

        record(out, run, (q, k, v), (*inputs, whole, lse, mask))
    return out if width is D else _narrowed(out, D)


def _narrowed(whole: Tensor, D: int) -> Tensor:
    """Drop the padding. Its backward pass is a step of its own: the padded gradient ends before the kernel."""
    out = whole.viewed((*whole.shape[:-1], D), whole.strides)
    if wants(whole):
        width = whole.shape[-1]

        def run(saved: list[Any], grad: Tensor) -> Grads:
            return (_copied(grad, width),)

        record(out, run, (whole,))
    return out


def _math(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    machine, low, learns = m.machine(), q.dtype, wants(q, k, v)
    for_q, for_k, for_v = (learns and x.requires_grad for x in (q, k, v))
    B, H, T, D = q.shape
    heads, scores = (B, H, T, D), (B, H, T, T)
    half, lays_out, grouped = low.itemsize == 2, int(B) > 1 and int(H) > 1, int(k.shape[1]) != int(H)

    def made(
        kind: str, shape: Sequence[int], *inputs: Tensor, dtype: m.DType = float32, of: Sequence[int] = ()
    ) -> Tensor:
        return make(kind, shape, dtype, *inputs, component=_place(), of=of)

    machine.name = "attention"
    casts = [made("cast", x.shape, x) for x in (q, k, v)] if half else []
    factors = [made("add", heads, q)]  # q, scaled
    names = [made("fill", (T, T))]  # the causal mask
    if grouped:  # keys and values once for each head of queries (pre_process_group_query_attention_input)
        names += [made("join", heads, x) for x in (k, v)]
    factors.append(made("add", heads, k))  # k, scaled
    if lays_out:  # a product of batches copies factors whose batch and head cannot be seen as one dimension
        names.append(factors[0])
        # keys that were repeated can be seen so
        turned = factors[1] if grouped else made("join", heads, factors[1])
        factors = [factors[1], made("join", heads, factors[0]), turned]
        del turned
    matmuls = [made("matmul", scores, *factors[-2:], of=(B * H * T, T, D))]
    note_kernel("add", matmuls[0], matmuls[0], names[0])
    if lays_out:
        del factors[0]
    elif not for_k:
        names.append(factors[0])
    kept = [factors[0] if for_k else None, factors[1] if for_q else None]  # each for the other's gradient
    factors.clear()
    weights = _weights(matmuls, dropout if learns else 0.0)
    kept += weights[:-1] if for_q or for_k else [None] * (len(weights) - 1)
    dropped = weights.pop()
    weights.clear()
    if half:
        names.append(made("cast", scores, dropped, dtype=low))  # returned besides the output
    value = casts.pop() if casts else v
    if grouped or lays_out:
        value = names[2] if grouped else made("join", heads, v)
    out = made("matmul", heads, dropped, value, of=(B * H * T, D, T))
    if half:
        names.append(out)
        out = made("cast", heads, out, dtype=low)
    casts.clear()
    names.clear()
    if learns:
        kept += [dropped if for_v else None, value if for_q or for_k else None]
        run = partial(_math_backward, low, lays_out, k.shape)
        record(out, run, (q, k, v), kept, composite=True)
    return out


def _weights(matmuls: list[Tensor], dropout: float) -> list[Tensor]:
    """Return the softmax (_safe_softmax) of the scores, taken out of their list, its dropout mask, values' factor."""
    scores = matmuls.pop()
    shape = scores.shape
    rows = make("add", shape, bool_, scores, component="workspace")
    softmax = make("softmax", shape, float32, scores, component=_place())
    del scores, rows
    if not dropout:
        return [softmax, softmax]
    dropped = make("dropout", shape, float32, softmax, component=_place())
    return [softmax, allocate(shape, bool_ if m.machine().cuda else float32, "activations.dropout"), dropped]


def _math_backward(
    low: m.DType, lays_out: bool, shape: tuple[int, ...], saved: list[Any], grads: list[Tensor]
) -> Grads:
    """Go back through matmul, dropout, softmax, matmul of q and k, scaling and casts, for wanted gradients."""
    q, k, softmax, *mask, dropped, v = saved
    saved.clear()
    grad = grads.pop()
    half, heads, grouped = low.itemsize == 2, grad.shape, int(shape[1]) != int(grad.shape[1])
    scores = (*heads[:3], heads[2])
    if half:
        grad = grad.cast(float32)
    rows, T, D = heads[0] * heads[1] * heads[2], heads[2], heads[3]
    if lays_out:
        grad = make("join", heads, float32, grad)
    dv = make("matmul_weight", heads, float32, dropped, grad, of=(rows, D, T)) if dropped is not None else None
    ds = make("matmul_input", scores, float32, grad, v, of=(rows, T, D)) if v is not None else None
    del grad, v, dropped
    dq = dk = None
    if ds is not None:
        if mask:
            before, ds = ds, make("dropout", scores, float32, ds, mask[0])
            del before
            mask.clear()
        before, ds = ds, make("softmax_backward", scores, float32, ds, softmax)
        if m.machine().cuda:  # the gradient times the output
            allocate(scores, float32, "workspace")
        del before, softmax
        dq = make("matmul_input", heads, float32, ds, k, of=(rows, D, T)) if k is not None else None
        dk = make("matmul_input", heads, float32, ds, q, of=(rows, D, T)) if q is not None else None
        del ds, q, k
    if dk is not None:
        dk = make("add", heads, float32, dk)  # scaled
    if grouped:  # the sums of each group
        dv = dv and make("add", shape, float32, dv)
        dk = dk and make("add", shape, float32, dk)
    if dq is not None:
        dq = make("add", heads, float32, dq)
    return tuple(x.cast(low) if half and x is not None else x for x in (dq, dk, dv))


def causal_attention(qkv: Tensor, H: int) -> Tensor:
    """model/attention.py: attention as batched matmuls, for CPUs. B x T x 3C to B x T x C."""
    machine = m.machine()
    B, T, width = qkv.shape
    C = width // 3
    t, low = machine.t, qkv.dtype
    keeps = t.symbols["kept"] > 0
    group = "halfgroup" if low.itemsize == 2 else "group"
    heads = allocate((B, T, width), low, HERE)
    kept = [_storage(low.itemsize, "kept")] if keeps else []
    result = allocate((B, T, C), low, HERE)
    take_temporary((1 if keeps else 2) * low.itemsize, group)
    out = allocate((B, T, C), low, HERE)
    machine.name, shape = "attention", (B, H, T, C // H)
    note_kernel("attention_bmm", out, qkv, shape=shape)
    del result
    if wants(qkv):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            dy, total = allocate((B, T, C), low), allocate((B, T, width), low)
            take_temporary((2 if keeps else 3) * low.itemsize, group)
            laid_out = allocate((B, T, width), low)
            note_kernel("attention_bmm_backward", laid_out, saved[0], grad, grad, shape=shape)  # and the result
            del dy, total
            return (laid_out,)

        record(out, run, (qkv,), (heads, *kept))
    return out


def _storage(coefficient: int, letter: str) -> Tensor:
    serial = m.machine().t.allocate(HERE, 1, (), (coefficient, letter))
    return Tensor((), (), float32, m.Storage(m.machine().t, serial))

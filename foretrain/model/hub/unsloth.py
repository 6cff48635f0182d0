"""unsloth's functions (unsloth and unsloth_zoo 2026.10.9) as memory sees them, as in liger.py; no block is compiled.

kernels/rms_layernorm.py   saves the input and one number per row; the gradient overwrites the incoming one where
                           `in_place`; a frozen weight gets none
kernels/rope_embedding.py  rotates queries and keys in place; their gradients are new
kernels/qk_norm_rope.py    norms of heads and rotation in one kernel, where they are frozen, on a card
kernels/fast_lora.py       layers and adapters of an attention or an MLP in one function: layer outputs are saved, the
                           matmuls with an adapter are not; gradients overwrite what they are made of
kernels/utils.py           a 4-bit weight is unpacked into one shared buffer in forward, into its own in backward

N = B·T tokens, C width, F width inside the MLP, r rank, p dropout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.model.hub.kernels import launch, processors
from foretrain.model.hub.liger import Rms, Rotary


class _Rms(Rms):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, rates = ctx.saved_tensors
        flat = grads[0].reshape(-1, rows.shape[-1])
        found = flat if ctx.in_place else torch.empty_like(flat)
        of_weight = None
        if ctx.needs_input_grad[1]:
            sums = flat.new_empty((processors(flat.device), rows.shape[-1]), dtype=torch.float32)
            launch("triton_norm_backward", (found, sums), flat, rows, weight, rates)
            of_weight = sums.sum(0).to(weight.dtype)
        else:
            launch("triton_norm_backward", found, flat, rows, weight, rates)
        return found.view(grads[0].shape), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, *, in_place: bool) -> Tensor:
    out: Tensor = _Rms.apply(x, weight, in_place)
    return out


class _Rotary(Rotary):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        found = [_by_token(grad) for grad in grads]
        launch("triton_add", found, *grads, cos, sin)
        return found[0].transpose(1, 2), found[1].transpose(1, 2), None, None


def _by_token(x: Tensor) -> Tensor:
    B, heads, T, D = x.shape
    return x.new_empty((B, T, heads, D), dtype=x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _Rotary.apply(q, k, cos, sin)
    return q, k


class _NormedRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        turned = torch.empty_like(q), torch.empty_like(k)
        rates = [x.new_empty((x.shape[0] * x.shape[1], x.shape[2]), dtype=torch.float32) for x in (q, k)]
        launch("triton_norm", (*turned, *rates), q, k, of_q, of_k, cos, sin)
        ctx.save_for_backward(q, k, *rates, cos, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        q, k, *others = ctx.saved_tensors
        found = torch.empty_like(q), torch.empty_like(k)
        launch("triton_norm_backward", found, *grads, q, k, *others)
        return *found, None, None, None, None


def normed_rotary(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _NormedRotary.apply(q, k, of_q, of_k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


class Adapted(NamedTuple):
    """A frozen layer and its adapter. `dense(shared)`: the weight, out x in, unpacked into the common buffer where
    `shared`; `a`: r x in; `b`: out x r."""

    dense: Callable[[bool], Tensor]
    a: Tensor
    b: Tensor
    dropout: float = 0.0


def _added(total: Tensor, x: Tensor, y: Tensor, kind: str) -> None:
    launch(kind, total, x, y, total, shape=(*total.shape, x.shape[-1]))


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    if not p:
        return x, None
    out, mask = torch.empty_like(x), x.new_empty(x.shape, dtype=torch.bool)
    launch("dropout", (out, mask), x)
    return out, mask


def _again(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x
    out = torch.empty_like(x)
    launch("dropout", out, x, mask)
    return out


def _ran(x: Tensor, layer: Adapted, shared: bool) -> tuple[Tensor, Tensor | None]:
    taken, mask = _dropped(x, layer.dropout)
    out = x @ layer.dense(shared).t()
    low = taken @ layer.a.to(x.dtype).t()
    _added(out, low, layer.b.to(x.dtype).t(), "matmul")
    return out, mask


def _factors(layer: Adapted, x: Tensor, product: Tensor, grad: Tensor, room: tuple[Tensor, Tensor]) -> None:
    _added(room[0], product.t(), x, "matmul_weight")
    low = layer.a @ x.t()  # r x N: not saved by forward
    _added(room[1], grad.t(), low.t(), "matmul_weight")


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[Adapted, ...], in_place: bool, *_: Tensor) -> Tensor:
        gate, up, down = layers
        shared = not any(layer.dropout for layer in layers)
        rows = x.view(-1, x.shape[-1])
        e, of_gate = _ran(rows, gate, shared)
        g, of_up = _ran(rows, up, shared)
        h = torch.empty_like(e)
        launch("triton_gelu", h, e, g)
        out, of_down = _ran(h, down, shared)
        ctx.layers, ctx.in_place, ctx.shared = layers, in_place, shared
        ctx.save_for_backward(x, e, g, of_gate, of_up, of_down)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, e, g, *masks = ctx.saved_tensors
        gate, up, down = _narrow(ctx.layers, x)
        dy, rows = grads[0].reshape(-1, x.shape[-1]), x.view(-1, x.shape[-1])
        dh = dy @ down.dense(ctx.shared)
        if masks[2] is None:
            low = dy @ down.b
            _added(dh, low, down.a, "matmul_input")
            del low
        else:
            launch("add", dh, dh, _again((dy @ down.b) @ down.a, masks[2]))
        launch("triton_gelu_backward", (dh, e, g), dh, e, g)  # which are h, the gradients of up and of gate
        h = _again(dh, masks[2])
        room = [_room(layer) for layer in (down, gate, up)]
        _factors(down, h, dy @ down.b, dy, room[0])
        of_up, of_gate = e @ up.b, g @ gate.b
        _factors(up, _again(rows, masks[1]), of_up, e, room[2])
        _factors(gate, _again(rows, masks[0]), of_gate, g, room[1])
        dx = _first(rows if ctx.in_place else torch.empty_like(rows), e, up)
        _with_adapter(dx, of_up, up, masks[1])
        _next(dx, g, gate)
        _with_adapter(dx, of_gate, gate, masks[0])
        return dx.view(x.shape), None, None, *room[1], *room[2], *room[0]


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[Adapted, ...], in_place: bool, *_: Tensor) -> tuple[Tensor, ...]:
        shared = not any(layer.dropout for layer in layers)
        rows = x.view(-1, x.shape[-1])
        found, masks = zip(*[_ran(rows, layer, shared) for layer in layers], strict=True)
        ctx.layers, ctx.in_place = layers, in_place
        ctx.save_for_backward(x, *masks)
        return tuple([out.view(x.shape[0], x.shape[1], out.shape[-1]) for out in found])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *masks = ctx.saved_tensors
        layers, rows = _narrow(ctx.layers, x), x.view(-1, x.shape[-1])
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        room = [_room(layer) for layer in layers]
        grads_b = [grad @ layer.b for grad, layer in zip(flat, layers, strict=True)]
        for i, layer in enumerate(layers):
            _factors(layer, _again(rows, masks[i]), grads_b[i], flat[i], room[i])
        dx = _first(rows if ctx.in_place else torch.empty_like(rows), flat[0], layers[0])
        for i, layer in enumerate(layers):
            if i:
                _next(dx, flat[i], layer)
            _with_adapter(dx, grads_b[i], layer, masks[i])
        return dx.view(x.shape), None, None, *[part for pair in room for part in pair]


class _OneLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Adapted, *_: Tensor) -> Tensor:
        out, mask = _ran(x.view(-1, x.shape[-1]), layer, not layer.dropout)
        ctx.layer = layer
        ctx.save_for_backward(x, mask)
        return out.view(x.shape[0], x.shape[1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, mask = ctx.saved_tensors
        (layer,) = _narrow((ctx.layer,), x)
        dy, rows = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        room = _room(layer)
        product = dy @ layer.b
        _factors(layer, _again(rows, mask), product, dy, room)
        dx = dy @ layer.dense(False)
        _with_adapter(dx, product, layer, mask)
        return dx.view(x.shape), None, *room


def _narrow(layers: tuple[Adapted, ...], x: Tensor) -> tuple[Adapted, ...]:
    return tuple([layer._replace(a=layer.a.to(x.dtype), b=layer.b.to(x.dtype)) for layer in layers])


def _room(layer: Adapted) -> tuple[Tensor, Tensor]:
    return torch.empty_like(layer.a), torch.empty_like(layer.b)


def _first(dx: Tensor, grad: Tensor, layer: Adapted) -> Tensor:
    """Return the gradient of an input by its first layer, where there is room for it."""
    weight = layer.dense(False)
    launch("matmul_input", dx, grad, weight, shape=(*dx.shape, grad.shape[-1]))
    return dx


def _next(dx: Tensor, grad: Tensor, layer: Adapted) -> None:
    weight = layer.dense(False)
    _added(dx, grad, weight, "matmul_input")


def _with_adapter(dx: Tensor, product: Tensor, layer: Adapted, mask: Tensor | None) -> None:
    if mask is None:
        _added(dx, product, layer.a, "matmul_input")
    else:
        launch("add", dx, dx, _again(product @ layer.a, mask))


def _parts(layers: tuple[Adapted, ...]) -> list[Tensor]:
    return [part for layer in layers for part in (layer.a, layer.b)]


def lora_mlp(x: Tensor, gate: Adapted, up: Adapted, down: Adapted, *, in_place: bool = True) -> Tensor:
    """`in_place`: the input becomes its own gradient."""
    layers = gate, up, down
    out: Tensor = _Mlp.apply(x, layers, in_place, *_parts(layers))
    return out


def lora_qkv(x: Tensor, q: Adapted, k: Adapted, v: Adapted, *, in_place: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    layers = q, k, v
    found: tuple[Tensor, Tensor, Tensor] = _Qkv.apply(x, layers, in_place, *_parts(layers))
    return found


def lora_out(x: Tensor, layer: Adapted) -> Tensor:
    out: Tensor = _OneLayer.apply(x, layer, *_parts((layer,)))
    return out

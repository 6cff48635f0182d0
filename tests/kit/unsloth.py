"""unsloth's functions for CPUs, with values: they allocate what those of unsloth 2026.10.9 do around their Triton kernels
on a card, with numpy in the place of the kernels, whose memory PyTorch does not see. fp32 and bfloat16.

It knows nothing of foretrain; models are patched as unsloth.models.llama and unsloth_zoo do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.kit.liger import gelu_tanh, silu

# -- values that PyTorch does not see ------------------------------------------------------------------------


def read(x: Tensor) -> Any:
    if x.dtype == torch.bfloat16:
        return (x.detach().view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.detach().numpy()


def write(x: Tensor, values: Any) -> None:
    if x.dtype == torch.bfloat16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        x.detach().view(torch.int16).numpy().view(np.uint16)[...] = rounded.astype(np.uint16)
    else:
        x.detach().numpy()[...] = values


def mm(x: Tensor, y: Tensor, out: Tensor | None = None, dtype: Any = None) -> Tensor:
    """x·y. A card's kernel takes nothing for itself; a CPU's of bfloat16 does, so numpy multiplies."""
    out = torch.empty((x.shape[0], y.shape[1]), dtype=dtype or x.dtype) if out is None else out
    write(out, read(x) @ read(y))
    return out


def addmm_(out: Tensor, x: Tensor, y: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    write(out, (read(out) if beta else 0) + alpha * (read(x) @ read(y)))
    return out


# -- norms and positions -------------------------------------------------------------------------------------


class FastRms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float, offset: float, reuse: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y, r = torch.empty_like(flat), torch.empty(len(flat))
        write(r, 1 / np.sqrt((read(flat) ** 2).mean(1) + eps))
        write(y, read(flat) * read(r)[:, None] * (offset + read(w)))
        ctx.offset, ctx.reuse = offset, reuse
        ctx.save_for_backward(flat, w, r)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, r = ctx.saved_tensors
        dy = grads[0].reshape(x.shape)
        dx = dy if ctx.reuse else torch.empty_like(dy)
        normed, m = read(x) * read(r)[:, None], read(dy) * (ctx.offset + read(w))
        write(dx, read(r)[:, None] * (m - normed * (m * normed).mean(1, keepdims=True)))
        return dx.view(grads[0].shape), None, None, None, None


def turned(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    c, s = cos[None, : x.shape[1], None, :half], sin[None, : x.shape[1], None, :half]
    return np.concatenate((x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s), -1)


class FastRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.cos, ctx.sin = cos, sin
        found = []
        for x in (q, k):
            x = x.transpose(1, 2)
            out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
            write(out, turned(read(x), read(cos), read(sin)))
            found.append(out.transpose(1, 2).view(q.shape if x is q else out.transpose(1, 2).shape))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = [torch.empty(g.transpose(1, 2).shape, dtype=g.dtype) for g in grads]
        for g, out in zip(grads, found, strict=True):
            write(out, turned(read(g.transpose(1, 2)), read(ctx.cos), -read(ctx.sin)))
        return *[out.transpose(1, 2) for out in found], None, None


# -- layers with adapters ------------------------------------------------------------------------------------


def parts_of(layer: Any) -> tuple[Tensor, Tensor, Tensor, float]:
    return (
        layer.base_layer.weight,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.scaling["default"],
    )


def run(x: Tensor, w: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
    out = mm(x, w.t())
    low = mm(x, a.t().to(x.dtype))
    return addmm_(out, low, b.t().to(x.dtype), alpha=s)


class LoraMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        act, *flat = given
        gate, up, down = flat[:4], flat[4:8], flat[8:]
        rows = x.view(-1, x.shape[-1])
        e, g = run(rows, *gate), run(rows, *up)
        h = torch.empty_like(e)
        write(h, act(read(e))[0] * read(g))
        out = run(h, *down)
        ctx.act, ctx.frozen = act, [(layer[0], layer[3]) for layer in (gate, up, down)]
        ctx.save_for_backward(*gate[1:3], *up[1:3], *down[1:3], x, e, g)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *matrices, x, e, g = ctx.saved_tensors
        dy, rows = grads[0].reshape(-1, x.shape[-1]), x.view(-1, x.shape[-1])
        ga, gb, ua, ub, da, db = (m.to(x.dtype).t() for m in matrices)
        (gw, gs), (uw, us), (dw, ds) = ctx.frozen
        dh = mm(dy, dw)
        low = mm(dy, db.t())
        addmm_(dh, low, da.t(), alpha=ds)
        del low
        value, slope = ctx.act(read(e))
        of_h, up, gate = read(dh).copy(), read(g).copy(), value
        write(dh, gate * up)
        write(e, of_h * gate)
        write(g, of_h * up * slope)
        rooms = [torch.empty_like(m) for m in (da, db, ga, gb, ua, ub)]
        addmm_(rooms[0], dh.t(), mm(dy, db.t()), alpha=ds, beta=0)
        addmm_(rooms[1], mm(da.t(), dh.t()), dy, alpha=ds, beta=0)
        of_up, of_gate = mm(e, ub.t()), mm(g, gb.t())
        addmm_(rooms[4], rows.t(), of_up, alpha=us, beta=0)
        addmm_(rooms[5], mm(ua.t(), rows.t()), e, alpha=us, beta=0)
        addmm_(rooms[2], rows.t(), of_gate, alpha=gs, beta=0)
        addmm_(rooms[3], mm(ga.t(), rows.t()), g, alpha=gs, beta=0)
        dx = mm(e, uw, out=rows)
        addmm_(dx, of_up, ua.t(), alpha=us)
        addmm_(dx, g, gw)
        addmm_(dx, of_gate, ga.t(), alpha=gs)
        da, db, ga, gb, ua, ub = (room.t() for room in rooms)
        return dx.view(x.shape), None, None, ga, gb, None, None, ua, ub, None, None, da, db, None


class LoraQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *flat: Any) -> Any:
        layers = flat[:4], flat[4:8], flat[8:]
        rows = x.view(-1, x.shape[-1])
        found = [run(rows, *layer) for layer in layers]
        ctx.frozen = [(layer[0], layer[3]) for layer in layers]
        ctx.save_for_backward(x, *[m for layer in layers for m in layer[1:3]])
        return tuple([out.view(*x.shape[:2], -1) for out in found])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *matrices = ctx.saved_tensors
        flat, rows = [g.reshape(-1, g.shape[-1]) for g in grads], x.view(-1, x.shape[-1])
        turned = [m.to(x.dtype).t() for m in matrices]
        rooms = [torch.empty_like(m) for m in turned]
        products = [mm(g, b.t()) for g, b in zip(flat, turned[1::2], strict=True)]
        for i, (_, s) in enumerate(ctx.frozen):
            addmm_(rooms[2 * i], rows.t(), products[i], alpha=s, beta=0)
            addmm_(rooms[2 * i + 1], mm(turned[2 * i].t(), rows.t()), flat[i], alpha=s, beta=0)
        dx = mm(flat[0], ctx.frozen[0][0], out=rows)
        for i, (w, s) in enumerate(ctx.frozen):
            if i:
                addmm_(dx, flat[i], w)
            addmm_(dx, products[i], turned[2 * i].t(), alpha=s)
        gives = [(None, rooms[2 * i].t(), rooms[2 * i + 1].t(), None) for i in range(3)]
        return dx.view(x.shape), *[each for give in gives for each in give]


class LoraW(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
        ctx.w, ctx.s = w, s
        ctx.save_for_backward(a, b, x)
        return run(x.view(-1, x.shape[-1]), w, a, b, s).view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b, x = ctx.saved_tensors
        dy, rows = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        a, b = a.to(x.dtype).t(), b.to(x.dtype).t()
        da, db = torch.empty_like(a), torch.empty_like(b)
        product = mm(dy, b.t())
        addmm_(da, rows.t(), product, alpha=ctx.s, beta=0)
        addmm_(db, mm(a.t(), rows.t()), dy, alpha=ctx.s, beta=0)
        dx = mm(dy, ctx.w)
        addmm_(dx, product, a.t(), alpha=ctx.s)
        return dx.view(x.shape), None, da.t(), db.t(), None


# -- head and loss -------------------------------------------------------------------------------------------

MIN_LOGITS, MOST = 512 * 151_936, 4096


def power_below(x: float) -> int:
    found = 1
    while 2 * found <= x:
        found *= 2
    return found


def rows_of(count: int, width: int, vocabulary: int, nbytes: int) -> int:
    least = min(max(power_below(MIN_LOGITS / vocabulary), 512), MOST)
    found = min(max(power_below(count * width / vocabulary), least), MOST, 2**31 // (vocabulary * nbytes))
    return min(found, count)


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, items: float, learns: tuple[bool, bool]
    ) -> Tensor:
        index = (targets != -100).nonzero().squeeze(-1)
        count, (v, c) = len(index), weight.shape
        grad_x = torch.zeros_like(x) if learns[0] else None
        grad_w = torch.zeros_like(weight) if learns[1] else None
        losses = torch.empty(count)
        size = rows_of(count, c, v, weight.element_size())
        room = torch.empty((size, -(-v // 8) * 8), dtype=weight.dtype)
        for a in range(0, count, size):
            own = index[a : a + size]
            states = x.index_select(0, own)
            logits = mm(states, weight.t(), out=room[: len(own), :v])
            values, at = read(logits).astype(np.float64), (np.arange(len(own)), targets[own].numpy())
            values -= values.max(1, keepdims=True)
            sums = np.exp(values).sum(1)
            losses.numpy()[a : a + size] = np.log(sums) - values[at]
            found = np.exp(values) / sums[:, None]
            found[at] -= 1
            write(logits, found / items)
            if grad_x is not None:
                wide = mm(logits, weight).float()
                grad_x.index_copy_(0, own, wide.to(x.dtype))
                del wide
            if grad_w is not None:
                addmm_(grad_w, logits.t(), states)
        ctx.save_for_backward(grad_x, grad_w)
        return losses.sum() / items

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = []
        for gradient in ctx.saved_tensors:
            scaled = None if gradient is None else torch.empty_like(gradient)
            if scaled is not None:
                write(scaled, read(gradient) * grads[0].item())
            found.append(scaled)
        return *found, None, None, None


def causal_forward(
    self: Any, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, num_items_in_batch: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    masked = None if self.training and self.own_blocks else attention_mask
    outputs = self.model(input_ids=input_ids, attention_mask=masked, **more)
    states, weight = outputs[0], self.lm_head.weight
    pad = torch.full_like(labels[..., :1], -100)
    targets = torch.cat((labels[..., 1:], pad), -1).reshape(-1)
    items = float((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
    grad = torch.is_grad_enabled()
    learns = grad and states.requires_grad, grad and weight.requires_grad
    loss: Any = FusedLoss.apply(states.reshape(-1, states.shape[-1]), weight, targets, items, learns)
    return CausalLMOutputWithPast(loss=loss, logits=None)


# -- patching ------------------------------------------------------------------------------------------------


def apply(model: Any, *, fused_adapters: bool, checkpoints: str = "") -> None:
    """What FastLanguageModel does to a model, with adapters or without. `fused_adapters`: unsloth has no fused ones of
    fp32 weights, but their values are told best in fp32."""
    adapters = hasattr(model, "peft_config")
    base = model.get_base_model() if adapters else model
    base.own_blocks = adapters
    base.forward = MethodType(causal_forward, base)
    if not adapters:
        base._unsloth_full_finetuning = True
        return
    base._unsloth_fast_path = True
    model._unsloth_gradient_checkpointing = checkpoints
    base.enable_input_require_grads()
    tables: list[Tensor] = []

    def positions(x: Tensor, position_ids: Any = None, **_: Any) -> tuple[Tensor, ...]:
        if not tables:
            config = base.config
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            theta = config.rope_parameters["rope_theta"] if getattr(config, "rope_parameters", None) else 10_000.0
            rows = min(4 * 8192, config.max_position_embeddings)
            angles = np.arange(rows)[:, None] * theta ** -(np.arange(0, width, 2) / width)[None]
            for function in (np.cos, np.sin):
                tables.append(torch.empty((rows, width), dtype=x.dtype))
                write(tables[-1], np.concatenate([function(angles)] * 2, -1))
        return tuple(tables)

    base.model.rotary_emb.forward = positions
    gemma = base.config.model_type == "gemma"
    norm(base.model.norm, gemma)
    for layer in base.model.layers:
        norm(layer.input_layernorm, gemma)
        norm(layer.post_attention_layernorm, gemma)
        attention(layer.self_attn, fused_adapters)
        mlp = [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        if fused_adapters and all(fuses(each) for each in mlp):
            layer.mlp.forward = mlp_of(mlp, gelu_tanh if gemma else silu)


def fuses(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and layer.base_layer.bias is None


def norm(module: Any, gemma: bool = False) -> None:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    module.forward = lambda x: FastRms.apply(x, module.weight, eps, float(gemma), not gemma)


def mlp_of(layers: list[Any], act: Any) -> Any:
    return lambda x: LoraMlp.apply(x, act, *[part for layer in layers for part in parts_of(layer)])


def attention(module: Any, fused_adapters: bool) -> None:
    three, out = [module.q_proj, module.k_proj, module.v_proj], module.o_proj
    together = fused_adapters and all(fuses(each) for each in three)
    alone = fused_adapters and fuses(out)
    heads = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    for each in heads:
        if each is not None:
            norm(each)

    def forward(hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        if together:
            q, k, v = LoraQkv.apply(hidden_states, *[part for layer in three for part in parts_of(layer)])
        else:
            q, k, v = (layer(hidden_states) for layer in three)
        shape = (*hidden_states.shape[:2], -1, module.head_dim)
        q, k, v = q.view(shape), k.view(shape), v.view(shape).transpose(1, 2)
        if heads[0] is not None:
            q, k = heads[0](q), heads[1](k)
        q, k = FastRope.apply(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        y = attend(module, q, k, v, attention_mask, dropout=0.0, scaling=module.scaling)[0]
        y = y.reshape(*hidden_states.shape[:2], -1)
        return (LoraW.apply(y, *parts_of(out)) if alone else out(y)), None

    module.forward = forward


# -- checkpoints on the host ---------------------------------------------------------------------------------


class Host:
    """unsloth_zoo/gradient_checkpointing.py: what went to the host, and the places on the card where it comes back."""

    def __init__(self) -> None:
        self.first_pass, self.double, self.index, self.last = True, False, 0, 0
        self.places: list[Tensor] = []


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, host: Host, x: Tensor) -> Any:
        host.index += 1
        host.last += host.first_pass
        ctx.function, ctx.host, ctx.slot, ctx.away = function, host, host.index % 2, None
        if x.nbytes > 2 << 20 and (host.first_pass or host.index != host.last):
            if not host.places:
                host.places = [torch.empty(1 << 20, dtype=torch.bfloat16) for _ in range(2)]
            host.double = host.double or not host.first_pass
            for place in host.places[: 1 + host.double]:
                if place.nbytes < x.nbytes:
                    place.resize_(x.nbytes // 2)
            ctx.away = x.detach().view(torch.int16).numpy().copy()
        else:
            ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        host = ctx.host
        host.first_pass, host.index = False, 0
        if ctx.away is None:
            (x,) = ctx.saved_tensors
        else:
            place = host.places[ctx.slot if host.double else 0]
            x = place[: ctx.away.size].view(ctx.away.shape)
            x.view(torch.int16).numpy()[...] = ctx.away
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grads[0])
        return None, None, x.grad


@contextmanager
def checkpoints_on_the_host() -> Iterator[None]:
    host = Host()
    with mock.patch("transformers.modeling_utils.checkpoint", lambda f, x, **_: Checkpoint.apply(f, host, x)):
        yield

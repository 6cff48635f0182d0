"""A package `liger_kernel` for CPUs, with values: functions that allocate what Liger-Kernel 0.8.2's do around their
kernels, and numpy in the place of the kernels, whose memory PyTorch does not see. Only fp32.

It knows nothing of foretrain; models are patched as liger_kernel.transformers.monkey_patch does.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


def values(x: Tensor) -> Any:
    return x.detach().numpy()


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float, offset: float, in_place: bool) -> Tensor:
        x = x.contiguous()
        flat = x.view(-1, x.shape[-1])
        y = torch.empty(flat.shape)
        rstd = torch.empty(len(flat))
        values(rstd)[:] = 1 / np.sqrt((values(flat) ** 2).mean(1) + eps)
        values(y)[:] = values(flat) * values(rstd)[:, None] * (offset + values(w))
        ctx.offset, ctx.in_place = offset, in_place
        ctx.save_for_backward(flat, w, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        dy = dy.contiguous()
        x, w, rstd = ctx.saved_tensors
        flat = dy.view(x.shape)
        partial = torch.empty((1, x.shape[1]))
        dx = flat if ctx.in_place else torch.zeros_like(flat)
        normed, m = values(x) * values(rstd)[:, None], values(flat) * (ctx.offset + values(w))
        values(partial)[0] = (values(flat) * normed).sum(0)
        values(dx)[:] = values(rstd)[:, None] * (m - normed * (m * normed).mean(1, keepdims=True))
        return dx.view(dy.shape), partial.sum(dim=0), None, None, None


def silu(x: Any) -> tuple[Any, Any]:
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x * (1 - s))


def gelu_tanh(x: Any) -> tuple[Any, Any]:
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * inner


class GluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, act: Any) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        c = torch.empty_like(a)
        values(c)[:] = act(values(a))[0] * values(b)
        ctx.act = act
        ctx.save_for_backward(a, b)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dc = grads[0].contiguous()
        a, b = ctx.saved_tensors
        value, slope = ctx.act(values(a))
        values(a)[:] = values(dc) * values(b) * slope
        values(b)[:] = values(dc) * value
        return a, b, None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return turned(q, cos, sin, 1), turned(k, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1), turned(grads[1], cos, sin, -1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    v, half = values(x), x.shape[-1] // 2
    c, s = values(cos)[:, :, None, :half], sign * values(sin)[:, :, None, :half]
    first, second = v[..., :half] * c - v[..., half:] * s, v[..., half:] * c + v[..., :half] * s
    v[..., :half], v[..., half:] = first, second
    return x.transpose(1, 2)


def softmax_gradient(logits: Any, labels: Any, losses: Any) -> None:
    """Logits become the gradient of the sum of losses."""
    for row, label, i in zip(logits, labels, range(len(losses)), strict=True):
        row -= row.max()
        log_sum = np.log(np.exp(row).sum())
        losses[i] = 0 if label == -100 else log_sum - row[label]
        row[:] = 0 if label == -100 else np.exp(row - log_sum)
        if label != -100:
            row[label] -= 1


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = torch.zeros(len(logits))
        (labels != -100).sum().item()
        softmax_gradient(values(logits), values(labels), values(losses))
        if logits.requires_grad:
            ctx.save_for_backward(logits.detach())
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        values(logits)[:] *= grads[0].item()
        return logits, None


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        (n, width), vocabulary = x.shape, len(weight)
        factor = (vocabulary + width - 1) // width
        size = 2 ** math.ceil(math.log2((n + factor - 1) // factor))
        grad_x = torch.zeros_like(x)
        grad_weight = torch.zeros_like(weight) if x.requires_grad and weight.requires_grad else None
        losses = torch.zeros(n)
        (labels != -100).sum().item()
        turned_logits = None
        for i in range((n + size - 1) // size):
            rows = slice(i * size, min((i + 1) * size, n))
            logits = x[rows] @ weight.t()
            softmax_gradient(values(logits), values(labels)[rows], values(losses)[rows])
            of_logits = logits
            if x.requires_grad:
                grad_x[rows] = of_logits @ weight
            if grad_weight is not None:
                turned_logits = of_logits.t()
                grad_weight += torch.mm(turned_logits, x[rows]).float()
        ctx.save_for_backward(grad_x.detach(), None if grad_weight is None else grad_weight.detach())
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        for found in (grad_x, grad_weight):
            if found is not None:
                values(found)[:] *= grads[0].item()
        return grad_x, grad_weight, None


def causal_loss(states: Tensor, weight: Tensor, labels: Tensor, items: Any) -> Tensor:
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)
    shifted = labels[..., 1:].contiguous()
    total: Any = FusedLinearCrossEntropy.apply(states.view(-1, states.shape[-1]), weight, shifted.view(-1))
    return total / ((shifted != -100).sum() if items is None else items)


def lce_forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    labels: Any = None,
    skip_logits: Any = None,
    num_items_in_batch: Any = None,
    **more: Any,
) -> Any:
    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
    states = outputs[0]
    skip = skip_logits if skip_logits is not None else self.training and labels is not None
    if skip:
        loss, logits = causal_loss(states, self.lm_head.weight, labels, num_items_in_batch), None
    else:
        logits = self.lm_head(states)
        loss = self.loss_function(logits, labels, self.vocab_size, num_items_in_batch=num_items_in_batch)
    return self.output_kind(loss=loss, logits=logits)


def _summed(logits: Tensor, labels: Tensor, *_: Any, reduction: str = "mean", **__: Any) -> Any:
    total: Any = CrossEntropy.apply(logits, labels)
    return total if reduction == "sum" else total / (labels != -100).sum()


# What is done to each family: the activation, the offset of norms, in place or not (blocks, last), norms of heads, loss.
FAMILIES: dict[str, tuple[Any, float, tuple[bool, bool], bool, bool]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"), (silu, 0, (True, True), False, True)),
    "gemma": (gelu_tanh, 1, (True, True), False, True),
    "gemma3_text": (gelu_tanh, 1, (False, False), True, True),
    "olmo2": (silu, 0, (False, True), False, True),
    "granite": (silu, 0, (True, True), False, False),
}  # fmt: skip


def apply(model: Any, **_: Any) -> None:
    """`_apply_liger_kernel_to_instance`."""
    act, offset, (in_place, last), heads, fused = FAMILIES[model.config.model_type]
    code: Any = sys.modules[type(model).__module__]
    UNDO.append((code, "apply_rotary_pos_emb", code.apply_rotary_pos_emb))
    code.apply_rotary_pos_emb = lambda q, k, cos, sin, **__: Rope.apply(q, k, cos, sin)

    def norm(module: Any, in_place: bool) -> None:
        eps = getattr(module, "variance_epsilon", None) or module.eps
        module.forward = lambda x: RMSNorm.apply(x, module.weight, eps, offset, in_place)

    norm(model.model.norm, last)
    for layer in model.model.layers:
        for name, module in layer.named_children():
            if name.endswith("layernorm"):
                norm(module, in_place)
        if heads:
            norm(layer.self_attn.q_norm, in_place)
            norm(layer.self_attn.k_norm, in_place)
        layer.mlp.forward = MethodType(partial(mlp_forward, act=act), layer.mlp)
    if fused:
        model.output_kind = code.CausalLMOutputWithPast
        model.forward = MethodType(lce_forward, model)
    else:
        functional = torch.nn.functional
        UNDO.append((functional, "cross_entropy", functional.cross_entropy))
        functional.cross_entropy = _summed


def mlp_forward(self: Any, x: Tensor, act: Any) -> Any:
    """LigerSwiGLUMLP, LigerPhi3SwiGLUMLP, LigerGEGLUMLP: gate and up of one matrix are held until the end."""
    if hasattr(self, "gate_up_proj"):
        up = self.gate_up_proj(x)
        gate, up = up.chunk(2, dim=-1)
        return self.down_proj(GluProduct.apply(gate, up, act))
    return self.down_proj(GluProduct.apply(self.gate_proj(x), self.up_proj(x), act))


UNDO: list[tuple[Any, str, Any]] = []


@contextmanager
def installed() -> Iterator[None]:
    """Within it the Trainer finds this package."""
    package: Any = ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = apply
    names = {"liger_kernel": SimpleNamespace(transformers=package), "liger_kernel.transformers": package}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)  # type: ignore[arg-type]
    try:
        with mock.patch("transformers.integrations.liger.is_liger_kernel_available", return_value=True):
            yield
    finally:
        while UNDO:
            setattr(*UNDO.pop())
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

"""Gradients of products where no element is zero, which PyTorch looks for.

In a trace it looks at no values and takes a way that is right for zeros, too, with up to twice the memory
(torch/csrc/autograd/FunctionsManual.cpp, prod_backward and cumprod_backward).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from foretrain.predict.trace.card.patches import Patches


class _Product(torch.autograd.Function):
    """prod or cumprod, by `make`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        out = make(x, *args, **kwargs)
        ctx.dim, ctx.keepdim = (*args, kwargs.get("dim"))[0], (*args, None, None)[1] or kwargs.get("keepdim")
        ctx.gradient = _of_prod if make.__name__ == "prod" else _of_cumprod
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradient(gradient, *ctx.saved_tensors, ctx.dim, ctx.keepdim), None, None, None


def _of_prod(gradient: Tensor, x: Tensor, out: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return gradient.clone()
    if dim is not None and not keepdim:
        gradient, out = gradient.unsqueeze(dim), out.unsqueeze(dim)
    zeros = x == 0
    counts = None if dim is None else zeros.sum(dim, keepdim=True)
    if counts is None:
        del zeros  # of which it makes a list, an empty one
    else:
        counts.sum()
    return gradient * (out / x)


def _of_cumprod(gradient: Tensor, x: Tensor, out: Tensor, dim: int, keepdim: bool) -> Tensor:
    if x.numel() <= 1:
        return gradient
    weighted, zeros = out * gradient, x == 0
    zeros.any()
    return _summed_from_the_end(weighted, dim).div(x)


def _summed_from_the_end(weighted: Tensor, dim: int) -> Tensor:
    flipped = weighted.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


def patch(patches: Patches) -> None:
    """Let prod and cumprod have these gradients while a trace runs."""
    for owner in (torch, Tensor):
        for name in ("prod", "cumprod"):
            patches.set(owner, name, _with_gradient(getattr(owner, name)))


def _with_gradient(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        plain = args and isinstance(args[0], Tensor) and not kwargs.keys() - {"dim", "keepdim"}
        transformed = peek_interpreter_stack() is not None
        if transformed or not (plain and args[0].requires_grad and torch.is_grad_enabled()):
            return make(*args, **kwargs)
        return _Product.apply(args[0], make, args[1:], kwargs)

    return made

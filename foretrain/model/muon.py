"""Muon (https://kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for everything else: a matrix's
momentum becomes the nearest matrix whose singular values are all about 1, by Newton-Schulz iterations."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from foretrain.config.shape import NS_BATCH_ELEMENTS, NS_STEPS
from foretrain.hardware.cpu import cpu_has_bf16
from foretrain.model.update import Uncompiled, held_back

# p(s) = a·s + b·s³ + c·s⁵ moves every singular value s of (0, 1] to 0.7 … 1.2 in a few iterations: the coefficients of
# Keller Jordan's Muon (MIT) and torch.optim.Muon. A steep start at 0 counts for more than exactly 1. Steeper ones for
# each iteration (arXiv:2505.16932) need fewer, but bf16 rounds them to singular values of 1.5 and more.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
kernels: Any = torch  # list operations have private names, in torch.optim too


def newton_schulz(x: Tensor) -> Tensor:
    """Return about U·Vᵀ of each matrix U·S·Vᵀ in `x` (k x m x n): singular values end between 0.7 and 1.2. The first
    kernel of three bounds the largest s by the fourth root of the sum of all s⁴."""
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_(min=EPS)  # small enough for half precision
    a, b, c = NS_COEFFICIENTS
    for i in range(NS_STEPS):
        square = torch.bmm(x, x.mT)
        if i == 0:
            bound = square.norm(dim=(-2, -1), keepdim=True).clamp_(min=EPS)
            square.div_(bound)
            x.div_(bound.sqrt_())
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.mT if tall else x


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return half precision where the device multiplies it faster: the result is about orthogonal in either."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def update_scale(rows: int, columns: int) -> float:
    """Return sqrt(max(1, rows / columns)): one rate for every shape (https://jeremybernste.in/writing/deriving-muon)."""
    return max(1.0, rows / columns) ** 0.5


class MuonAdamW(Uncompiled):
    """Groups with `muon` true (and `momentum`) take Muon's step, the others AdamW's, fused. Decay is decoupled."""

    _step_supports_amp_scaling = True  # GradScaler leaves it to step() to skip after an overflow

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], momentum: float) -> None:
        defaults = {"muon": False, "lr": 1e-3, "betas": betas, "eps": 1e-8, "momentum": momentum, "weight_decay": 0.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both. Nesterov's momentum overwrites the gradients of matrices."""
        assert closure is None, "no step of foretrain evaluates the loss again"
        assert getattr(self, "grad_scale", None) is None, "gradients are unscaled before, as they are clipped"
        if held_back(self):
            return
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["muon"]:
                self._muon(parameters, group)
            elif parameters:
                self._adamw(parameters, group)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        state = [self.state[parameter] for parameter in parameters]
        moments, squares, steps = ([s[key] for s in state] for key in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        adamw(
            parameters, _gradients(parameters), moments, squares, [], steps, fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, momentum, decay = (group[key] for key in ("lr", "momentum", "weight_decay"))
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        gradients = _gradients(parameters)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        kernels._foreach_lerp_(buffers, gradients, 1 - momentum)
        kernels._foreach_lerp_(gradients, buffers, momentum)
        if decay:
            kernels._foreach_mul_(parameters, 1 - rate * decay)
        for batch in _batches(parameters):
            dtype = iteration_dtype(batch[0].device)
            updates = newton_schulz(torch.stack(_gradients(batch)).to(dtype)).to(batch[0].dtype)
            kernels._foreach_add_(batch, list(updates.unbind()), alpha=-rate * update_scale(*batch[0].shape))
            del updates  # before the next ones are made


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the matrices of one shape, as many at a time as NS_BATCH_ELEMENTS allows."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    for shape, matrices in shapes.items():
        count = max(1, NS_BATCH_ELEMENTS // shape.numel())
        for start in range(0, len(matrices), count):
            yield matrices[start : start + count]

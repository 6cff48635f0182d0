"""AdamW's update of each parameter within the backward pass, as soon as its gradient is there, which is then freed.

After LOMO (Lv et al. 2023, arXiv:2306.09782), with AdamW instead of SGD. Autograd sums the gradient of a weight that is
used twice before it hands it over, and reads each weight before its gradient is whole, so numbers are those of one
update at the end.

The norm of the whole gradient comes too late to clip by it, and less is held back than in model/update.py: where the
loss is not finite, nothing changes; where a gradient is not, its parameter and those after it keep their values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from foretrain.model.update import not_finite


class BackwardUpdates:
    """Updates a model whose parameters are all AdamW's, only within `updating`. `held`: 1.0 where a part of the last
    step was held back. `changed`: a pass failed after a change: not repeatable."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = list(model.parameters())
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._active = self.changed = False
        self.held = torch.zeros(())
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @contextmanager
    def updating(self, loss: Tensor, latch: Tensor | None) -> Iterator[None]:
        """Wrap a backward pass from this loss. `latch` as in model/update.py."""
        fatal = not_finite(loss)
        self.held = fatal if latch is None else torch.maximum(latch, fatal, out=latch)
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        self._norms.clear()
        self._active, self.changed = True, False
        try:
            yield
        finally:
            self._active = False
        self.changed = False

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([self._norms[p] for p in self._parameters if p in self._norms]))

    def _ready(self, parameter: Tensor) -> None:
        if self._active:
            self.update(parameter)

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._norms[parameter] = norm = torch.linalg.vector_norm(gradient)
        torch.maximum(self.held, not_finite(norm), out=self.held)
        self.changed = True
        group, state = self._groups[parameter], self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        adamw(
            [parameter], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], fused=True,
            found_inf=self.held, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

"""The optimizer's update, made only where the loss and the gradient's norm are finite; else nothing changes. The device
decides, so the host never waits: fused AdamW kernels change nothing where `found_inf` is 1
(aten/src/ATen/native/cuda/fused_adam_utils.cuh; a factor of 0 would not do, as 0 x NaN is NaN). Muon and low-bit AdamW
ask on the host, as on Apple GPUs, whose kernels ignored it before github.com/pytorch/pytorch/pull/186360."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from foretrain.hardware import accelerator
from foretrain.model.parts import states_of


def not_finite(number: Tensor) -> Tensor:
    return (number - number).ne(0).float()  # x - x is 0 for every finite x


def update(
    optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, latch: Tensor | None, *, overflow_is_normal: bool
) -> Tensor:
    """Update, unless `loss` or `norm` (scalars) is not finite. Return 1.0 where it was held back, else 0.0. `latch`:
    0.0 or 1.0; once such a step has set it, no later step changes anything. `overflow_is_normal`: of the float16
    scaler, which skips an update without the latch."""
    loss = loss.to(norm.device)  # the optimizer may be on the host
    fatal = not_finite(loss if overflow_is_normal else loss + norm)
    if latch is not None:
        fatal = torch.maximum(latch, fatal, out=latch)
    holder: Any = states_of(optimizer)  # whose kernels read it
    held = torch.maximum(fatal, not_finite(norm)) if overflow_is_normal else fatal
    if not accelerator.accelerator_of(held.device).decides:
        if not bool(held):
            optimizer.step()
        return held
    holder.found_inf = held
    optimizer.step()
    del holder.found_inf
    return held


def held_back(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this update must be skipped; waits for the device. For kernels that cannot decide that."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf is not None and not bool(found_inf == 0)


def undecorated(method: Any) -> Any:
    return getattr(method, "__wrapped__", method)


class Uncompiled(torch.optim.Optimizer):
    """An optimizer without the decorators that import torch's compiler (torch/_compile.py): 70 MB less."""

    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)
    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    _own_step: ClassVar[Any] = undecorated(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self._own_step(closure)

    def begin(self) -> None:
        """Make the states that the first update would make (torch/optim/adam.py, _init_group), where there are none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    on = parameter.device if group["fused"] or group["capturable"] else "cpu"
                    self.state[parameter] = {
                        "step": torch.zeros((), device=on),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }

"""The one training step: everything between a batch of tokens and changed weights.

It takes tensors and gives tensors; it neither reads files nor prints, so that it can be run on real tensors and
traced on fake ones. The optimizer step is fixed by its tokens; micro-batches are how it is carried out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretrain.config import RunConfig
from foretrain.lm.model import LanguageModel, make_model
from foretrain.lm.optimizer import make_optimizer

Batch = tuple[Tensor, Tensor]  # token ids and the ids that follow them, each B x T, int64


@dataclass
class TrainState:
    """Everything that a step changes, and how it is run."""

    config: RunConfig
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    dtype: torch.dtype
    call: Callable[[Tensor, Tensor], Tensor]  # the model, compiled or not

    def autocast(self) -> torch.autocast:
        """Half precision in matrix products; off for float32."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, on the device: mean loss of its micro-batches, and the gradient's norm before clipping."""

    loss: Tensor
    grad_norm: Tensor


def build(config: RunConfig, device: torch.device, dtype: torch.dtype, *, compile: bool) -> TrainState:
    """Model, optimizer and scaler for a device. Weights are drawn on the CPU, so every device starts alike."""
    torch.manual_seed(config.seed)
    model = make_model(config).to(device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32, as nanoGPT sets it
    return TrainState(
        config=config,
        model=model,
        optimizer=make_optimizer(model, config, device.type),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        device=device,
        dtype=dtype,
        call=_compiled(model) if compile else model,
    )


def _compiled(model: LanguageModel) -> Callable[[Tensor, Tensor], Tensor]:
    """Whole where it can be, else in parts."""
    if model.chunked_loss is None:
        return torch.compile(model)
    model.compile_parts()
    return model


def train_step(state: TrainState, batches: Iterable[Batch], learning_rate: float) -> StepResult:
    """One optimizer step over `gradient_accumulation_steps` micro-batches.

    The loss of each is divided by their number, so the gradient is that of the mean over all tokens.
    """
    count = state.config.gradient_accumulation_steps
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_multiple", 1.0)
    total = torch.zeros((), device=state.device)
    state.model.train()
    for idx, targets in batches:
        with state.autocast():
            loss = state.call(idx, targets)
        total += loss.detach().float()
        state.scaler.scale(loss / count).backward()
    state.scaler.unscale_(state.optimizer)
    limit = state.config.grad_clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return StepResult(total / count, norm)


@torch.no_grad()
def evaluation_loss(state: TrainState, batch: Batch) -> Tensor:
    """The loss of one batch without a graph; a scalar on the device. Moves nothing that training depends on."""
    state.model.eval()
    with state.autocast():
        return state.call(*batch).float()

"""The one training step, from a batch to changed weights; it reads no files and never prints, so it can be traced."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretrain.config.checks import EIGHT_BITS
from foretrain.config.options import RunConfig
from foretrain.model.in_backward import BackwardUpdates
from foretrain.model.language_model import LanguageModel, make_model
from foretrain.model.low_precision import convert
from foretrain.model.master import Masters
from foretrain.model.techniques import TECHNIQUES, optimizer_of
from foretrain.model.update import update

if TYPE_CHECKING:
    from foretrain.data.batches import Batch
    from foretrain.model.parallel import Parallel, Share


@dataclass
class TrainState:
    config: RunConfig
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    dtype: torch.dtype
    call: Callable[[Tensor, Tensor], Tensor]  # the model, compiled or not
    masters: Masters | None = None  # where the optimizer updates other weights than those that run
    # 1.0 from a step on that was not finite: no later one changes anything (model/update.py)
    latch: Tensor | None = None
    unconverted: tuple[str, ...] = ()  # linear layers whose sizes the mode of `matmul` does not allow
    parallel: "Parallel | None" = None  # how several ranks share the step
    early: BackwardUpdates | None = None  # updates each parameter in the backward pass
    aside: torch.cuda.Stream | None = None  # the stream of its recording (model/graphed.py)

    @property
    def trained(self) -> nn.Module:
        """Return the module whose weights the optimizer updates and checkpoints store, in fp32."""
        return self.masters.model if self.masters else self.model

    def autocast(self) -> torch.autocast:
        """Return half precision for matmuls; off for float32, and where the weights are half precision."""
        own = (self.masters and self.masters.dtype) or (self.parallel and self.parallel.sharing.way.shards_weights)
        enabled = self.dtype != torch.float32 and not own
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)


@dataclass(frozen=True)
class StepResult:
    """The mean loss of a step's micro-batches, and the gradient's norm before clipping, on the device. `held`: 1.0
    where the update was skipped. `asked`: above 0 where a rank has a message."""

    loss: Tensor
    grad_norm: Tensor
    held: Tensor | None = None
    asked: Tensor | None = None


def build(
    config: RunConfig, device: torch.device, dtype: torch.dtype, *, compile: bool, share: "Share | None" = None
) -> TrainState:
    """Build model, optimizer and scaler, drawn on the CPU; with `share` by each rank of the process group."""
    torch.manual_seed(config.seed)
    model = make_model(config)
    unconverted = convert(model.layers(), config.matmul) if config.matmul in EIGHT_BITS else []
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32, as nanoGPT sets it
    masters = _masters(model, config, dtype)  # on the host, so that what a card does not keep is never there
    if share is None or not share.moves:
        model = model.to(device)
    if masters:
        masters.place(model, device)
    trained = masters.model if masters else model
    call: Callable[..., Tensor] = _compiled(model, config, blocks=share is not None) if compile else model
    parallel = share(model, device, dtype) if share else None
    if parallel:
        call = parallel.call
        if compile:  # graphs of single blocks need not be divided among DDP's buckets
            torch._dynamo.config.optimize_ddp = False
    optimizer = make_optimizer(trained, config, next(trained.parameters()).device.type)
    return TrainState(
        config=config,
        model=model,
        masters=masters,
        optimizer=parallel.optimizer(optimizer) if parallel else optimizer,
        early=BackwardUpdates(trained, optimizer) if config.optimizer_in_backward else None,
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        device=device,
        dtype=dtype,
        call=call,
        unconverted=tuple(unconverted),
        parallel=parallel,
    )


def make_optimizer(model: nn.Module, config: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """Make it fused on CPUs, CUDA and Apple GPUs: that kernel needs no temporaries, so its step is never the peak."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optimizer_of(config).make(named, config, device_type)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then cosine (karpathy/nanoGPT train.py) or linear decay, or none."""
    c = config
    if not c.decay_lr:
        return c.learning_rate
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if step >= c.lr_decay_iters:
        return c.min_lr
    if c.lr_schedule == "linear":
        down = max(1.0, min(c.cooldown * c.lr_decay_iters, c.lr_decay_iters - c.warmup_iters))
        left = min(1.0, (c.lr_decay_iters - step) / down)
        return c.min_lr + left * (c.learning_rate - c.min_lr)
    share = (step - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (c.learning_rate - c.min_lr)


def run_as(state: TrainState, dtype: torch.dtype, *, compile: bool) -> TrainState:
    """Run the same model and optimizer in another dtype or compiled; where neither changes the weights themselves."""
    config, altered = state.config, (state.masters, state.parallel, state.early)
    assert altered == (None, None, None)
    assert not config.compiles_blocks
    assert not config.loss_chunk_size
    return replace(
        state,
        dtype=dtype,
        scaler=torch.amp.GradScaler(state.device.type, enabled=dtype == torch.float16),
        call=_compiled(state.model, config, blocks=False) if compile else state.model,
    )


def _masters(model: LanguageModel, config: RunConfig, dtype: torch.dtype) -> Masters | None:
    wanted = {name: value for technique in TECHNIQUES for name, value in technique.twin(config, dtype).items()}
    return Masters(model, **wanted) if wanted else None


def _compiled(model: LanguageModel, config: RunConfig, *, blocks: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile the model whole where possible, else in parts; `blocks`: one by one, as ranks send gradients. Each size
    is compiled for itself: else training gets slower kernels of a symbolic size after an evaluation."""
    for technique in TECHNIQUES:
        technique.tell_compiler(config)
    options: dict[str, Any] = {"dynamic": False}
    if config.compile_mode != "default":
        options["mode"] = config.compile_mode
    if config.compiles_blocks or blocks:
        model.compile_blocks(options)
    elif model.chunked_loss is None:
        return torch.compile(model, **options)
    else:
        model.compile_parts(options)
    return model


def train_step(state: TrainState, batches: "Iterable[Batch]", learning_rate: float | Tensor) -> StepResult:
    """Run one optimizer step. Where loss or gradient is not finite nothing changes (but see model/in_backward.py)."""
    count = state.config.gradient_accumulation_steps
    early = state.early if state.config.optimizer_in_backward and count == 1 else None
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_multiple", 1.0)
    total = torch.zeros((), device=state.device)
    state.model.train()
    for number, (idx, targets) in enumerate(batches, 1):
        if state.parallel:
            state.parallel.catch_up(partial(_loss, state, idx, targets))
        with state.parallel.micro_batch(last=number == count) if state.parallel else contextlib.nullcontext():
            loss = _loss(state, idx, targets)
            total += loss.detach().float()
            if state.parallel:
                state.parallel.backward(state.scaler.scale(loss / count), last=number == count)
            else:
                with early.updating(total, state.latch) if early else contextlib.nullcontext():
                    state.scaler.scale(loss / count).backward()
            if state.masters:
                state.masters.settle()
    if early:
        return StepResult(total, early.norm(), early.held)
    if state.masters:
        state.masters.take_gradients()
    state.scaler.unscale_(state.optimizer)
    limit = state.config.grad_clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(state.trained.parameters(), limit)
    if state.parallel:  # all ranks decide alike on what is not finite
        norm, total = state.parallel.whole(norm), state.parallel.mean(total / count)
        count = 1  # of their micro-batches, which one of them may have cut smaller
    held = update(state.optimizer, total, norm, state.latch, overflow_is_normal=state.scaler.is_enabled())
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if state.masters:
        state.masters.give_weights()
    return StepResult(total / count, norm, held, state.parallel.asked if state.parallel else None)


def _loss(state: TrainState, idx: Tensor, targets: Tensor) -> Tensor:
    with state.autocast():
        return state.call(idx, targets)


@torch.no_grad()
def evaluation_loss(state: TrainState, batch: "Batch") -> Tensor:
    """Return the loss of one batch without a graph; a scalar on the device. Moves nothing that training depends on."""
    state.model.eval()
    with state.autocast():
        return state.call(*batch).float()

"""A check whether a mode of `matmul` suits this model: loss and gradients against those in the run's dtype."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from foretrain.base.errors import UserError
from foretrain.config.checks import MULTIPLE
from foretrain.config.shape import is_block_matrix
from foretrain.data.batches import Batch, TokenFile, evaluation_batches
from foretrain.hardware.catalogue import Dtype
from foretrain.model.language_model import LanguageModel
from foretrain.model.low_precision import layers, without_low_precision
from foretrain.model.step import TrainState

# Wide, on purpose: FP8 and INT8 give cosines of 0.996 to 0.9999 and losses that differ in the fourth digit
# (benchmarks/results/precision_modes.json). Beyond these limits it is not the gradient any more.
LEAST_COSINE = 0.9
MOST_LOSS_DIFFERENCE = 0.02  # of the plain loss
BATCHES, TOKENS = 4, 512  # few enough to take less memory than a step
_FP16_LOSS_SCALE = 1024.0  # gradients of float16 need one; it changes no direction


@dataclass(frozen=True)
class Agreement:
    """`loss` in nats; `cosine` of all gradients, `worst_cosine` of the layer `worst`."""

    mode: str
    dtype: str
    loss: float
    plain_loss: float
    cosine: float
    worst_cosine: float
    worst: str
    tokens: int

    @property
    def holds(self) -> bool:
        near = abs(self.loss - self.plain_loss) <= MOST_LOSS_DIFFERENCE * abs(self.plain_loss)
        return near and self.cosine >= LEAST_COSINE

    def values(self) -> dict[str, object]:
        """Return values for a record of the run; what is not finite becomes text, as JSON has no number for it."""
        finite = lambda value: not isinstance(value, float) or math.isfinite(value)  # noqa: E731
        return {key: value if finite(value) else str(value) for key, value in asdict(self).items()}

    def refuse(self) -> None:
        if not self.holds:
            raise UserError("diverged.matmul", **self.values(), least=LEAST_COSINE, most=MOST_LOSS_DIFFERENCE * 100)


def rows_of_check(block_size: int) -> tuple[int, int]:
    """Return (sequences, context) of one batch of the check: about TOKENS tokens, a multiple of 16."""
    block = min(block_size, TOKENS // 2)
    rows = max(1, TOKENS // block)
    return (rows if rows * block % MULTIPLE == 0 else -(-rows // MULTIPLE) * MULTIPLE), block


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return matrices whose matmuls the mode changes: the converted ones, or all of the blocks (fp16 sums)."""
    converted = layers(model)
    if converted:
        return [(name, layer.weight) for name, layer in converted]
    return [
        (name.removesuffix(".weight"), parameter)
        for name, parameter in model.named_parameters()
        if is_block_matrix(name, tuple(parameter.shape))
    ]


def _mean(state: TrainState, batches: list[Batch], weights: list[Tensor]) -> tuple[float, list[Tensor]]:
    total, sums = 0.0, [torch.zeros_like(weight) for weight in weights]
    scale = _FP16_LOSS_SCALE if state.dtype == torch.float16 else 1.0
    for idx, targets in batches:
        with state.autocast():  # not state.call: these sizes are not to be compiled
            loss = LanguageModel.whole_loss(state.model, state.model.hidden(idx), targets)
        for sum_, gradient in zip(sums, torch.autograd.grad(loss * scale, weights), strict=True):
            sum_ += gradient
        total += float(loss.detach())
    return total / len(batches), sums


def compare(state: TrainState, batches: Iterable[Batch], dtype: str) -> Agreement:
    batches = list(batches)
    named = weights_of(state.model)
    weights = [weight for _, weight in named]
    training = state.model.training
    state.model.eval()
    try:
        with without_low_precision(state.model):
            plain_loss, plain = _mean(state, batches, weights)
        plain = [gradient.cpu() for gradient in plain]  # the device holds one set at a time
        loss, ours = _mean(state, batches, weights)
    finally:
        state.model.train(training)
    dots = torch.tensor([_dots(a.cpu(), b) for a, b in zip(ours, plain, strict=True)], dtype=torch.float64)
    none = (dots[:, 1:] == 0).all(1)  # a layer that nothing reaches in either pass
    lengths = (dots[:, 1] * dots[:, 2]).sqrt().clamp(min=1e-300)
    each = torch.where(none, 1.0, dots[:, 0] / lengths)
    whole = dots.sum(0)
    worst = int(each.nan_to_num(nan=-2.0).argmin())
    return Agreement(
        mode=state.config.matmul, dtype=dtype, loss=loss, plain_loss=plain_loss,
        cosine=float(whole[0] / (whole[1] * whole[2]).sqrt()), worst_cosine=float(each[worst]), worst=named[worst][0],
        tokens=sum(idx.numel() for idx, _ in batches),
    )  # fmt: skip


def _dots(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """Return a·b, a·a and b·b in fp64: squares of small gradients leave fp32's range."""
    a, b = a.flatten().double(), b.flatten().double()
    return float(a @ b), float(a @ a), float(b @ b)


def check_before(state: TrainState, tokens: TokenFile, dtype: Dtype, note: Callable[..., None]) -> None:
    """Compare, and call `note`. Moves nothing that training depends on. Raises UserError 'diverged.matmul'."""
    config = state.config
    if state.unconverted:
        note("matmul_left", mode=config.matmul, layers=list(state.unconverted))
    rows, block = rows_of_check(config.block_size)
    batches = evaluation_batches(
        tokens, config.seed, "train", rows=rows * BATCHES, batch_size=rows, block=block, device=state.device
    )
    agreement = compare(state, batches, dtype)
    note("matmul_check", **agreement.values())
    agreement.refuse()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()  # the trainer must not inherit the check's cache

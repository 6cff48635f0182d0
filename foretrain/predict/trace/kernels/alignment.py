"""The loss of an alignment (LossCTC.cpp and .cu in aten/src/ATen/native), for which PyTorch has no fake kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _forward(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Make the losses, and the scores of each step with each place in a target and between two."""
    steps, rows, _ = log_probs.shape
    states = log_probs.new_empty((rows, steps, 2 * _longest(targets, lengths, rows) + 1))
    return log_probs.new_empty(rows), states


def _longest(targets: Tensor, lengths: Sequence[int] | Tensor, rows: int) -> int:
    """Return the length of the longest target, of tensors that of the padded ones, or of equal ones end to end."""
    if not isinstance(lengths, Tensor):
        return max(lengths)
    return targets.shape[1] if targets.dim() > 1 else -(-targets.shape[0] // rows)


def _backward(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    states = rest[4]
    backwards = torch.empty_like(states)  # noqa: F841  # it is held
    return torch.empty_like(log_probs)


def _by_cudnn(log_probs: Tensor, targets: Tensor, *rest: Any) -> bool:
    """Return whether cuDNN may compute it, whose workspace nobody knows: that is not traced."""
    return torch.backends.cudnn.enabled and targets.dtype == torch.int32


def with_tensors(ctc_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.ctc_loss with lengths as tensors, as lists of them become real tensors in it."""

    def run(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any) -> Tensor:
        if not isinstance(lengths, Tensor):
            targets = targets[:, : max(lengths)] if targets.dim() > 1 else targets
            inputs, lengths = (torch.tensor(each, device=log_probs.device) for each in (inputs, lengths))
        return ctc_loss(log_probs, targets, inputs, lengths, *rest)

    return run


NAMED: dict[str, Callable[..., Any]] = {
    "_ctc_loss": _forward,
    "_ctc_loss_backward": _backward,
    "_use_cudnn_ctc_loss": _by_cudnn,
    "_use_miopen_ctc_loss": lambda *args: False,
}
COMPOSED: dict[Any, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, name), overload): run
    for name, run in NAMED.items()
    if hasattr(torch.ops.aten, name)
    for overload in ("default", "Tensor")
}

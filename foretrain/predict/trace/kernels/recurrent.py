"""LSTM, GRU and RNN: refused where cuDNN runs them on the card, else by PyTorch's own kernels for one step.

A CPU build would take another way for what is one cuDNN kernel on the card, and a CUDA build fails without a card.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretrain.predict.trace.card.guard import StandInError
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.kernels.values import place_now

KEPT_BY_GRU = 5  # values of a GRU's step that its backward pass reads, for each hidden one


def patch(patches: Patches, library: torch.library.Library) -> None:
    """`library`: of aten, where what has no fake kernel gets one."""
    owner = torch.nn.RNNBase
    for name in ("flatten_parameters", "check_input"):
        patches.set(owner, name, _refusing(getattr(owner, name)))
    library.impl("_thnn_fused_gru_cell", _gru_step, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_step_backward, "Meta")


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_or_call(module: torch.nn.RNNBase, *args: Any) -> Any:
        if torch.backends.cudnn.enabled and any(weight.is_cuda for weight in module.parameters()):
            raise StandInError(
                f"nn.{type(module).__name__} cannot be traced: on the card it runs in cuDNN, which tells nobody what "
                f"it allocates; with torch.backends.cudnn.enabled = False, here and in training, it can be, "
                f"at {place_now()}"
            )
        return method(module, *args)

    return refuse_or_call


def _gru_step(x: Tensor, hidden: Tensor, hx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """The new state and what is kept (aten/src/ATen/native/cuda/RNN.cu)."""
    rows, width = hx.shape
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(rows, KEPT_BY_GRU * width)


def _gru_step_backward(gradient: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of the gates from input and state, of the state, and of the biases: sums of the first two."""
    gates = kept.new_empty(kept.shape[0], 3 * kept.shape[1] // KEPT_BY_GRU)
    others = torch.empty_like(gates), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    biases = (gates.new_empty(gates.shape[1]), gates.new_empty(gates.shape[1])) if has_bias else (None, None)
    return gates, *others, *biases

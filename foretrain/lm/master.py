"""Weights in half precision, and the fp32 masters of them that the optimizer changes (Micikevicius et al. 2017,
arXiv:1710.03740, section 3.1).

The model then runs without autocast: the residual stream and what norms save are half precision too, and no weight is
cast in a forward pass. Gradients of each micro-batch are made in half precision, as autocast's are, and summed in fp32.
"""

import copy
from itertools import chain

import torch
from torch import Tensor, nn


class Masters:
    """The fp32 twin of a model whose weights become half precision; the twin never runs."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        model._apply(lambda tensor: tensor.to(dtype) if isinstance(tensor, nn.Parameter) else tensor)
        self._low = list(model.parameters())
        self._full = list(self.model.parameters())
        for low in self._low:
            low.grad_dtype = torch.float32  # so that autograd sums micro-batches in fp32

    def take_gradients(self) -> None:
        """Hand the gradients over to the masters; nothing is copied."""
        for low, full in zip(self._low, self._full, strict=True):
            low.grad, full.grad = None, low.grad

    def drop_gradients(self) -> None:
        """Forget what micro-batches have summed so far."""
        for parameter in chain(self._low, self._full):
            parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model's weights."""
        low: list[Tensor] = [parameter.detach() for parameter in self._low]
        torch._foreach_copy_(low, [parameter.detach() for parameter in self._full])

"""The models of all families from their hidden states on. B micro-batch, T context, C width, V vocabulary."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.model import techniques


class LanguageModel(nn.Module):
    """The loss of hidden states, and logits; a family adds layers, techniques `around` and `chunked_loss`."""

    lm_head: nn.Linear
    chunked_loss: Any

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.around: dict[int, Callable[..., Tensor]] = {}
        self.chunked_loss = None

    def layers(self) -> nn.ModuleList:
        raise NotImplementedError

    def hidden(self, idx: Tensor) -> Tensor:
        raise NotImplementedError

    def block(self, i: int, x: Tensor, *others: Tensor) -> Tensor:
        if self.training and i in self.around:
            return self.around[i](self.layers()[i], x, *others)
        return self.layers()[i](x, *others)

    def head_input(self, idx: Tensor) -> Tensor:
        hidden = self.hidden(idx)
        device = idx.device.type
        return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden

    def compile_parts(self, options: dict[str, Any]) -> None:
        """Compile a model whose loss is chunked: the loop over chunks stays plain Python."""
        assert self.chunked_loss is not None
        self.head_input = torch.compile(self.head_input, **options)
        self.chunked_loss.compile_step()

    def compile_blocks(self, options: dict[str, Any]) -> None:
        """Compile one block, which all share as they differ only in weights, and the loss."""
        for block in self.layers():
            block.compile(**options)
        if self.chunked_loss is not None:
            self.chunked_loss.compile_step()
        else:
            self.whole_loss = torch.compile(self.whole_loss, **options)

    def stay_eager(self) -> None:
        for block in self.layers():
            block._compiled_call_impl = None
        for name in ("head_input", "whole_loss"):
            self.__dict__.pop(name, None)
        if self.chunked_loss is not None:
            self.chunked_loss.stay_eager()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting targets (B x T, -1 is ignored) from idx (B x T)."""
        if self.chunked_loss is not None:
            return self.chunked_loss(self.head_input(idx), self.lm_head.weight, targets.reshape(-1))
        return self.whole_loss(self.hidden(idx), targets)

    def whole_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        del hidden  # an evaluation does not need it
        if not torch.is_autocast_enabled(logits.device.type):  # which would take the loss in fp32 by itself
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


def make_model(config: RunConfig) -> LanguageModel:
    module, name = family_of(config).model
    model: LanguageModel = getattr(importlib.import_module(module), name)(config)
    techniques.change(model, config)
    return model

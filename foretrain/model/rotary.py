"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and the models whose blocks turn queries and keys by them.

Shapes: B micro-batch, T context, C width, H heads, D width of a head.
"""

from typing import Any

import torch
from torch import Tensor

from foretrain.model.language_model import LanguageModel


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: column i of each head (B x T x H x D) is turned against column i + D/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary_tables(block_size: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of `rotate`, each T x 1 x D, fp32."""
    rates = base ** -torch.arange(0, width, 2, dtype=torch.float64).div(width)
    angles = torch.arange(block_size, dtype=torch.float64)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()


class RotaryModel(LanguageModel):
    """A model whose blocks take the tables of `rotate`. A family says what is before the blocks and what after them."""

    def keep_tables(self, width: int, base: float, *, back: bool = False) -> None:
        """The tables for heads of this width. `back`: turned the other way."""
        cos, sin = rotary_tables(self.block_size, width, base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", -sin if back else sin, persistent=False)

    def embed(self, idx: Tensor) -> Tensor:
        """The embedding of token ids, B x T x C."""
        raise NotImplementedError

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the first block takes, made from the embedding; all but its first are for every block."""
        return (x,)

    def leave(self, x: Tensor, low: torch.dtype) -> Tensor:
        """The normed output of the last block, in this dtype."""
        raise NotImplementedError

    def hidden(self, idx: Tensor) -> Tensor:
        """The normed last hidden states, B x T x C, of token ids idx, B x T; in autocast's dtype where that is on."""
        T, device = idx.shape[1], idx.device.type
        assert self.block_size >= T, f"context of {T} tokens, the model has {self.block_size} positions"
        x = self.embed(idx)
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tables: Any = self.cos, self.sin
        cos, sin = (table[:T].to(low) for table in tables)
        x, *beside = self.enter(x)
        for i in range(len(self.layers())):
            x = self.block(i, x, *beside, cos, sin)
        return self.leave(x, low)

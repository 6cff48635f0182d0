"""GPT-2 as nanoGPT has it: the same parameter names, the same initialisation, draw for draw with the same seed.

One difference, on purpose: the training forward returns the loss and nothing else. Returned logits stay alive
through the backward pass, and a compiled backward pass even makes a zero gradient for them (docs/memory.md).

Shapes: B micro-batch, T context, C width, H heads, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretrain.config import RunConfig
from foretrain.lm.loss import ChunkedLoss


class LanguageModel(nn.Module):
    """What every recipe's model does with its hidden states: the loss, whole or in chunks; logits to sample from."""

    lm_head: nn.Linear

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.checkpointing = config.activation_checkpointing
        self.chunked_loss = ChunkedLoss(config.loss_chunk_size) if config.loss_chunk_size else None

    def hidden(self, idx: Tensor) -> Tensor:
        """The normed last hidden states, B x T x C, of token ids idx, B x T."""
        raise NotImplementedError

    def head_input(self, idx: Tensor) -> Tensor:
        """The hidden states, B x T x C, in the dtype that autocast gives to matrix products."""
        hidden = self.hidden(idx)
        device = idx.device.type
        return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden

    def compile_parts(self) -> None:
        """torch.compile for a model whose loss is chunked: the loop over chunks stays plain Python."""
        assert self.chunked_loss is not None
        self.head_input = torch.compile(self.head_input)
        self.chunked_loss.compile_step()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of predicting targets (B x T, -1 is ignored) from idx (B x T); a scalar."""
        if self.chunked_loss is not None:
            return self.chunked_loss(self.head_input(idx), self.lm_head.weight, targets.reshape(-1))
        logits = self.lm_head(self.hidden(idx))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)

    def next_logits(self, idx: Tensor) -> Tensor:
        """Logits of the token after idx: B x V. For sampling."""
        return self.lm_head(self.hidden(idx)[:, -1])


class Attention(nn.Module):
    """Causal self-attention through PyTorch's scaled_dot_product_attention (flash where the device has it)."""

    def __init__(self, n_embd: int, n_head: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))  # B, H, T, C/H
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them, four times as wide inside."""

    def __init__(self, n_embd: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, n_embd: int, n_head: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, bias=bias)
        self.attn = Attention(n_embd, n_head, bias, dropout)
        self.ln_2 = nn.LayerNorm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, bias, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """The model. The modules are made in nanoGPT's order, because making them draws random numbers."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.vocab_size, c.n_embd),
                "wpe": nn.Embedding(c.block_size, c.n_embd),
                "drop": nn.Dropout(c.dropout),
                "h": nn.ModuleList([Block(c.n_embd, c.n_head, c.bias, c.dropout) for _ in range(c.n_layer)]),
                "ln_f": nn.LayerNorm(c.n_embd, bias=c.bias),
            }
        )
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        wte: Any = self.transformer["wte"]
        wte.weight = self.lm_head.weight  # tied, https://arxiv.org/abs/1608.05859
        self.apply(_init)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # GPT-2 scales what adds to the residual stream by its depth
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.n_layer))

    def hidden(self, idx: Tensor) -> Tensor:
        """The normed last hidden states, B x T x C, of token ids idx, B x T."""
        T = idx.shape[1]
        assert self.block_size >= T, f"context of {T} tokens, the model has {self.block_size} positions"
        parts: Any = self.transformer
        position = torch.arange(T, device=idx.device)
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](position))
        for block in parts["h"]:
            recompute = self.checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return parts["ln_f"](x)


def _init(module: nn.Module) -> None:
    """GPT-2's initialisation: normal with standard deviation 0.02, biases zero (karpathy/nanoGPT model.py)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_model(config: RunConfig) -> LanguageModel:
    """The model of the config's recipe, with weights drawn from the global generator."""
    if config.recipe == "modern":
        from foretrain.lm.modern import ModernGPT

        return ModernGPT(config)
    return GPT(config)

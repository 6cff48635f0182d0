"""GPT-2 with nanoGPT's parameter names and draws. B micro-batch, T context, C width, H heads, V vocabulary. The
training forward returns the loss alone: returned logits would stay alive through backward (docs/memory.md)."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.config.options import RunConfig
from foretrain.model.attention import causal_attention
from foretrain.model.language_model import LanguageModel
from foretrain.model.layers import TokenEmbedding


class Attention(nn.Module):
    """Causal self-attention; with `matmuls` by batched matmuls (attention.py), for CPUs and without dropout."""

    def __init__(self, n_embd: int, n_head: int, bias: bool, dropout: float, *, matmuls: bool = False) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.dropout = dropout
        self.matmuls = matmuls

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.c_attn(x))

    def mix(self, qkv: Tensor) -> Tensor:
        """Mix B x T x 3C, the output of c_attn, to B x T x C."""
        B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
        if self.matmuls and qkv.is_cpu and not (self.dropout and self.training):
            return self.resid_dropout(self.c_proj(causal_attention(qkv, self.n_head)))
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in qkv.split(C, dim=2))  # B, H, T, C/H
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, n_embd: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))

    def out(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `instead`: what a technique runs in its place in training."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        c = config
        self.ln_1 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn = Attention(c.n_embd, c.n_head, c.bias, c.dropout, matmuls=c.attention == "bmm")
        self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.mlp = MLP(c.n_embd, c.bias, c.dropout)
        self.instead: Callable[[Block, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.instead is not None and self.training:
            return self.instead(self, x)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """The modules are made in nanoGPT's order, because making them draws random numbers."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.transformer = nn.ModuleDict(
            {
                "wte": TokenEmbedding(c.vocab_size, c.n_embd),
                "wpe": nn.Embedding(c.block_size, c.n_embd),
                "drop": nn.Dropout(c.dropout),
                "h": nn.ModuleList([Block(c) for _ in range(c.n_layer)]),
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

    def layers(self) -> nn.ModuleList:
        blocks: Any = self.transformer["h"]
        return blocks

    def hidden(self, idx: Tensor) -> Tensor:
        """Return the normed last hidden states, B x T x C, of token ids idx, B x T."""
        T = idx.shape[1]
        assert self.block_size >= T, f"context of {T} tokens, the model has {self.block_size} positions"
        parts: Any = self.transformer
        position = torch.arange(T, device=idx.device)
        # One name for all that goes from block to block, in the frame that calls them: the caller of a function given
        # the embedding would hold it as long as that runs (where Python's calls are not inlined, as under Dynamo).
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](position))
        for i in range(len(self.layers())):
            x = self.block(i, x)
        return parts["ln_f"](x)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class NanoAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        y = self.resid_dropout(self.c_proj(y))
        return y  # noqa: RET504


class NanoGPT(GPT):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        parts: Any = self.transformer
        for block in parts["h"]:
            assert isinstance(block, Block)
            block.attn.__class__ = NanoAttention

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        parts: Any = self.transformer
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device)
        tok_emb = parts["wte"](idx)
        pos_emb = parts["wpe"](pos)
        x = parts["drop"](tok_emb + pos_emb)
        for block in parts["h"]:
            x = block(x)
        x = parts["ln_f"](x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

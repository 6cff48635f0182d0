"""GPT-2 with nanoGPT's forward pass: it returns logits, and intermediates live as long as nanoGPT's names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.config.options import RunConfig
from foretrain.model.gpt2 import GPT, Attention, Block


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

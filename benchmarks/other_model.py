"""Models of other programs as plain PyTorch code, whose eager kernels other_steps.py counts without torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x·cos + (-second half, first half)·sin, each a kernel."""
    first, second = x.split(x.shape[-1] // 2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """Attention and MLP in a program's widths."""

    def __init__(self, config: Any, program: Any) -> None:
        super().__init__()
        self.program, self.heads, C = program, config.n_head, config.n_embd
        wide = program.attention_width or C
        self.width, kv, ff = wide // self.heads, program.kv_width or wide, program.d_ff or 4 * C
        self.separate = program.separate_qkv or kv != wide
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        if self.separate:
            self.q, self.k, self.v = (nn.Linear(C, size, bias=False) for size in (wide, kv, kv))
        else:
            self.attn = nn.Linear(C, 3 * wide, bias=False)
        self.proj = nn.Linear(wide, C, bias=False)
        self.gate = nn.Linear(C, ff, bias=False) if program.gated else None
        self.fc, self.out = nn.Linear(C, ff, bias=False), nn.Linear(ff, C, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        parts = (self.q(x), self.k(x), self.v(x)) if self.separate else self.attn(x).split(self.heads * self.width, 2)
        q, k, v = (part.view(B, T, -1, self.width).transpose(1, 2) for part in parts)
        if self.program.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, self.heads * self.width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.ln_1(x), cos, sin))
        h = self.ln_2(x)
        inner = F.gelu(self.fc(h)) if self.gate is None else F.silu(self.gate(h)) * self.fc(h)
        return x + self.dropout(self.out(inner))


class OtherGPT(nn.Module):
    """nanoGPT's model but for what `program` (other_steps.py) says; `step`: nanoGPT's returns the logits, too."""

    def __init__(self, config: Any, program: Any, step: str) -> None:
        super().__init__()
        self.step = step
        c, self.program, self.checkpointed = config, program, config.checkpointed
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList([Block(c, program) for _ in range(c.n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(c.n_embd, bias=False), nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if program.tied:
            self.wte.weight = self.lm_head.weight
        self.cos = self.sin = torch.zeros(c.block_size, (program.attention_width or c.n_embd) // c.n_head)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        T = idx.shape[1]
        x = self.wte(idx) + self.wpe(torch.arange(T))
        x = self.drop(x)
        low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        cos, sin = self.cos[:T].to(low), self.sin[:T].to(low)
        for i, block in enumerate(self.h):
            again = self.training and i < self.checkpointed
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if again else block(x, cos, sin)
        logits = self.lm_head(self.ln_f(x))
        shifted = logits.view(-1, logits.shape[-1])
        if self.program.logits_fp32:
            shifted = shifted.float().clone()
        loss = F.cross_entropy(shifted, targets.view(-1), ignore_index=-1)
        return (logits, loss) if self.step == "nanogpt" else loss

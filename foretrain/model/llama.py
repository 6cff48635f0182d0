"""Llama and Qwen3: RMSNorm, SwiGLU, rotary positions, grouped queries; tied or not.

Parameters have the names of Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM, so weights need no renaming. Touvron
et al. 2023 (arXiv:2302.13971, 2307.09288), Qwen3's technical report (arXiv:2505.09388).

The residual stream stays in the dtype of the weights; norms return the dtype of matmuls (`low`), and save their result
and a number per row. Saved per block in `low`: the norms' results before and after their weights (4·N·C), q (N·H·D), k
and v (2·N·K·D), attention's output (N·H·D), gate, up, silu(gate) and gate · up (4·N·F); with qk_norm q and k again.

Shapes: B micro-batch, T context, N = B·T, C width, H heads of queries, K heads of keys and values, D width of a head, F
width inside the MLP, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.config.options import RunConfig
from foretrain.model.layers import RotaryModel, TokenEmbedding, norm, rotate

INIT_STD = 0.02  # transformers' initializer_range
WIDEST_GROUPED = 192  # of heads for which every card's FlashAttention has a backward pass


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, times a weight, in `dtype` (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return norm(x, dtype, self.eps) * self.weight.to(dtype)


def takes_groups(q: Tensor) -> bool:
    """Return whether attention's kernel reads grouped keys: the memory-efficient one (fp32, before Ampere) does not."""
    if not q.is_cuda:
        return True
    return q.dtype != torch.float32 and q.shape[-1] <= WIDEST_GROUPED and torch.cuda.get_device_capability() >= (8, 0)


class Attention(nn.Module):
    """Causal self-attention; each head of keys and values serves H / K heads of queries (arXiv:2305.13245)."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.width = c.n_head, c.kv_heads, c.head_width
        self.groups = c.n_head // c.kv_heads
        self.q_proj = nn.Linear(c.n_embd, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(c.n_embd, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(c.n_embd, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, c.n_embd, bias=False)
        self.q_norm = RMSNorm(self.width, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(self.width, c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.width)
        k = self.k_proj(x).view(B, T, self.kv_heads, self.width)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, q.dtype), self.k_norm(k, k.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = int(self.groups) > 1
        if grouped and not takes_groups(q):
            k, v, grouped = self.copied(k), self.copied(v), False
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.heads * self.width))

    def copied(self, x: Tensor) -> Tensor:
        B, T, K, D = x.shape
        return x.unsqueeze(3).expand(B, T, K, self.groups, D).reshape(B, T, self.heads, D)


class MLP(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        c = config
        self.gate_proj = nn.Linear(c.n_embd, c.mlp_inner, bias=False)
        self.up_proj = nn.Linear(c.n_embd, c.mlp_inner, bias=False)
        self.down_proj = nn.Linear(c.mlp_inner, c.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.n_embd, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.n_embd, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The dtype of `cos` is that of matmuls."""
        x = x + self.self_attn(self.input_layernorm(x, cos.dtype), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x, cos.dtype))


class Llama(RotaryModel):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.model = nn.ModuleDict({
            "embed_tokens": TokenEmbedding(c.vocab_size, c.n_embd),
            "layers": nn.ModuleList([Block(c) for _ in range(c.n_layer)]),
            "norm": RMSNorm(c.n_embd, c.norm_eps),
        })  # fmt: skip
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tied_embeddings:
            embedding: Any = self.model["embed_tokens"]
            embedding.weight = self.lm_head.weight
        self.keep_tables(c.head_width, c.rope_theta)
        self.apply(_init)

    def layers(self) -> nn.ModuleList:
        blocks: Any = self.model["layers"]
        return blocks

    def embed(self, idx: Tensor) -> Tensor:
        parts: Any = self.model
        return parts["embed_tokens"](idx)

    def leave(self, x: Tensor, low: torch.dtype) -> Tensor:
        parts: Any = self.model
        return parts["norm"](x, low)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)

"""nanochat's model: RMSNorm without weights, rotary positions, normed queries and keys, squared ReLU, capped logits.

Parameter names and maths are those of Hugging Face's NanoChatForCausalLM, so weights need no renaming
(karpathy/nanochat, nanochat/gpt.py).

x = norm(embedding(idx))                            the residual stream, in the dtype of the weights
each block: h = norm(x)                             `low`, autocast's dtype for matmuls
            q, k = norm(rotate(h·Wqᵀ)), norm(rotate(h·Wkᵀ)), v = h·Wvᵀ
            x = x + attention(q, k, v)·Woᵀ
            x = x + max(0, norm(x)·W1ᵀ)²·W2ᵀ
logits = 15·tanh(norm(x)·Wheadᵀ / 15)               `low`

Shapes: B micro-batch, T context, C width, H heads, D = C / H, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.config.families.nanochat import ROPE_BASE, SOFTCAP
from foretrain.config.options import RunConfig
from foretrain.model.layers import RotaryModel, TokenEmbedding, norm, rotate, squared_relu

EMBEDDING_STD = 0.02


class Attention(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.q_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.k_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.v_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_head, C // self.n_head)
        q = rotate(self.q_proj(x).view(heads), cos, sin)
        k = rotate(self.k_proj(x).view(heads), cos, sin)
        q, k = norm(q, q.dtype).transpose(1, 2), norm(k, k.dtype).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.fc2 = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(squared_relu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.self_attn = Attention(n_embd, n_head)
        self.mlp = MLP(n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The dtype of `cos` is that of matmuls."""
        x = x + self.self_attn(norm(x, cos.dtype), cos, sin)
        return x + self.mlp(norm(x, cos.dtype))


class Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input) / SOFTCAP) * SOFTCAP


class NanoChat(RotaryModel):
    """Layers that write to the residual stream start at zero, and so does the head: the first loss is ln V."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.model = nn.ModuleDict({
            "embed_tokens": TokenEmbedding(c.vocab_size, c.n_embd),
            "layers": nn.ModuleList([Block(c.n_embd, c.n_head) for _ in range(c.n_layer)]),
        })  # fmt: skip
        self.lm_head = Head(c.n_embd, c.vocab_size, bias=False)
        self.keep_tables(c.n_embd // c.n_head, ROPE_BASE, back=True)  # nanochat rotates the other way than Llama
        self.apply(_init)
        nn.init.zeros_(self.lm_head.weight)

    def layers(self) -> nn.ModuleList:
        blocks: Any = self.model["layers"]
        return blocks

    def embed(self, idx: Tensor) -> Tensor:
        parts: Any = self.model
        return parts["embed_tokens"](idx)

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        return (norm(x, x.dtype),)

    def leave(self, x: Tensor, low: torch.dtype) -> Tensor:
        return norm(x, low)


def _init(module: nn.Module) -> None:
    """Draw normally with variance 1 / inputs what reads the residual stream; zero for what writes to it. nanochat draws
    embeddings wider and learns them faster; the norm after them takes their scale away."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, Attention):
        for layer in (module.q_proj, module.k_proj, module.v_proj):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
        nn.init.zeros_(module.o_proj.weight)
    elif isinstance(module, MLP):
        nn.init.normal_(module.fc1.weight, std=1 / math.sqrt(module.fc1.in_features))
        nn.init.zeros_(module.fc2.weight)

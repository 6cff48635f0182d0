"""The model of `recipe = modern`: a GPT with what both modded-nanogpt and nanochat kept (docs/recipes.md).

The forward pass, op by op (eager; N tokens per micro-batch, `low` autocast's dtype for matmuls):

e = embedding(idx)                                  N x C, fp32: the residual stream stays fp32
x = x0 = norm(e + smear·e one token before)         `smear`: a learned number per channel
each block: x = x + skip·x0                         addcmul, `skip` a learned scalar
            h = norm(x)                             low
            qk = norm(rotate(h·Wqkᵀ)), v = h·Wvᵀ    low; one mul, one roll, one addcmul rotate q and k together
            x = x + attention(q, k, v)·Woutᵀ        flash attention, causal
            h = norm(x)                             low
            x = x + max(0, h·Wupᵀ)²·Wdownᵀ
logits = norm(x)·Wheadᵀ                             an untied head

Saved for backward, per block in `low`: h (N·C), q and k (2·N·C), v (N·C), attention's output (N·C), h (N·C), the
squared ReLU (4·N·C), and the copies of the five weights; in fp32: attention's logsumexp (N·H) and a number per row of
each norm (N + 2·N·H + N). Once: e one token before and x0 (2·N·C, fp32), `smear` for each position (T·C), the last
norm's result (N·C, low), the numbers of two norms (2·N), the token ids. The residual stream and the inputs of norms are
not saved.

Shapes: B micro-batch, T context, C width, H heads, D = C / H, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.config.options import RunConfig
from foretrain.model.layers import RotaryModel, TokenEmbedding, norm, rotate, squared_relu

ROPE_BASE = 10_000.0
EMBEDDING_STD = 0.02
# q·k is at most D for lengths of sqrt(D); 1/sqrt(D) of that is too little for a sharp softmax.
QK_SCALE = 1.5


class Attention(nn.Module):
    """Values have their own layer: as part of one matmul they would keep queries and keys alive with them."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.scale = QK_SCALE / math.sqrt(n_embd // n_head)
        self.qk = nn.Linear(n_embd, 2 * n_embd, bias=False)
        self.v = nn.Linear(n_embd, n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        qk = rotate(self.qk(x).view(B, T, 2 * self.n_head, -1), cos, sin)
        q, k = norm(qk, qk.dtype).transpose(1, 2).split(self.n_head, dim=1)  # rotating before changes no length
        v = self.v(x).view(B, T, self.n_head, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(squared_relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.zeros(1))
        self.attention = Attention(n_embd, n_head)
        self.mlp = MLP(n_embd)

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, x0: B x T x C, fp32; the dtype of `cos` is that of matmuls."""
        x = torch.addcmul(x, x0, self.skip)
        x = x + self.attention(norm(x, cos.dtype), cos, sin)
        return x + self.mlp(norm(x, cos.dtype))


class ModernGPT(RotaryModel):
    """Layers that write to the residual stream start at zero, and so does the head: the first loss is ln V."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        c = config
        self.embedding = TokenEmbedding(c.vocab_size, c.n_embd)
        self.smear = nn.Parameter(torch.zeros(c.n_embd))
        self.blocks = nn.ModuleList([Block(c.n_embd, c.n_head) for _ in range(c.n_layer)])
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.keep_tables(c.n_embd // c.n_head, ROPE_BASE)
        follows = torch.ones(c.block_size, 1)
        follows[0] = 0  # the first token follows none
        self.register_buffer("follows", follows, persistent=False)
        self.apply(_init)
        nn.init.zeros_(self.lm_head.weight)

    def layers(self) -> nn.ModuleList:
        return self.blocks

    def embed(self, idx: Tensor) -> Tensor:
        """Add a share of the token before: attention in one layer then finds what followed the same token earlier."""
        x, follows = self.embedding(idx), self.follows
        assert isinstance(follows, Tensor)
        return x + x.roll(1, 1) * (self.smear * follows[: idx.shape[1]].to(x.dtype))

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return x0 twice: every block adds a share of it."""
        x0 = norm(x, x.dtype)
        return x0, x0

    def leave(self, x: Tensor, low: torch.dtype) -> Tensor:
        return norm(x, low)


def _init(module: nn.Module) -> None:
    """Draw uniformly with variance 1 / inputs what reads the residual stream; zero for what writes to it."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, Attention):
        _read(module.qk)
        _read(module.v)
        nn.init.zeros_(module.out.weight)
    elif isinstance(module, MLP):
        _read(module.up)
        nn.init.zeros_(module.down.weight)


def _read(layer: nn.Linear) -> None:
    bound = math.sqrt(3 / layer.in_features)
    nn.init.uniform_(layer.weight, -bound, bound)

"""Shapes and counts of the model, from the config alone (no torch): parameters, optimizer groups, FLOPs.

Letters, here and in predict/: B micro-batch, T context, C width (n_embd), H heads, L layers, V vocabulary,
N = B·T tokens of a micro-batch, P parameters with the tied embedding counted once.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from foretrain.config.options import RunConfig

NS_STEPS = 5  # Newton-Schulz iterations of Muon (model/muon.py), here because they are FLOPs to predict
# Elements that Muon iterates at one time: enough to fill a large GPU, and bounds what its step takes for a moment.
NS_BATCH_ELEMENTS = 2**24
# The layers of the modern block (model/modern.py): rows and columns as multiples of the width.
MODERN_LAYERS = (
    ("attention.qk", 2, 1), ("attention.v", 1, 1), ("attention.out", 1, 1), ("mlp.up", 4, 1), ("mlp.down", 1, 4),
)  # fmt: skip


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Is it a matrix of a transformer block? Muon is for these; embeddings and the head are looked up, not multiplied
    by dense inputs on both sides."""
    return len(shape) == 2 and (".h." in name or name.startswith("blocks."))


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model: its name (in nanoGPT's recipe as there), its shape, and whether AdamW decays it."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decayed(self) -> bool:
        """nanoGPT decays every tensor with two dimensions or more (model.py, configure_optimizers)."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class ModelShape:
    """The tensors of a recipe's model. nanoGPT's `lm_head.weight` is `transformer.wte.weight` and is listed once."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool
    recipe: str = "nanogpt"

    @classmethod
    def of(cls, config: RunConfig) -> "ModelShape":
        c = config
        return _shape(c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size, c.bias, c.recipe)

    @property
    def modern(self) -> bool:
        return self.recipe == "modern"

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def block_parameters(self, prefix: str) -> Iterator[Parameter]:
        """The tensors of one transformer block, in the order of the model's state dict."""
        C = self.n_embd
        if self.modern:
            yield Parameter(f"{prefix}skip", (1,))
            for name, rows, columns in MODERN_LAYERS:
                yield Parameter(f"{prefix}{name}.weight", (rows * C, columns * C))
            return
        layers: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("ln_1", (C,)),
            ("attn.c_attn", (3 * C, C)),
            ("attn.c_proj", (C, C)),
            ("ln_2", (C,)),
            ("mlp.c_fc", (4 * C, C)),
            ("mlp.c_proj", (C, 4 * C)),
        )
        for name, shape in layers:
            yield Parameter(f"{prefix}{name}.weight", shape)
            if self.bias:
                yield Parameter(f"{prefix}{name}.bias", shape[:1])

    def parameters(self) -> Iterator[Parameter]:
        """Every tensor of the model."""
        C = self.n_embd
        if self.modern:
            yield Parameter("embedding.weight", (self.vocab_size, C))
            for layer in range(self.n_layer):
                yield from self.block_parameters(f"blocks.{layer}.")
            yield Parameter("lm_head.weight", (self.vocab_size, C))
            return
        yield Parameter("transformer.wte.weight", (self.vocab_size, C))
        yield Parameter("transformer.wpe.weight", (self.block_size, C))
        for layer in range(self.n_layer):
            yield from self.block_parameters(f"transformer.h.{layer}.")
        yield Parameter("transformer.ln_f.weight", (C,))
        if self.bias:
            yield Parameter("transformer.ln_f.bias", (C,))

    @cached_property
    def numels(self) -> Counter[int]:
        """{elements: how many tensors of the model have so many}, in the model's order."""
        return Counter(p.numel for p in self.parameters())

    @cached_property
    def block_numels(self) -> tuple[int, ...]:
        return tuple(p.numel for p in self.block_parameters(""))

    @cached_property
    def n_params(self) -> int:
        """All parameters, a tied embedding once."""
        if self.modern:
            return 2 * self.vocab_size * self.n_embd + self.n_layer * sum(self.block_numels)
        outside = (self.vocab_size + self.block_size + 1 + self.bias) * self.n_embd
        return outside + self.n_layer * sum(self.block_numels)

    @property
    def n_params_nanogpt(self) -> int:
        """nanoGPT's count (get_num_params): without the position embeddings, which only look up; in the modern recipe
        that is the token embedding, as its head is a matrix of its own."""
        return self.n_params - (self.vocab_size if self.modern else self.block_size) * self.n_embd

    @property
    def n_matmul_params(self) -> int:
        """Weights that take part in matrix products, the head included: V·C + 12·L·C²."""
        return self.vocab_size * self.n_embd + 12 * self.n_layer * self.n_embd**2

    @cached_property
    def block_matrices(self) -> Counter[tuple[int, ...]]:
        """{shape: how many} of the matrices in the blocks, which are Muon's where that is the optimizer."""
        return Counter(p.shape for p in self.parameters() if is_block_matrix(p.name, p.shape))

    @property
    def n_block_matrix_params(self) -> int:
        """Parameters in the matrices of the blocks."""
        return sum(math.prod(shape) * count for shape, count in self.block_matrices.items())

    @property
    def newton_schulz_bytes(self) -> int:
        """What Muon's step takes for a moment (model/muon.py): a batch of matrices in fp32 beside its copy in half
        precision, or two such copies beside two square products."""
        most = 0
        for shape, count in self.block_matrices.items():
            at_once = min(count, max(1, NS_BATCH_ELEMENTS // math.prod(shape)))
            elements, square = at_once * math.prod(shape), at_once * min(shape) ** 2
            most = max(most, 6 * elements, 4 * elements + 4 * square)
        return most

    def optimizer_groups(self) -> dict[bool, tuple[int, int]]:
        """{decayed: (tensors, parameters)}, what nanoGPT prints when it makes the optimizer."""
        counts = {True: (0, 0), False: (0, 0)}
        for parameter in self.parameters():
            tensors, numel = counts[parameter.decayed]
            counts[parameter.decayed] = (tensors + 1, numel + parameter.numel)
        return counts

    # FLOPs of training per token, forward and backward, one multiply-add counted as two.

    @property
    def flops_per_token_6n(self) -> int:
        """6·N with nanoGPT's N: the rule of thumb of Kaplan et al. 2020, arXiv:2001.08361."""
        return 6 * self.n_params_nanogpt

    @property
    def flops_per_token(self) -> int:
        """6·N + 12·L·C·T, nanoGPT's estimate_mfu (PaLM, arXiv:2204.02311, appendix B): full attention."""
        return self.flops_per_token_6n + 12 * self.n_layer * self.n_embd * self.block_size


@lru_cache(maxsize=256)
def _shape(*values: Any) -> ModelShape:
    """One object for one shape, so that what is counted of it is counted once."""
    return ModelShape(*values)

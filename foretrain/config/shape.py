"""Shapes and counts of the model from the config alone. Letters, here and in predict/: B micro-batch, T context, C
width (n_embd), H heads, L layers, V vocabulary, N = B·T tokens, P parameters with the tied embedding counted once."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from foretrain.config.families import family_of
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.options import RunConfig, named

NS_STEPS = 4  # Newton-Schulz iterations of Muon (model/muon.py), here because they are FLOPs to predict
# Elements that Muon iterates at one time: enough to fill a large GPU, and bounds what its step takes for a moment.
NS_BATCH_ELEMENTS = 2**24
# What the tensors of a model follow from.
_SIZES = ("recipe", *named(lambda option: option.from_weights))


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether it is a matrix of a block, which Muon is for; embeddings and the head are looked up."""
    return len(shape) == 2 and re.search(r"\.\d+\.", name) is not None


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decayed(self) -> bool:
        """nanoGPT decays every tensor with two dimensions or more (model.py, configure_optimizers)."""
        return len(self.shape) >= 2


class ModelShape:
    """The tensors of a config's model, as its family has them (config/families). A tied head is listed once."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.family = config, family_of(config)
        self.n_layer, self.n_head, self.n_embd = config.n_layer, config.n_head, config.n_embd
        self.block_size, self.vocab_size = config.block_size, config.vocab_size

    @classmethod
    def of(cls, config: RunConfig) -> "ModelShape":
        return _shape(tuple(getattr(config, name) for name in _SIZES))

    @cached_property
    def head_dim(self) -> int:
        return self.family.head_dim(self.config)

    @cached_property
    def n_kv_head(self) -> int:
        return self.family.n_kv_head(self.config)

    def block_parameters(self, prefix: str) -> Iterator[Parameter]:
        return (Parameter(f"{prefix}{name}", shape) for name, shape in self.family.block(self.config))

    def parameters(self) -> Iterator[Parameter]:
        yield from self._outside(self.family.before)
        for layer in range(self.n_layer):
            yield from self.block_parameters(f"{self.family.blocks}.{layer}.")
        yield from self._outside(self.family.after)

    def _outside(self, part: Callable[[RunConfig], Iterator[tuple[str, tuple[int, ...]]]]) -> Iterator[Parameter]:
        return (Parameter(*each) for each in part(self.config))

    @cached_property
    def numels(self) -> Counter[int]:
        found = Counter(p.numel for p in self._outside(self.family.before))
        for numel in self.block_numels:  # all blocks have the same
            found[numel] += self.n_layer
        found.update(p.numel for p in self._outside(self.family.after))
        return found

    @cached_property
    def block_numels(self) -> tuple[int, ...]:
        return tuple(p.numel for p in self.block_parameters(""))

    @cached_property
    def n_params(self) -> int:
        outside = sum(p.numel for part in (self.family.before, self.family.after) for p in self._outside(part))
        return outside + self.n_layer * sum(self.block_numels)

    @property
    def n_params_nanogpt(self) -> int:
        """nanoGPT's count (get_num_params): without what only looks up: positions, or a token embedding untied from the
        head."""
        return self.n_params - self.family.looked_up(self.config)

    @property
    def n_matmul_params(self) -> int:
        """Weights in matmuls, the head included: V·C + 12·L·C² in GPT-2."""
        return self.vocab_size * self.n_embd + self.n_block_matrix_params

    @cached_property
    def block_matrices(self) -> Counter[tuple[int, ...]]:
        return Counter(p.shape for p in self.parameters() if is_block_matrix(p.name, p.shape))

    @cached_property
    def n_block_matrix_params(self) -> int:
        return sum(math.prod(shape) * count for shape, count in self.block_matrices.items())

    @property
    def newton_schulz_bytes(self) -> int:
        """What Muon's step takes for a moment (model/muon.py): a batch of matrices in fp32 beside its copy in half
        precision, or two such copies beside two square matmuls."""
        most = 0
        for shape, count in self.block_matrices.items():
            at_once = min(count, max(1, NS_BATCH_ELEMENTS // math.prod(shape)))
            elements, square = at_once * math.prod(shape), at_once * min(shape) ** 2
            most = max(most, 6 * elements, 4 * elements + 4 * square)
        return most

    def optimizer_groups(self) -> dict[bool, tuple[int, int]]:
        """Return {decayed: (tensors, parameters)}, what nanoGPT prints when it makes the optimizer."""
        counts = {True: (0, 0), False: (0, 0)}
        for parameter in self.parameters():
            tensors, numel = counts[parameter.decayed]
            counts[parameter.decayed] = (tensors + 1, numel + parameter.numel)
        return counts

    # FLOPs of training per token, forward and backward, one multiply-add counted as two.

    @property
    def flops_per_token_6n(self) -> int:
        """Return 6·N with nanoGPT's N: the rule of thumb of Kaplan et al. 2020, arXiv:2001.08361."""
        return 6 * self.n_params_nanogpt

    @property
    def flops_per_token(self) -> int:
        """6·N + 12·L·H·D·T: nanoGPT's estimate_mfu (PaLM, arXiv:2204.02311, appendix B), with full attention."""
        return self.flops_per_token_6n + 2 * self._causal_attention_flops

    @property
    def causal_flops_per_token(self) -> int:
        """The same with the half of attention's square that a causal kernel computes."""
        return self.flops_per_token_6n + self._causal_attention_flops

    @property
    def block_forward_flops_per_token(self) -> int:
        """The forward pass of one block: what activation checkpointing recomputes."""
        matrices = sum(math.prod(p.shape) for p in self.block_parameters("0.0.") if is_block_matrix(p.name, p.shape))
        return 2 * matrices + 4 * self.attention_width * self.block_size

    @property
    def attention_width(self) -> int:
        """All heads of queries beside each other: C, but where a family gives heads another width."""
        return self.n_head * self.head_dim

    @property
    def _causal_attention_flops(self) -> int:
        return 6 * self.n_layer * self.attention_width * self.block_size


def facts_of_run(config: RunConfig) -> ModelFacts:
    """Return the model of a config of ours, described as those of Hugging Face are."""
    shape, gpt2, llama = ModelShape.of(config), config.recipe == "nanogpt", config.recipe == "llama"
    return ModelFacts(
        model_type="gpt2" if gpt2 else config.recipe, n_layer=config.n_layer, n_embd=config.n_embd,
        n_head=config.n_head, n_kv_head=shape.n_kv_head, head_dim=shape.head_dim,
        mlp_width=config.mlp_inner if llama else 4 * config.n_embd, vocab_size=config.vocab_size,
        max_positions=config.block_size, norm="layer" if gpt2 else "rms", norm_bias=config.bias,
        norm_affine=config.recipe != "nanochat", mlp="gated" if llama else "plain",
        activation="silu" if llama else "gelu" if gpt2 else "relu2", positions="learned" if gpt2 else "rotary",
        qkv_bias=config.bias, out_bias=config.bias, mlp_bias=config.bias,
        tied=gpt2 or (llama and config.tied_embeddings), fused_qkv=gpt2,
        qk_norm="head" if llama and config.qk_norm else "",
        dtype="bfloat16" if config.dtype == "auto" else config.dtype,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _shape(values: tuple[Any, ...]) -> ModelShape:
    return ModelShape(RunConfig.model_construct(**dict(zip(_SIZES, values, strict=True))))


# Attention as matmuls (attention.py): T context, D width of a head, N = micro-batch x heads. No torch.

GROUP_BYTES = 2 << 20  # of scores at one time: about what the second caches of two cores hold
WHOLE = 256  # the longest context whose queries are taken all at once
# Of a longer context, queries at one time, against the keys that they can see. Fewer skip more of the future, more make
# larger products: at T 512 and 1024 forward and backward took 8 to 15% longer with 256, and as long or longer with 64.
ROWS = 128


def rows_at_once(T: int) -> int:
    return T if T <= WHOLE else ROWS


def keeps_probabilities(T: int, D: int) -> bool:
    return 4 * D >= T and T <= WHOLE


def group_size(N: int, T: int, item_bytes: int) -> int:
    """Return how many heads' scores exist at one time, about GROUP_BYTES; even, or cores would idle."""
    most = max(1, GROUP_BYTES // (rows_at_once(T) * T * item_bytes))
    return -(-N // -(-N // most))


def score_elements(N: int, T: int, item_bytes: int) -> int:
    return group_size(N, T, item_bytes) * rows_at_once(T) * T


def kept_elements(N: int, T: int, D: int) -> int:
    return N * T * T if keeps_probabilities(T, D) else 0

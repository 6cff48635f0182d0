"""What of a model decides how it generates text: how many numbers it reads for a token, and how many it keeps for each.

A model comes from a config of ours, or from a config.json of Hugging Face. No torch.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.keys import MOST_POSITIONS, MOST_TOKENS, Keys
from foretrain.config.hub.parameters import parameters_of
from foretrain.config.inference.formats import published_in
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape, is_block_matrix

_DTYPES = {"float32": "bf16", "bfloat16": "bf16", "float16": "f16"}


class InferenceModel(Record):
    """Counts of a decoder's parameters by how they are read, and of the numbers in its KV cache.

    `block_params`: matrices in all blocks, those of experts not among them; `other_params`: norms, biases, positions.
    `kv_numbers`: of one token in one layer. `sliding_layers`: layers that see the last `sliding_window` tokens alone.
    """

    name: str
    where: str
    family: str
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    block_params: int
    embedding_params: int
    tied: bool
    other_params: int
    expert_params: int = 0
    n_expert: int = 0
    experts_per_token: int = 0
    kv_numbers: int = 0
    latent: bool = False  # keys and values are made of one compressed vector (MLA)
    sliding_window: int = 0
    sliding_layers: int = 0
    dtype: str = "bf16"
    quantization: str = ""  # how the published weights are quantized, where they are
    published: str = ""  # and in which format, where that is known here

    @property
    def n_params(self) -> int:
        """All of them, a tied head once."""
        return self.block_params + self.expert_params + self.other_params + self.embedding_params + self.head_params

    @property
    def head_params(self) -> int:
        """Those of a head of its own; 0 where it is the embedding."""
        return 0 if self.tied else self.vocab_size * self.n_embd

    def read_experts(self, tokens: int) -> float:
        """The share of all experts that so many tokens together read, where each token's are drawn evenly."""
        if not self.n_expert:
            return 0.0
        missed = 1 - self.experts_per_token / self.n_expert
        return 1 - missed**tokens

    @property
    def token_params(self) -> float:
        """Parameters that one token is multiplied by: its own experts, and the head."""
        own = self.expert_params * (self.experts_per_token / self.n_expert) if self.n_expert else 0.0
        return self.block_params + own + self.vocab_size * self.n_embd

    def cached_tokens(self, context: int) -> int:
        """Tokens that all layers keep together of so long a text."""
        short = min(context, self.sliding_window) if self.sliding_layers else 0
        return (self.n_layer - self.sliding_layers) * context + self.sliding_layers * short


def model_of_config(config: RunConfig, name: str) -> InferenceModel:
    """That of a config of ours."""
    shape = ModelShape.of(config)
    parameters = list(shape.parameters())
    tokens = [p for p in parameters if p.name in shape.family.tokens]
    blocks = sum(p.numel for p in parameters if is_block_matrix(p.name, p.shape))
    embedding = config.vocab_size * config.n_embd
    return InferenceModel(
        name=name, where=name, family=shape.family.name, n_layer=config.n_layer, n_embd=config.n_embd,
        n_head=config.n_head, n_kv_head=shape.n_kv_head, head_dim=shape.head_dim,
        mlp_width=_widest(p.shape for p in parameters if is_block_matrix(p.name, p.shape)),
        vocab_size=config.vocab_size, max_positions=config.block_size, block_params=blocks, embedding_params=embedding,
        tied=len(tokens) == 1, other_params=shape.n_params - blocks - embedding * len(tokens),
        kv_numbers=2 * shape.n_kv_head * shape.head_dim, dtype=_DTYPES.get(config.dtype, "bf16"),
    )  # fmt: skip


def _widest(shapes: Iterable[tuple[int, ...]]) -> int:
    return max(max(shape) for shape in shapes)


def model_of_source(source: ModelSource) -> InferenceModel:
    """That of a config.json. Raises UserError for a family whose parts foretrain does not know."""
    if source.facts is not None:
        return _published(_of_facts(source, source.facts), source)
    found = latent_model(source.config, source.where)
    if found is None:
        raise UserError(
            "usage.inference_family_unknown", model=str(source.config.get("model_type"))[:40], source=source.where
        )
    return _published(InferenceModel(name=source.name, where=source.where, **found), source)


def _published(model: InferenceModel, source: ModelSource) -> InferenceModel:
    """With the format of its published weights, where they are quantized."""
    quantization = source.config.get("quantization_config")
    if not isinstance(quantization, Mapping) or not quantization:
        return model
    method = str(quantization.get("quant_method", "bitsandbytes"))[:40]
    return model.model_copy(update={"quantization": method, "published": published_in(quantization)})


def _of_facts(source: ModelSource, facts: ModelFacts) -> InferenceModel:
    sums: dict[str, int] = {}
    for parameter in parameters_of(facts):
        if parameter.role == "vision" or "vision_tower" in parameter.name:
            continue  # the tower that reads pictures; text alone does not meet it
        sums[parameter.role] = sums.get(parameter.role, 0) + math.prod(parameter.shape)
    head_bias = facts.vocab_size if facts.head_bias else 0
    return InferenceModel(
        name=source.name, where=source.where, family=facts.model_type, n_layer=facts.n_layer, n_embd=facts.n_embd,
        n_head=facts.n_head, n_kv_head=facts.n_kv_head, head_dim=facts.head_dim,
        mlp_width=facts.mlp_width if not facts.n_expert else facts.expert_width * facts.experts_per_token,
        vocab_size=facts.vocab_size, max_positions=facts.max_positions,
        block_params=sums.get("linear", 0) + sums.get("router", 0), embedding_params=sums["embedding"], tied=facts.tied,
        other_params=sum(sums.get(role, 0) for role in ("norm", "bias", "position")) + head_bias,
        expert_params=sums.get("expert", 0), n_expert=facts.n_expert, experts_per_token=facts.experts_per_token,
        kv_numbers=2 * facts.n_kv_head * facts.head_dim, sliding_window=facts.sliding_window,
        sliding_layers=len(facts.sliding_layers), dtype=_DTYPES[facts.dtype],
    )  # fmt: skip


# DeepSeek's models with multi-head latent attention (MLA, arXiv:2405.04434), from their config.json: counts alone.
#
# A layer keeps one vector of kv_lora_rank numbers for each token, and one rotated key of qk_rope_head_dim for all
# heads. transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py.

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def latent_model(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The fields of an InferenceModel, without its name; None of another family. Raises UserError for bad sizes."""
    family = config.get("model_type")
    if family not in MODEL_TYPES:
        return None
    keys = Keys(config, where, str(family))
    n_layer, width, heads = (
        keys.layers("num_hidden_layers"),
        keys.whole("hidden_size"),
        keys.whole("num_attention_heads"),
    )
    rank, rope = keys.whole("kv_lora_rank"), keys.whole("qk_rope_head_dim")
    no_rope, value = keys.whole("qk_nope_head_dim"), keys.whole("v_head_dim")
    asked = keys.whole("q_lora_rank", default=0, least=0)
    queries = heads * (no_rope + rope)
    attention = asked * (width + queries) if asked else width * queries
    attention += width * (rank + rope) + rank * heads * (no_rope + value) + heads * value * width
    n_expert, expert = (
        keys.whole("n_routed_experts", default=0, least=0),
        keys.whole("moe_intermediate_size", default=1),
    )
    dense = min(n_layer, keys.whole("first_k_dense_replace", default=0, least=0)) if n_expert else n_layer
    sparse, mlp = n_layer - dense, keys.whole("intermediate_size")
    shared = keys.whole("n_shared_experts", default=0, least=0)
    beside = width * (n_expert + 3 * shared * expert)  # the router, and experts that every token asks
    vocab = keys.whole("vocab_size", most=MOST_TOKENS)
    return {
        "family": str(family), "n_layer": n_layer, "n_embd": width, "n_head": heads, "n_kv_head": 1,
        "head_dim": rank + rope, "mlp_width": mlp, "vocab_size": vocab,
        "max_positions": keys.whole("max_position_embeddings", default=4096, most=MOST_POSITIONS),
        "block_params": n_layer * attention + dense * 3 * width * mlp + sparse * beside,
        "embedding_params": vocab * width, "tied": keys.flag("tie_word_embeddings", False),
        "other_params": n_layer * (2 * width + rank + asked) + width,
        "expert_params": sparse * n_expert * 3 * width * expert, "n_expert": n_expert,
        "experts_per_token": keys.whole("num_experts_per_tok", default=1), "kv_numbers": rank + rope, "latent": True,
    }  # fmt: skip

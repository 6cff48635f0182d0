"""DeepSeek's models with multi-head latent attention (MLA, arXiv:2405.04434), from their config.json: counts alone.

A layer keeps one vector of kv_lora_rank numbers for each token, and one rotated key of qk_rope_head_dim for all heads.
transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py.
"""

from collections.abc import Mapping
from typing import Any

from foretrain.config.hub.keys import MOST_POSITIONS, MOST_TOKENS, Keys

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

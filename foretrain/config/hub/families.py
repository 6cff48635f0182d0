"""What each family of transformers 5.23 (models/NAME/) is made of: {model_type: its config.json as a block's parts}."""

from collections.abc import Callable, Iterable
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.hub.facts import LatentAttention, VisionFacts
from foretrain.config.hub.keys import MOST_POSITIONS, MOST_TOKENS, Keys, Unknown

Parts = dict[str, Any]  # fields of ModelFacts

# transformers/activations.py; others, such as quick_gelu, keep something else for backward.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_LAYER_NORM: Parts = {"norm": "layer", "norm_bias": True}
_PLAIN: Parts = {"mlp": "plain", "mlp_bias": True}


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise Unknown(name)
    return _ACTIVATIONS[name]


def _heads(keys: Keys, n_embd: int, n_head: int, n_kv_head: int, head_dim: int | None, *, strict: bool) -> Parts:
    if (strict or head_dim is None) and n_embd % n_head:
        raise UserError("config.hub_heads", where=keys.where, heads=n_head, width=n_embd)
    if n_head % n_kv_head:
        raise UserError("config.hub_kv_heads", where=keys.where, heads=n_head, kv_heads=n_kv_head)
    return {"n_head": n_head, "n_kv_head": n_kv_head, "head_dim": head_dim or n_embd // n_head}


def _sizes(
    keys: Keys,
    *,
    positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    strict: bool = False,
    own: Parts | None = None,
) -> Parts:
    """Read the sizes; `own`: with transformers' defaults. kv_heads, head_dim None: as queries; width over heads."""
    own = own or {}
    n_embd = keys.whole("hidden_size")
    n_head = keys.whole("num_attention_heads", default=own.get("num_attention_heads"))
    n_kv_head = keys.whole("num_key_value_heads", default=kv_heads or n_head)
    width = keys.whole("head_dim", default=head_dim or 0) or None
    return {
        "n_layer": keys.layers("num_hidden_layers"), "n_embd": n_embd,
        **_heads(keys, n_embd, n_head, n_kv_head, width, strict=strict),
        "mlp_width": keys.whole("intermediate_size"),
        "vocab_size": keys.whole("vocab_size", default=own.get("vocab_size"), most=MOST_TOKENS),
        "max_positions": keys.whole("max_position_embeddings", default=positions, most=MOST_POSITIONS),
        "attention_dropout": keys.share("attention_dropout"),
        "activation": activation(keys.word("hidden_act", default="silu")),
        "tied": keys.flag("tie_word_embeddings", False),
    }  # fmt: skip


def _rotated(keys: Keys, head_dim: int, default: float, name: str = "partial_rotary_factor") -> int:
    newer = keys.table("rope_parameters")
    share = newer.number("partial_rotary_factor", keys.number(name, default, most=1), most=1)
    return 0 if share == 1 else int(head_dim * share)


def _window(keys: Keys, n_layer: int, default: int | None, layers: Iterable[int] | None = None) -> Parts:
    """Read the window and its layers: layer_types, else `layers`, else all; None of a family without layer_types."""
    explicit_none = "sliding_window" in keys.config and keys.config["sliding_window"] is None
    window = 0 if explicit_none else keys.whole("sliding_window", default=default or 0, least=0, most=MOST_POSITIONS)
    if layers is None:
        return {"sliding_window": window, "sliding_layers": tuple(range(n_layer)) if window else ()}
    types = keys.listed("layer_types", n_layer)
    if types is not None:
        if not {*types} <= {"sliding_attention", "full_attention"}:
            raise Unknown("layer_types")
        layers = [layer for layer, each in enumerate(types) if each == "sliding_attention"]
    found = tuple(layers) if window else ()
    return {"sliding_window": window if found else 0, "sliding_layers": found}


def _used_window(keys: Keys, n_layer: int, layers: Iterable[int]) -> Parts:
    return _window(keys, n_layer, 4096, layers) if keys.flag("use_sliding_window", False) else {}


def _llama(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    return {
        **_sizes(keys, positions=2048, strict=True), "qkv_bias": bias, "out_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }  # fmt: skip


def _arcee(keys: Keys) -> Parts:
    found, bias = _sizes(keys, positions=4096, strict=True), keys.flag("attention_bias", False)
    parts = {**found, "qkv_bias": bias, "out_bias": bias, "mlp": "plain", "mlp_bias": keys.flag("mlp_bias", False)}
    return {**parts, "activation": activation(keys.word("hidden_act", default="relu2"))}


def _seed_oss(keys: Keys) -> Parts:
    return {
        **_sizes(keys, positions=524_288, kv_heads=8, head_dim=128), "qkv_bias": keys.flag("attention_bias", True),
        "out_bias": keys.flag("attention_out_bias", False), "mlp_bias": keys.flag("mlp_bias", False),
        "attention_dropout": keys.share("attention_dropout", default=0.1),
        "residual_dropout": keys.share("residual_dropout", default=0.1),
    }  # fmt: skip


def _glm(keys: Keys) -> Parts:
    found = _sizes(keys, positions=131_072, kv_heads=2, head_dim=128)
    parts = {**found, "fused_gate_up": True, "qkv_bias": keys.flag("attention_bias", True), "rotary": "pairs"}
    return {**parts, "rotary_dim": _rotated(keys, found["head_dim"], 0.5)}


def _glm4(keys: Keys) -> Parts:
    return {**_glm(keys), "norms": "sandwich"}


def _helium(keys: Keys) -> Parts:
    biases = {"qkv_bias": keys.flag("attention_bias", False), "mlp_bias": keys.flag("mlp_bias", False)}
    return {**_sizes(keys, positions=4096, kv_heads=20, head_dim=128), **biases, "rotary": "pairs"}


def _ernie4_5(keys: Keys) -> Parts:
    bias = keys.flag("use_bias", False)
    return {
        **_sizes(keys, positions=131_072, kv_heads=2, head_dim=128), "rotary": "pairs_fp32", "qkv_bias": bias,
        "out_bias": bias, "mlp_bias": bias, "tied": keys.flag("tie_word_embeddings", True), "attention_dropout": 0.0,
    }  # fmt: skip


def _hunyuan(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    parts = {**_sizes(keys, positions=2048), "qkv_bias": bias, "out_bias": bias}
    return {**parts, "qk_norm": "head", "qk_norm_after": "rotary"}


def _exaone4(keys: Keys) -> Parts:
    found = _sizes(keys, positions=2048)
    n_layer, every = found["n_layer"], keys.config.get("sliding_window_pattern") or 4
    if type(every) is not int and keys.listed("layer_types", n_layer) is None:
        raise Unknown("sliding_window_pattern")
    sliding = [layer for layer in range(n_layer) if type(every) is int and (layer + 1) % every]
    window = _window(keys, n_layer, 4096, sliding)
    plain = {*range(n_layer)} - {*window["sliding_layers"]} if window["sliding_window"] else ()
    parts = {**found, **window, "norms": "post", "qk_norm": "head", "qk_norm_after": "transpose"}
    return {**parts, "layers_without_rotary": tuple(sorted(plain))}


def _ministral3(keys: Keys) -> Parts:
    found = _sizes(keys, positions=262_144, kv_heads=8, head_dim=128)
    return {**found, "scaled_queries": True, **_window(keys, found["n_layer"], None)}


def _mistral(keys: Keys) -> Parts:
    found = _sizes(keys, positions=131_072, kv_heads=8)
    return {**found, **_window(keys, found["n_layer"], 4096)}


def _qwen2(keys: Keys) -> Parts:
    found = _sizes(keys, positions=32_768, kv_heads=32)
    last = range(keys.whole("max_window_layers", default=28, least=0), found["n_layer"])
    return {**found, "qkv_bias": True, **_used_window(keys, found["n_layer"], last)}


def _qwen3(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    found = _sizes(keys, positions=32_768, kv_heads=32, head_dim=128)
    last = range(keys.whole("max_window_layers", default=28, least=0), found["n_layer"])
    parts = {**found, "qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}
    return {**parts, **_used_window(keys, found["n_layer"], last)}


def _gemma(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    act = keys.word("hidden_act", default="gelu_pytorch_tanh")
    return {
        **_sizes(keys, positions=8192, kv_heads=16, head_dim=256), "norm": "gemma_rms", "scaled_embedding": True,
        "qkv_bias": bias, "out_bias": bias, "tied": keys.flag("tie_word_embeddings", True),
        "activation": "gelu_tanh" if act == "gelu" else activation(act),  # as GemmaConfig reads "gelu"
    }  # fmt: skip


def _sandwich(keys: Keys, *, positions: int, every: int, attention: float, logits: float, own: Parts) -> Parts:
    """Read Gemma 2 and 3: a norm before and after each part, and a layer with full attention after each `every` - 1."""
    bias = keys.flag("attention_bias", False)
    found = _sizes(keys, positions=positions, kv_heads=4, head_dim=256, strict=True, own=own)
    sliding = [layer for layer in range(found["n_layer"]) if (layer + 1) % every]
    return {
        **found, "norm": "gemma_rms", "norms": "sandwich", "scaled_embedding": True, "qkv_bias": bias, "out_bias": bias,
        "tied": keys.flag("tie_word_embeddings", True),
        "activation": activation(keys.word("hidden_activation", default="gelu_pytorch_tanh")),
        "attention_softcap": _softcap(keys, "attn_logit_softcapping", attention),
        "logit_softcap": _softcap(keys, "final_logit_softcapping", logits),
        **_window(keys, found["n_layer"], 4096, sliding),
    }  # fmt: skip


def _softcap(keys: Keys, name: str, default: float) -> float:
    return 0.0 if name in keys.config and keys.config[name] is None else keys.number(name, default)


def _gemma2(keys: Keys) -> Parts:
    return _sandwich(keys, positions=8192, every=2, attention=50.0, logits=30.0, own={})


def _gemma3_text(keys: Keys) -> Parts:
    every = keys.whole("sliding_window_pattern", default=6)
    own = {"vocab_size": 262_208, "num_attention_heads": 8}  # which the configs of Gemma 3 4B and 12B leave out
    found = _sandwich(keys, positions=131_072, every=every, attention=0.0, logits=0.0, own=own)
    return {**found, "qk_norm": "head", "qk_norm_after": "transpose"}


def _gemma3(keys: Keys) -> Parts:
    """Read the decoder within a model that also reads pictures, and its tower's sizes (SigLIP's)."""
    text, vision = keys.table("text_config"), keys.table("vision_config")
    if vision.word("model_type", default="siglip_vision_model") != "siglip_vision_model":
        raise Unknown("vision_config")
    if vision.flag("vision_use_head", True):
        raise Unknown("vision_use_head")
    tower = VisionFacts(
        n_layer=vision.whole("num_hidden_layers", default=12, most=2048),
        n_embd=vision.whole("hidden_size", default=768), n_head=vision.whole("num_attention_heads", default=12),
        mlp_width=vision.whole("intermediate_size", default=3072), n_channel=vision.whole("num_channels", default=3),
        image_size=vision.whole("image_size", default=224), patch_size=vision.whole("patch_size", default=16),
    )  # fmt: skip
    return {**_gemma3_text(text), "vision": tower, "tied": keys.flag("tie_word_embeddings", True)}


def _smollm3(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    found = _sizes(keys, positions=32_768, kv_heads=4)
    n_layer, every = found["n_layer"], keys.whole("no_rope_layer_interval", default=4)
    rotated = keys.listed("no_rope_layers", n_layer, exactly=False)
    if rotated is None:
        rotated = [(layer + 1) % every for layer in range(n_layer)]
    plain = tuple(layer for layer, each in enumerate(rotated) if not each)
    parts = {
        **found, "qkv_bias": bias, "out_bias": bias, "mlp_bias": keys.flag("mlp_bias", False),
        "tied": keys.flag("tie_word_embeddings", True), "layers_without_rotary": plain,
    }  # fmt: skip
    used = _window(keys, n_layer, None, plain) if keys.flag("use_sliding_window", False) else {}
    return {**parts, **used}


def _gpt_neox(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", True)
    found = _sizes(keys, positions=2048, strict=True)
    dropout = keys.share("hidden_dropout")
    if found["n_kv_head"] != found["n_head"]:
        raise Unknown("num_key_value_heads")
    return {
        **found, **_LAYER_NORM, **_PLAIN, "fused_qkv": True, "qkv_bias": bias, "out_bias": bias,
        "activation": activation(keys.word("hidden_act", default="gelu")),
        "rotary_dim": _rotated(keys, found["head_dim"], 0.25, "rotary_pct"),
        "parallel": keys.flag("use_parallel_residual", True),
        "embedding_dropout": dropout, "residual_dropout": dropout,
    }  # fmt: skip


def _phi(keys: Keys) -> Parts:
    if keys.flag("qk_layernorm", False):
        raise Unknown("qk_layernorm")
    found = _sizes(keys, positions=2048)
    return {
        **found, **_LAYER_NORM, **_PLAIN, "qkv_bias": True, "out_bias": True, "head_bias": True,
        "parallel": True, "shared_norm": True, "activation": activation(keys.word("hidden_act", default="gelu_new")),
        "rotary_dim": _rotated(keys, found["head_dim"], 0.5),
        "embedding_dropout": keys.share("embd_pdrop"), "residual_dropout": keys.share("resid_pdrop"),
    }  # fmt: skip


def _phi3(keys: Keys) -> Parts:
    found = _sizes(keys, positions=4096)
    return {
        **found, "fused_qkv": True, "fused_gate_up": True, "rotary_dim": _rotated(keys, found["head_dim"], 1.0),
        "residual_dropout": keys.share("resid_pdrop"), **_window(keys, found["n_layer"], None),
    }  # fmt: skip


def _gpt2_sizes(keys: Keys, act: str, n_kv_head: int | None) -> Parts:
    """Read GPT-2 and GPT BigCode; without dropout in their configs it is a tenth."""
    if keys.flag("add_cross_attention", False):
        raise Unknown("add_cross_attention")
    n_embd = keys.whole("n_embd", "hidden_size")
    n_head = keys.whole("n_head", "num_attention_heads")
    return {
        **_LAYER_NORM, **_PLAIN, "n_layer": keys.layers("n_layer", "num_hidden_layers"), "n_embd": n_embd,
        **_heads(keys, n_embd, n_head, n_kv_head or n_head, None, strict=True),
        "mlp_width": keys.whole("n_inner", default=4 * n_embd),
        "vocab_size": keys.whole("vocab_size", most=MOST_TOKENS),
        "max_positions": keys.whole("n_positions", "max_position_embeddings", default=1024, most=MOST_POSITIONS),
        "activation": activation(keys.word("activation_function", default=act)), "positions": "learned",
        "fused_qkv": True, "qkv_bias": True, "out_bias": True, "tied": keys.flag("tie_word_embeddings", True),
        "embedding_dropout": keys.share("embd_pdrop", default=0.1),
        "attention_dropout": keys.share("attn_pdrop", default=0.1),
        "residual_dropout": keys.share("resid_pdrop", default=0.1),
    }  # fmt: skip


def _gpt2(keys: Keys) -> Parts:
    return {**_gpt2_sizes(keys, "gelu_new", None), "conv1d": True}


def _gpt_bigcode(keys: Keys) -> Parts:
    return _gpt2_sizes(keys, "gelu_pytorch_tanh", 1 if keys.flag("multi_query", True) else None)


def _olmo(keys: Keys) -> Parts:
    if keys.has("clip_qkv"):
        raise Unknown("clip_qkv")
    bias = keys.flag("attention_bias", False)
    return {
        **_sizes(keys, positions=2048), "norm": "layer", "norm_affine": False, "qkv_bias": bias, "out_bias": bias,
    }  # fmt: skip


def _olmo2(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    return {
        **_sizes(keys, positions=2048), "norms": "post", "qk_norm": "whole", "qkv_bias": bias, "out_bias": bias,
    }  # fmt: skip


def _olmo3(keys: Keys) -> Parts:
    found = _olmo2(keys)
    sliding = [layer for layer in range(found["n_layer"]) if (layer + 1) % 4]
    return {**found, **_window(keys, found["n_layer"], 4096, sliding)}


def _stablelm(keys: Keys) -> Parts:
    if keys.flag("qk_layernorm", False):
        raise Unknown("qk_layernorm")
    found = _sizes(keys, positions=4096, kv_heads=32)
    parallel = keys.flag("use_parallel_residual", False)
    return {
        **found, **_LAYER_NORM, "qkv_bias": keys.flag("use_qkv_bias", False), "parallel": parallel,
        "shared_norm": parallel, "rotary_dim": _rotated(keys, found["head_dim"], 0.25),
        "residual_dropout": keys.share("hidden_dropout"),
    }  # fmt: skip


def _starcoder2(keys: Keys) -> Parts:
    bias = keys.flag("use_bias", True)
    found = _sizes(keys, positions=4096, kv_heads=2)
    return {
        **found, **_LAYER_NORM, "mlp": "plain", "mlp_bias": bias, "qkv_bias": bias, "out_bias": bias,
        "activation": activation(keys.word("hidden_act", default="gelu_pytorch_tanh")),
        "tied": keys.flag("tie_word_embeddings", True),
        "embedding_dropout": keys.share("embedding_dropout"), "residual_dropout": keys.share("residual_dropout"),
        **_window(keys, found["n_layer"], None),
    }  # fmt: skip


def _granite(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    return {
        **_sizes(keys, positions=2048), "qkv_bias": bias, "out_bias": bias, "mlp_bias": keys.flag("mlp_bias", False),
        "scaled_embedding": True, "scaled_residual": True, "scaled_logits": True,
    }  # fmt: skip


def _experts(
    keys: Keys, count: tuple[str, ...], default: int, each: int, width: int, normed: bool | None = None
) -> Parts:
    """Read a mixture. `normed`: shares add up to 1; None: by norm_topk_prob. Balancing loss and noise are not known."""
    if keys.flag("output_router_logits", False):
        raise Unknown("output_router_logits")
    if keys.number("router_jitter_noise", 0.0):
        raise Unknown("router_jitter_noise")
    normed = keys.flag("norm_topk_prob", False) if normed is None else normed
    n_expert = keys.whole(*count, default=default)
    taken = keys.whole("num_experts_per_tok", default=each)
    if taken > n_expert:
        raise UserError("config.hub_experts", where=keys.where, taken=taken, experts=n_expert)
    return {
        "n_expert": n_expert, "experts_per_token": taken, "expert_width": width, "normed_experts": normed,
        "balanced": keys.number("router_aux_loss_coef", 0.001) > 0,
    }  # fmt: skip


def _mixtral(keys: Keys) -> Parts:
    found = _sizes(keys, positions=131_072, kv_heads=8)
    return {
        **found, **_experts(keys, ("num_local_experts", "num_experts"), 8, 2, found["mlp_width"], normed=True),
        **_window(keys, found["n_layer"], None),
    }  # fmt: skip


def _dense_layers(keys: Keys, n_layer: int) -> tuple[int, ...]:
    plain = keys.numbers_of_layers("mlp_only_layers", n_layer)
    every = keys.whole("decoder_sparse_step", default=1)
    return tuple(layer for layer in range(n_layer) if layer in plain or (layer + 1) % every)


def _qwen3_moe(keys: Keys) -> Parts:
    bias = keys.flag("attention_bias", False)
    found = _sizes(keys, positions=32_768, kv_heads=4)
    width = keys.whole("moe_intermediate_size", default=768)
    window = _window(keys, found["n_layer"], 4096) if keys.flag("use_sliding_window", False) else {}
    return {
        **found, "qkv_bias": bias, "out_bias": bias, "qk_norm": "head",
        **_experts(keys, ("num_experts", "num_local_experts"), 128, 8, width),
        "dense_layers": _dense_layers(keys, found["n_layer"]), **window,
    }  # fmt: skip


def _qwen2_moe(keys: Keys) -> Parts:
    found = _sizes(keys, positions=32_768, kv_heads=16)
    width, n_layer = keys.whole("moe_intermediate_size", default=1408), found["n_layer"]
    shared = keys.whole("shared_expert_intermediate_size", default=5632)
    sliding = range(0, min(n_layer, keys.whole("max_window_layers", default=28, least=0)), 2)
    return {
        **found, "qkv_bias": keys.flag("qkv_bias", True), "shared_expert_width": shared,
        **_experts(keys, ("num_experts", "num_local_experts"), 60, 4, width),
        "dense_layers": _dense_layers(keys, n_layer), **_used_window(keys, n_layer, sliding),
    }  # fmt: skip


def _olmoe(keys: Keys) -> Parts:
    if keys.number("clip_qkv", 0.0):
        raise Unknown("clip_qkv")
    bias = keys.flag("attention_bias", False)
    found = _sizes(keys, positions=4096)
    return {
        **found, "qkv_bias": bias, "out_bias": bias, "qk_norm": "whole",
        **_experts(keys, ("num_experts", "num_local_experts"), 64, 8, found["mlp_width"]),
    }  # fmt: skip


def _falcon(keys: Keys) -> Parts:
    """Read Falcon 7B's kind, in which attention and MLP read one norm; not 40B's kind with two, and no alibi."""
    two_norms = keys.flag("new_decoder_architecture", False) and keys.whole("num_ln_in_parallel_attn", default=2) == 2
    if keys.flag("alibi", False) or two_norms:
        raise Unknown("alibi, new_decoder_architecture")
    newer, multi_query = keys.flag("new_decoder_architecture", False), keys.flag("multi_query", True)
    n_embd = keys.whole("hidden_size", "n_embed")
    n_head = keys.whole("num_attention_heads", "n_head")
    kv_heads = keys.whole("num_kv_heads", "n_head_kv", default=n_head)
    n_kv_head = kv_heads if newer else 1 if multi_query else n_head
    bias, parallel = keys.flag("bias", False), newer or keys.flag("parallel_attn", True)
    return {
        **_LAYER_NORM, "n_layer": keys.layers("num_hidden_layers", "n_layer"), "n_embd": n_embd,
        **_heads(keys, n_embd, n_head, n_kv_head, None, strict=True), "mlp": "plain", "mlp_bias": bias,
        "mlp_width": keys.whole("ffn_hidden_size", default=4 * n_embd),
        "vocab_size": keys.whole("vocab_size", most=MOST_TOKENS),
        "max_positions": keys.whole("max_position_embeddings", default=2048, most=MOST_POSITIONS),
        "activation": activation(keys.word("activation", default="gelu")), "fused_qkv": True, "qkv_bias": bias,
        "out_bias": bias, "tied": keys.flag("tie_word_embeddings", True), "parallel": parallel, "shared_norm": parallel,
        "attention_dropout": keys.share("attention_dropout"), "residual_dropout": keys.share("hidden_dropout"),
    }  # fmt: skip


FAMILIES: dict[str, Callable[[Keys], Parts]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma": _gemma, "gemma2": _gemma2,
    "gemma3_text": _gemma3_text, "gemma3": _gemma3, "smollm3": _smollm3, "gpt_neox": _gpt_neox, "phi": _phi,
    "phi3": _phi3, "gpt2": _gpt2, "gpt_bigcode": _gpt_bigcode, "olmo": _olmo, "olmo2": _olmo2, "olmo3": _olmo3,
    "stablelm": _stablelm, "starcoder2": _starcoder2, "granite": _granite, "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe, "qwen2_moe": _qwen2_moe, "olmoe": _olmoe, "falcon": _falcon, "arcee": _arcee,
    "seed_oss": _seed_oss, "glm": _glm, "glm4": _glm4, "helium": _helium, "ernie4_5": _ernie4_5,
    "hunyuan_v1_dense": _hunyuan, "exaone4": _exaone4, "ministral3": _ministral3,
}  # fmt: skip


def _deepseek(keys: Keys) -> Parts:
    rank, rotated = keys.whole("kv_lora_rank"), keys.whole("qk_rope_head_dim")
    n_layer, n_expert = keys.layers("num_hidden_layers"), keys.whole("n_routed_experts", default=0, least=0)
    width, dense = (
        keys.whole("moe_intermediate_size", default=1),
        keys.whole("first_k_dense_replace", default=0, least=0),
    )
    latent = LatentAttention(
        query_rank=keys.whole("q_lora_rank", default=0, least=0),
        rank=rank,
        rotary_dim=rotated,
        key_dim=keys.whole("qk_nope_head_dim"),
        value_dim=keys.whole("v_head_dim"),
    )
    return {
        "n_layer": n_layer, "n_embd": keys.whole("hidden_size"), "n_head": keys.whole("num_attention_heads"),
        "n_kv_head": 1, "head_dim": rank + rotated, "latent": latent, "mlp_width": keys.whole("intermediate_size"),
        "vocab_size": keys.whole("vocab_size", most=MOST_TOKENS), "tied": keys.flag("tie_word_embeddings", False),
        "max_positions": keys.whole("max_position_embeddings", default=4096, most=MOST_POSITIONS),
        "n_expert": n_expert, "experts_per_token": keys.whole("num_experts_per_tok", default=1),
        "expert_width": width, "shared_expert_width": width * keys.whole("n_shared_experts", default=0, least=0),
        "dense_layers": tuple(range(min(n_layer, dense))),
    }  # fmt: skip


# Families that can be asked about generating text alone: model/hub/decoder.py has no such attention.
LATENT_FAMILIES: dict[str, Callable[[Keys], Parts]] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek
)

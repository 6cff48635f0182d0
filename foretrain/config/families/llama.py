"""`recipe = llama`: Llama, and Qwen3 with qk_norm; names are Hugging Face's. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from foretrain.config.families.family import NO_BIAS, NO_DROPOUT, Family, Named, Shape, count_layers, own_options
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.options import OPTIONS, RunConfig, named

_SHAPING = named(lambda option: option.from_weights and option.name not in ("block_size", "bias"))


class Llama(Family):
    name = "llama"
    called = "this Llama"
    model = ("foretrain.model.llama", "Llama")
    blocks = "model.layers"
    tokens = ("model.embed_tokens.weight", "lm_head.weight")
    parts: Mapping[str, tuple[str, str]] = {
        "embed_tokens": ("residual", "embedding"),
        "input_layernorm": ("norm", "attention"), "self_attn": ("attention", "attention"),
        "q_proj": ("attention", ""), "k_proj": ("attention", ""), "v_proj": ("attention", ""),
        "q_norm": ("norm", ""), "k_norm": ("norm", ""), "o_proj": ("residual", ""),
        "post_attention_layernorm": ("norm", "mlp"), "mlp": ("mlp", "mlp"), "gate_proj": ("mlp", ""),
        "up_proj": ("mlp", ""), "down_proj": ("residual", ""), "norm": ("norm", "loss"), "lm_head": ("", "loss"),
    }  # fmt: skip
    letters: Mapping[str, str] = {"kv_heads": "K", "head_width": "D", "mlp_inner": "F"}
    legend = "plan.legend_llama"
    sets: Mapping[str, Any] = {"dropout": 0.0, "bias": False}
    rules = (
        NO_DROPOUT,
        NO_BIAS,
        (
            ("n_embd", "n_head", "head_dim"),
            lambda c: (c.head_dim or (c.n_embd // c.n_head if c.n_embd % c.n_head == 0 else 2)) % 2 == 1,
            "llama_odd_heads",
        ),
        (("n_head", "n_kv_head"), lambda c: c.n_head % c.kv_heads != 0, "llama_groups"),
    )
    beside_nanogpt = False
    hugging_face = ("llama", "qwen3")

    def before(self, c: RunConfig) -> Named:
        yield "model.embed_tokens.weight", (c.vocab_size, c.n_embd)

    def block(self, c: RunConfig) -> Named:
        C, F, D = c.n_embd, c.mlp_inner, c.head_width
        queries, keys = c.n_head * D, c.kv_heads * D
        yield "input_layernorm.weight", (C,)
        yield "self_attn.q_proj.weight", (queries, C)
        yield "self_attn.k_proj.weight", (keys, C)
        yield "self_attn.v_proj.weight", (keys, C)
        yield "self_attn.o_proj.weight", (C, queries)
        if c.qk_norm:
            yield "self_attn.q_norm.weight", (D,)
            yield "self_attn.k_norm.weight", (D,)
        yield "post_attention_layernorm.weight", (C,)
        yield "mlp.gate_proj.weight", (F, C)
        yield "mlp.up_proj.weight", (F, C)
        yield "mlp.down_proj.weight", (C, F)

    def after(self, c: RunConfig) -> Named:
        yield "model.norm.weight", (c.n_embd,)
        if not c.tied_embeddings:
            yield "lm_head.weight", (c.vocab_size, c.n_embd)

    def buffers(self, c: RunConfig) -> Iterator[Shape]:
        yield from [(c.block_size, c.head_width)] * 2

    def looked_up(self, c: RunConfig) -> int:
        return 0 if c.tied_embeddings else c.vocab_size * c.n_embd

    def head_dim(self, c: RunConfig) -> int:
        return c.head_width

    def n_kv_head(self, c: RunConfig) -> int:
        return c.kv_heads

    # -- weights of others ----------------------------------------------------------------------------------

    def read_shape(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, Any]:
        values = (
            own_options(config, (*_SHAPING, "block_size"))
            if config.get("recipe") == self.name
            else _of_hugging_face(config)
        )
        values["qk_norm"] = "model.layers.0.self_attn.q_norm.weight" in shapes
        values["n_layer"] = count_layers(shapes, self.blocks)
        values["vocab_size"], values["n_embd"] = (*shapes.get("model.embed_tokens.weight", ()), 0, 0)[:2]
        made = RunConfig.model_construct(**{"recipe": self.name, **values})
        self.compare(made, shapes, ("lm_head.weight",) if made.tied_embeddings else ())
        return values

    def write_config(self, c: RunConfig, separator: int | None) -> dict[str, Any]:
        kind = "Qwen3" if c.qk_norm else "Llama"
        return {
            "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
            "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.kv_heads,
            "hidden_size": c.n_embd, "head_dim": c.head_width, "intermediate_size": c.mlp_inner,
            "max_position_embeddings": c.block_size, "vocab_size": c.vocab_size, "hidden_act": "silu",
            "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_scaling": None, "attention_bias": False,
            "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_sliding_window": False,
            "tie_word_embeddings": c.tied_embeddings, "use_cache": True, "dtype": "float32",
            "bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None,
        }  # fmt: skip

    def gguf_architecture(self, c: RunConfig) -> str:
        return "qwen3" if c.qk_norm else "llama"

    def write_gguf(self, c: RunConfig) -> dict[str, int | float]:
        return {
            "block_count": c.n_layer, "context_length": c.block_size, "embedding_length": c.n_embd,
            "feed_forward_length": c.mlp_inner, "attention.head_count": c.n_head,
            "attention.head_count_kv": c.kv_heads, "attention.key_length": c.head_width,
            "attention.value_length": c.head_width, "attention.layer_norm_rms_epsilon": c.norm_eps,
            "rope.dimension_count": c.head_width, "rope.freq_base": c.rope_theta, "vocab_size": c.vocab_size,
        }  # fmt: skip

    def gguf_rotated(self, c: RunConfig) -> Mapping[str, int]:
        """Qwen3 in llama.cpp turns halves against each other, as this family does."""
        return {} if c.qk_norm else {"self_attn.q_proj.weight": c.n_head, "self_attn.k_proj.weight": c.kv_heads}


# Options by Hugging Face's words, with their defaults there. (n_head stands for n_kv_head where that is left out.)
_WORDS: dict[str, tuple[str, Any]] = {
    "n_head": ("num_attention_heads", None), "n_kv_head": ("num_key_value_heads", 0), "head_dim": ("head_dim", 0),
    "mlp_width": ("intermediate_size", None), "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False), "block_size": ("max_position_embeddings", None),
}  # fmt: skip
# What must be so for the maths to be this family's, with what is meant where it is not said.
_SAME: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
}  # fmt: skip


def _of_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("model_type") not in Llama.hugging_face:
        raise Refused(f"its config.json says model_type = {str(config.get('model_type'))[:40]}, not llama or qwen3")
    for key, value in _SAME.items():
        if config.get(key, value) not in (value, None):
            raise Refused(f"its config.json says {key} = {str(config[key])[:40]}; only {value} is supported")
    rotary = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rotary
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind != "default":
        raise Refused(f"its config.json scales rotary positions ({str(kind)[:20]}), which is not supported")
    values = {name: config.get(word, usual) for name, (word, usual) in _WORDS.items()}
    values["rope_theta"] = rotary.get("rope_theta", config.get("rope_theta", OPTIONS["rope_theta"].default))
    for name, value in values.items():
        whole = type(OPTIONS[name].default)
        values[name] = value = (
            OPTIONS[name].default if value is None and _WORDS.get(name, ("", 0))[1] is not None else value
        )
        if type(value) is not whole and not (whole is float and type(value) is int):
            raise Refused(f"its config.json says {_WORDS.get(name, ('rope_theta', 0))[0]} = {str(value)[:40]}")
        if (isinstance(value, int | float) and value < 0) or (name in ("n_head", "mlp_width") and not value):
            raise Refused(f"its config.json says {_WORDS[name][0]} = {value}")
    return values

"""`recipe = nanochat`: the model of karpathy/nanochat, by the names of Hugging Face's NanoChatForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any

from foretrain.config.families.family import (
    EVEN_HEADS,
    NO_BIAS,
    NO_DROPOUT,
    Family,
    Named,
    Shape,
    count_layers,
    own_options,
)
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.options import RunConfig

SOFTCAP = 15.0
ROPE_BASE = 10_000.0
NORM_EPS = 1e-6


class NanoChat(Family):
    name = "nanochat"
    called = "nanochat's model"
    model = ("foretrain.model.nanochat", "NanoChat")
    blocks = "model.layers"
    tokens = ("model.embed_tokens.weight", "lm_head.weight")
    parts: Mapping[str, tuple[str, str]] = {
        "embed_tokens": ("residual", "embedding"), "self_attn": ("attention", "attention"),
        "q_proj": ("attention", ""), "k_proj": ("attention", ""), "v_proj": ("attention", ""),
        "o_proj": ("residual", ""), "mlp": ("mlp", "mlp"), "fc1": ("mlp", ""), "fc2": ("residual", ""),
        "lm_head": ("", "loss"),
    }  # fmt: skip
    # nanochat's own optimizer. The rate beside Muon's is the head's, which is tuned for a width of 768.
    sets: Mapping[str, Any] = {
        "optimizer": "muon", "lr_schedule": "linear", "cooldown": 0.2, "warmup_iters": 0, "dropout": 0.0, "bias": False,
    }  # fmt: skip
    rates: Mapping[str, Any] = {"learning_rate": 0.004, "min_lr": 0.0, "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95}
    rules = (
        NO_DROPOUT,
        NO_BIAS,
        EVEN_HEADS,
        (
            ("loss_chunk_size", "auto_chunker", "recipe"),
            lambda c: c.loss_chunk_size > 0 or c.auto_chunker,
            "nanochat_whole_loss",
        ),
    )
    beside_nanogpt = False
    hugging_face = ("nanochat",)

    def before(self, c: RunConfig) -> Named:
        yield "model.embed_tokens.weight", (c.vocab_size, c.n_embd)

    def block(self, c: RunConfig) -> Named:
        C = c.n_embd
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"self_attn.{name}.weight", (C, C)
        yield "mlp.fc1.weight", (4 * C, C)
        yield "mlp.fc2.weight", (C, 4 * C)

    def after(self, c: RunConfig) -> Named:
        yield "lm_head.weight", (c.vocab_size, c.n_embd)

    def buffers(self, c: RunConfig) -> Iterator[Shape]:
        yield from [(c.block_size, self.head_dim(c))] * 2

    def roughly_compiled(self, c: RunConfig) -> str:
        """Small models were 12% more in fp32, where attention has no kernel of its own, and 5% with checkpointing."""
        if c.activation_checkpointing:
            return "activation_checkpointing with recipe = nanochat"
        return "dtype = float32 with recipe = nanochat" if c.dtype == "float32" else ""

    def looked_up(self, c: RunConfig) -> int:
        return c.vocab_size * c.n_embd

    # -- weights of others ----------------------------------------------------------------------------------

    def owns(self, names: Mapping[str, Any]) -> bool:
        return f"{self.blocks}.0.mlp.fc1.weight" in names

    def read_shape(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, Any]:
        of_config = _own(config) if config.get("recipe") == self.name else _of_hugging_face(config)
        of_config["n_layer"] = count_layers(shapes, self.blocks)
        of_config["vocab_size"], of_config["n_embd"] = (*shapes.get("model.embed_tokens.weight", ()), 0, 0)[:2]
        if not of_config["n_embd"] or of_config["n_embd"] % of_config["n_head"]:
            raise Refused(f"its {of_config['n_head']} heads do not divide a width of {of_config['n_embd']}")
        self.compare(RunConfig.model_construct(recipe=self.name, **of_config), shapes)
        return of_config

    def write_config(self, c: RunConfig, separator: int | None) -> dict[str, Any]:
        return {
            "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat",
            "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_head,
            "hidden_size": c.n_embd, "head_dim": self.head_dim(c), "intermediate_size": 4 * c.n_embd,
            "max_position_embeddings": c.block_size, "vocab_size": c.vocab_size, "hidden_act": "relu2",
            "rms_norm_eps": NORM_EPS, "rope_theta": ROPE_BASE,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
            "final_logit_softcapping": SOFTCAP, "attention_bias": False, "attention_dropout": 0.0,
            "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True, "dtype": "float32",
            "bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None,
        }  # fmt: skip


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    of_config = own_options(config, ("n_head", "block_size"))
    if "n_head" not in of_config:
        raise Refused("its config does not say n_head")
    return of_config


def _of_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads and context. Raises Refused where its maths is not this family's."""
    if config.get("model_type") not in NanoChat.hugging_face:
        raise Refused(f"its config.json says model_type = {str(config.get('model_type'))[:40]}, not nanochat")
    of_config: dict[str, Any] = {}
    for name, word in (("n_head", "num_attention_heads"), ("block_size", "max_position_embeddings")):
        of_config[name] = config.get(word)
        if type(of_config[name]) is not int or of_config[name] < 1:
            raise Refused(f"its config.json says {word} = {str(of_config[name])[:40]}")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, dict) or rotary.get("rope_type", rotary.get("type", "default")) != "default":
        raise Refused("its config.json scales rotary positions, which is not supported")
    heads, width = of_config["n_head"], config.get("hidden_size")
    inside = 4 * width if type(width) is int else None
    each = width // heads if type(width) is int else None
    # What must be so for the maths to be this family's, with what is meant where it is not said.
    same = {
        "num_key_value_heads": (heads, heads), "head_dim": (each, each), "intermediate_size": (inside, None),
        "hidden_act": ("relu2", "relu2"), "rms_norm_eps": (NORM_EPS, NORM_EPS),
        "final_logit_softcapping": (SOFTCAP, SOFTCAP), "attention_bias": (False, False),
        "tie_word_embeddings": (False, False), "rope_theta": (ROPE_BASE, ROPE_BASE),
    }  # fmt: skip
    values = {"rope_theta": rotary.get("rope_theta", ROPE_BASE), **config}
    for word, (value, unsaid) in same.items():
        if values.get(word, unsaid) != value:
            raise Refused(f"its config.json says {word} = {str(values.get(word))[:40]}; only {value} is supported")
    return of_config

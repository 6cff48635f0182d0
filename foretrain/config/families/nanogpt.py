"""`recipe = nanogpt`: GPT-2 exactly as nanoGPT builds it. No torch."""

from collections.abc import Mapping
from typing import Any

from foretrain.config.families.family import Family, Named
from foretrain.config.nanogpt_checkpoint import BLOCK
from foretrain.config.options import RunConfig

NORM_EPS = 1e-5


class NanoGPT(Family):
    name = "nanogpt"
    model = ("foretrain.model.gpt2", "GPT")
    blocks = "transformer.h"
    tokens = ("transformer.wte.weight",)
    parts: Mapping[str, tuple[str, str]] = {
        "wte": ("residual", "embedding"), "wpe": ("residual", "embedding"), "drop": ("dropout", "embedding"),
        "ln_1": ("norm", "attention"), "attn": ("attention", "attention"), "c_attn": ("attention", ""),
        "ln_2": ("norm", "mlp"), "mlp": ("mlp", "mlp"), "c_fc": ("mlp", ""), "gelu": ("mlp", ""),
        "c_proj": ("residual", ""), "dropout": ("dropout", ""), "resid_dropout": ("dropout", ""),
        "ln_f": ("norm", "loss"), "lm_head": ("", "loss"),
    }  # fmt: skip
    positions = "transformer.wpe.weight"
    hugging_face = ("gpt2",)
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # Conv1D

    def before(self, c: RunConfig) -> Named:
        yield "transformer.wte.weight", (c.vocab_size, c.n_embd)
        yield "transformer.wpe.weight", (c.block_size, c.n_embd)

    def block(self, c: RunConfig) -> Named:
        for name, units in BLOCK.items():
            shape = tuple(unit * c.n_embd for unit in units) or (c.n_embd,)
            yield f"{name}.weight", shape
            if c.bias:
                yield f"{name}.bias", shape[:1]

    def after(self, c: RunConfig) -> Named:
        yield "transformer.ln_f.weight", (c.n_embd,)
        if c.bias:
            yield "transformer.ln_f.bias", (c.n_embd,)

    def looked_up(self, c: RunConfig) -> int:
        return c.block_size * c.n_embd

    def write_config(self, c: RunConfig, separator: int | None) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_inner": None,
            "n_positions": c.block_size, "vocab_size": c.vocab_size,
            "activation_function": "gelu", "layer_norm_epsilon": NORM_EPS, "initializer_range": 0.02,
            "attn_pdrop": c.dropout, "embd_pdrop": c.dropout, "resid_pdrop": c.dropout,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
            "tie_word_embeddings": True, "use_cache": True, "dtype": "float32",
            "bos_token_id": separator, "eos_token_id": separator,
        }  # fmt: skip

    def gguf_architecture(self, c: RunConfig) -> str:
        return "gpt2"

    def write_gguf(self, c: RunConfig) -> dict[str, int | float]:
        return {
            "block_count": c.n_layer, "context_length": c.block_size, "embedding_length": c.n_embd,
            "feed_forward_length": 4 * c.n_embd, "attention.head_count": c.n_head,
            "attention.layer_norm_epsilon": NORM_EPS, "vocab_size": c.vocab_size,
        }  # fmt: skip

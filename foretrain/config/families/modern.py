"""`recipe = modern`: a GPT with what modded-nanogpt and nanochat kept (docs/recipes.md). No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from foretrain.config.families.family import EVEN_HEADS, NO_BIAS, NO_DROPOUT, Family, Named, Shape
from foretrain.config.options import RunConfig
from foretrain.config.presets import GPT2_SHAPES

# Rows and columns of a block's matrices as multiples of the width.
LAYERS = (
    ("attention.qk", 2, 1), ("attention.v", 1, 1), ("attention.out", 1, 1), ("mlp.up", 4, 1), ("mlp.down", 1, 4),
)  # fmt: skip


class Modern(Family):
    name = "modern"
    model = ("foretrain.model.modern", "ModernGPT")
    blocks = "blocks"
    tokens = ("embedding.weight", "lm_head.weight")
    parts: Mapping[str, tuple[str, str]] = {
        "embedding": ("residual", "embedding"), "attention": ("attention", "attention"), "qk": ("attention", ""),
        "v": ("attention", ""), "out": ("residual", ""), "mlp": ("mlp", "mlp"), "up": ("mlp", ""),
        "down": ("residual", ""), "lm_head": ("", "loss"),
    }  # fmt: skip
    sets: Mapping[str, Any] = {
        "optimizer": "muon", "lr_schedule": "linear", "warmup_iters": 0, "dropout": 0.0, "bias": False,
    }  # fmt: skip
    # The rates are those of Muon and of AdamW beside it; with AdamW alone they would not hold.
    rates: Mapping[str, Any] = {
        "learning_rate": 0.005, "muon_momentum": 0.85, "min_lr": 0.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95,
    }  # fmt: skip
    rules = (
        NO_DROPOUT,
        NO_BIAS,
        EVEN_HEADS,
        (("init_from", "recipe"), lambda c: c.init_from in GPT2_SHAPES, "recipe_not_gpt2"),
    )

    def before(self, c: RunConfig) -> Named:
        yield "smear", (c.n_embd,)
        yield "embedding.weight", (c.vocab_size, c.n_embd)

    def block(self, c: RunConfig) -> Named:
        yield "skip", (1,)
        for name, rows, columns in LAYERS:
            yield f"{name}.weight", (rows * c.n_embd, columns * c.n_embd)

    def after(self, c: RunConfig) -> Named:
        yield "lm_head.weight", (c.vocab_size, c.n_embd)

    def buffers(self, c: RunConfig) -> Iterator[Shape]:
        yield from [(c.block_size, self.head_dim(c))] * 2
        yield (c.block_size, 1)

    def roughly_compiled(self, c: RunConfig) -> str:
        """Small models took 8% less."""
        return "activation_checkpointing with recipe = modern" if c.activation_checkpointing else ""

    def looked_up(self, c: RunConfig) -> int:
        return c.vocab_size * c.n_embd

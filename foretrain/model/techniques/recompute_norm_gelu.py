"""Recomputation of the inputs of linear layers, and of no matmul, as llm.c's `-r 2` of GELU and LayerNorm. No torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell a compiler, which looks at the graph as a whole, what to do with an operation."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    matmuls = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


def forward_of_block() -> Callable[[Any, Any], Any]:
    """Return the forward pass of GPT-2's block that saves neither the norms' outputs nor the GELU's."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def remake_input(layer: Callable[[Any], Any], x: Any) -> Any:
        """Return layer(x), where layer ends in a linear layer whose input is recomputed from x in the backward pass."""
        compiling = torch.compiler.is_compiling()
        keep: Any = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_matmuls)} if compiling else {}
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **keep)

    def forward(block: Any, x: Any) -> Any:
        attn, mlp = block.attn, block.mlp
        x = x + attn.mix(remake_input(lambda x: attn.c_attn(block.ln_1(x)), x))
        wide = remake_input(lambda x: mlp.c_fc(block.ln_2(x)), x)
        return x + mlp.dropout(remake_input(mlp.out, wide))

    return forward


class RecomputeNormGelu(Technique):
    id = "recompute_norm_gelu"
    options: Mapping[str, Any] = {"recompute_norm_gelu": True}
    saves = "the outputs of both norms and of GELU: a third of a block's activations"
    costs = "a few percent; no matmul is recomputed"
    source = "llm.c's recompute of GELU and LayerNorm; Korthikanti et al. 2022, arXiv:2205.05198"
    refuses = (
        (
            ("activation_checkpointing", "checkpointed_blocks", "recompute_norm_gelu", "n_layer"),
            lambda c: c.recompute_norm_gelu and c.checkpointed == c.n_layer,
            "recomputed_twice",
        ),
        # Blocks of other families save nothing of it, and have no other forward pass.
        (
            ("recompute_norm_gelu", "recipe"),
            lambda c: c.recompute_norm_gelu and c.recipe != "nanogpt",
            "recipe_recomputes",
        ),
    )
    place, drop_order, try_order, quick = 40, 50, 5, True

    def change(self, model: Any, config: RunConfig) -> None:
        if config.recompute_norm_gelu:
            forward = forward_of_block()
            for i, block in enumerate(model.layers()):
                if i >= config.checkpointed:
                    block.instead = forward

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        done = c.recompute_norm_gelu or c.recipe != "nanogpt" or c.checkpointed == c.n_layer
        return [] if done else [self.options]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "recipe" if c.recipe != "nanogpt" else "already_on"

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{"recompute_norm_gelu": False}] if c.recompute_norm_gelu else []

    def with_layers(self, c: RunConfig, n_layer: int) -> Options:
        return {"recompute_norm_gelu": False} if c.recompute_norm_gelu and c.checkpointed_blocks >= n_layer else {}


TECHNIQUES = (RecomputeNormGelu(),)

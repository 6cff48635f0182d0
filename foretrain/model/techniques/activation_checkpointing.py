from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class ActivationCheckpointing(Technique):
    id = "activation_checkpointing"
    options: Mapping[str, Any] = {"activation_checkpointing": True}
    saves = "all activations of a block except its input"
    costs = "every block's forward pass is recomputed: about a third more time"
    source = "Chen et al. 2016, arXiv:1604.06174"
    refuses = (
        (
            ("checkpointed_blocks", "activation_checkpointing"),
            lambda c: c.checkpointed_blocks > 0 and not c.activation_checkpointing,
            "blocks_without_checkpointing",
        ),
    )
    rule, instead_of = "checkpointing", ("recompute_norm_gelu",)
    place, drop_order, quick = 90, 70, True

    def change(self, model: Any, config: RunConfig) -> None:
        if config.checkpointed:
            from torch.utils.checkpoint import checkpoint

            around = partial(checkpoint, use_reentrant=False)
            model.around = dict.fromkeys(range(config.checkpointed), around)

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        if c.checkpointed == c.n_layer:
            return []
        some = range(max(1, c.checkpointed + 1), c.n_layer)
        every = {"activation_checkpointing": True, "checkpointed_blocks": 0, "recompute_norm_gelu": False}
        return [*({"activation_checkpointing": True, "checkpointed_blocks": k} for k in some), every]

    def usual(self, found: Sequence[Options]) -> int:
        return -1

    def undone(self, c: RunConfig) -> Sequence[Options]:
        if not c.checkpointed:
            return []
        fewer = [{"checkpointed_blocks": k} for k in sorted({c.checkpointed // 4, c.checkpointed // 2}) if k]
        return [{"activation_checkpointing": False, "checkpointed_blocks": 0}, *fewer]

    def with_layers(self, c: RunConfig, n_layer: int) -> Options:
        return {"checkpointed_blocks": 0} if c.checkpointed_blocks >= n_layer else {}


class FirstBlocks(Technique):
    id = "checkpointed_blocks"
    options: Mapping[str, Any] = {"activation_checkpointing": True, "checkpointed_blocks": 1}
    saves = "the same for the first blocks only; the activations of the last ones are needed right away"
    costs = "the forward pass of these blocks is recomputed"
    source = ActivationCheckpointing.source
    rule, advised, place = ActivationCheckpointing.rule, False, ActivationCheckpointing.place


TECHNIQUES = (ActivationCheckpointing(), FirstBlocks())

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class CheckpointOffload(Technique):
    """The input of each checkpointed block but the last is on the host (model/host_memory.py), copied meanwhile."""

    id = "checkpoint_offload"
    options: Mapping[str, Any] = {"activation_checkpointing": True, "checkpoint_offload": True}
    saves = "the inputs of all checkpointed blocks except two: 2 or 4 bytes per token and unit of width each"
    costs = "nothing if the bus moves a block's input in the time of its forward pass; compiles block by block"
    source = "unsloth_zoo/gradient_checkpointing.py; Chen et al. 2016, arXiv:1604.06174"
    reference: Mapping[str, Any] = {"activation_checkpointing": True, "n_layer": 6}
    refuses = (
        (
            ("checkpoint_offload", "activation_checkpointing"),
            lambda c: c.checkpoint_offload and not c.activation_checkpointing,
            "offload_without_checkpoints",
        ),
        (
            ("checkpoint_offload", "cuda_graph"),
            lambda c: c.checkpoint_offload and c.cuda_graph == "on",
            "offload_in_a_graph",
        ),
    )
    place, drop_order, try_order, quick = 92, 75, 8, True  # its stream takes 70 MiB (hardware/devices.py)

    def change(self, model: Any, config: RunConfig) -> None:
        if config.checkpoint_offload and config.checkpointed > 1:
            from foretrain.model.host_memory import Inputs

            inputs = Inputs(config.checkpointed)
            model.around = {i: partial(inputs.call, i) for i in range(config.checkpointed)}

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        if gpu.kind != "cuda" or c.n_layer < 3 or (c.checkpoint_offload and c.checkpointed == c.n_layer):
            return []
        return [{**self.options, "checkpointed_blocks": 0, "recompute_norm_gelu": False}]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "on_cpu" if gpu.kind == "cpu" else "already_on"

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{"checkpoint_offload": False}] if c.checkpoint_offload else []


TECHNIQUES = (CheckpointOffload(),)

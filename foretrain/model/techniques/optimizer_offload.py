from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class OptimizerOffload(Technique):
    """ZeRO-Offload without its overlap: the fp32 twin of the model is on the host (model/master.py)."""

    id = "optimizer_offload"
    options: Mapping[str, Any] = {"optimizer_offload": True}
    saves = "all optimizer states, and the fp32 masters if there are any"
    costs = "each step moves the gradients to host memory and the weights back: the last resort"
    source = "Ren et al. 2021, arXiv:2101.06840"
    place, drop_order, quick = 130, 100, True

    def twin(self, config: RunConfig, dtype: Any) -> dict[str, Any]:
        import torch

        return {"device": torch.device("cpu")} if config.optimizer_offload else {}

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [] if getattr(c, self.id) or gpu.kind == "cpu" else [self.options]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "on_cpu" if gpu.kind == "cpu" else "already_on"

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{self.id: False}] if getattr(c, self.id) else []


class GradientOffload(OptimizerOffload):
    """ZeRO-Offload of gradients: only those that backward has just made are on the card (model/master.py)."""

    id = "gradient_offload"
    options: Mapping[str, Any] = {"optimizer_offload": True, "gradient_offload": True}
    saves = "all gradients; of a model that is compiled as a whole, their fp32 sums only"
    costs = "copies and sums on the host run beside the backward pass; of small micro-batches they take longer than it"
    exactness = "rounding"  # with master_weights, of fp32 gradients: a tied weight's sum, a norm's
    source = "Ren et al. 2021, arXiv:2101.06840, section 4"
    refuses = (
        (
            ("gradient_offload", "optimizer_offload"),
            lambda c: c.gradient_offload and not c.optimizer_offload,
            "gradients_without_optimizer",
        ),
    )
    place, drop_order, try_order, quick = 135, 110, 7, True  # its stream takes 70 MiB (hardware/devices.py)

    def twin(self, config: RunConfig, dtype: Any) -> dict[str, Any]:
        return {"sends": True} if config.gradient_offload else {}


TECHNIQUES = (OptimizerOffload(), GradientOffload())

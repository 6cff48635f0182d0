from collections.abc import Mapping
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.model.techniques.optimizer_offload import OptimizerOffload


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


TECHNIQUES = (GradientOffload(),)

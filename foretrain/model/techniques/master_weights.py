from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class MasterWeights(Technique):
    """The model runs without autocast: residual stream and norms are half precision, too (model/master.py)."""

    id = "master_weights"
    options: Mapping[str, Any] = {"master_weights": True}
    saves = "half of the residual stream and of the norms' saved tensors, and the weight copies of each forward pass"
    costs = "2 bytes per parameter; without chunked_loss the logits are cast to fp32"
    exactness = "rounding"
    source = "Micikevicius et al. 2017, arXiv:1710.03740, section 3.1"
    reference: Mapping[str, Any] = {"loss_chunk_size": 512}
    place, kind, drop_order, try_order, lets_grow = 80, "both", 30, 3, True

    def twin(self, config: RunConfig, dtype: Any) -> dict[str, Any]:
        import torch

        return {"dtype": dtype} if config.master_weights and dtype != torch.float32 else {}

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [] if c.master_weights or not half or (c.auto_chunker and c.compile) else [self.options]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "already_on" if c.master_weights else "" if half else "float32"


TECHNIQUES = (MasterWeights(),)

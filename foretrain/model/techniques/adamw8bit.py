"""AdamW with moments in 8 bits (model/adamw8bit.py). No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.model import adamw8bit_sizes
from foretrain.model.shape import ModelShape
from foretrain.model.techniques.technique import Optimizer, by_dimensions

LAUNCHES = 36  # of kernels for a chunk; tests/test_adamw8bit.py counts a real step's


class AdamW8bit(Optimizer):
    """2.03 bytes a parameter instead of 8."""

    id = "adamw8bit"
    options: Mapping[str, Any] = {"optimizer": "adamw8bit"}
    saves = "three quarters of the optimizer's states"
    costs = "the moments are rounded differently"
    source = "Dettmers et al. 2021, arXiv:2110.02861"
    place, dear, instead_of = 110, 80, ("muon",)
    moments = ((1, "moments"),)
    passing = "chunk"
    counts_on_device = False

    def letters(self, shape: ModelShape, granule: int) -> dict[str, int]:
        """moments: all of them; chunk: what is fp32 of them at one time."""
        chunk = adamw8bit_sizes.temporary_bytes(max(shape.numels))
        return {"moments": adamw8bit_sizes.moments_bytes(shape.numels, granule), "chunk": chunk}

    def tensors(self, numel: int) -> tuple[int, ...]:
        return adamw8bit_sizes.moment_sizes(numel)

    def traffic(self, numel: int) -> tuple[float, float]:
        return (116.0, 100.0) if adamw8bit_sizes.is_quantised(numel) else (48.0, 32.0)

    def launches(self, numel: int) -> int:
        return LAUNCHES * adamw8bit_sizes.n_chunks(numel)

    def moments_bytes(self, numels: Mapping[int, int]) -> int:
        return adamw8bit_sizes.moments_bytes(numels)

    def make(self, named: Sequence[tuple[str, Any]], config: RunConfig, device_type: str) -> Any:
        from foretrain.model.adamw8bit import AdamW8bit

        groups = by_dimensions([p for _, p in named], config)
        return AdamW8bit(groups, config.learning_rate, (config.beta1, config.beta2))


TECHNIQUES = (AdamW8bit(),)

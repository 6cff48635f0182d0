from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Gpu
from foretrain.model.low_bits import EIGHT, FOUR, is_quantised, n_chunks
from foretrain.model.techniques.technique import Optimizer, Options, by_dimensions


class AdamW8bit(Optimizer):
    """2.03 bytes per parameter instead of 8 (model/low_bit_adamw.py)."""

    id = "adamw8bit"
    options: Mapping[str, Any] = {"optimizer": "adamw8bit"}
    saves = "three quarters of the optimizer's states"
    costs = "the moments are rounded differently"
    source = "Dettmers et al. 2021, arXiv:2110.02861"
    place, drop_order, instead_of = 110, 80, ("muon",)
    moments = ((1, "moments"),)
    passing = "chunk"
    counts_on_device = False
    form = EIGHT
    # Kernels of a chunk, and of a parameter with fp32 moments; tests/model/test_low_bit_adamw.py counts a real step's.
    chunk_launches, plain_launches = 21, 6
    chunk_traffic = (94.0, 70.0)  # bytes per element that they read and write
    stronger: tuple[str, ...] = ("adamw4bit",)  # optimizers with fewer bytes

    def letters(self, shape: ModelShape, granule: int) -> dict[str, int]:
        """Return the bytes of all moments, and of a chunk that is widened to fp32."""
        chunk = self.form.temporary_bytes(max(shape.numels))
        return {"moments": self.form.moments_bytes(shape.numels, granule), "chunk": chunk}

    def tensors(self, numel: int) -> tuple[int, ...]:
        return self.form.moment_sizes(numel)

    def traffic(self, numel: int) -> tuple[float, float]:
        return self.chunk_traffic if is_quantised(numel) else (44.0, 28.0)

    def launches(self, numel: int) -> int:
        return self.chunk_launches * n_chunks(numel) if is_quantised(numel) else self.plain_launches

    def moments_bytes(self, numels: Mapping[int, int]) -> int:
        return self.form.moments_bytes(numels)

    def make(self, named: Sequence[tuple[str, Any]], config: RunConfig, device_type: str) -> Any:
        from foretrain.model.low_bit_adamw import AdamW4bit, AdamW8bit

        made = next(each for each in (AdamW4bit, AdamW8bit) if each.form == self.form)
        return made(by_dimensions([p for _, p in named], config), config.learning_rate, (config.beta1, config.beta2))

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [] if c.optimizer in self.stronger else super().changes(c, gpu, half)


class AdamW4bit(AdamW8bit):
    """1.06 bytes per parameter instead of 8 (model/low_bit_adamw.py)."""

    id = "adamw4bit"
    options: Mapping[str, Any] = {"optimizer": "adamw4bit"}
    saves = "seven eighths of the optimizer's states"
    costs = "the moments are rounded to 16 values a block of 128"
    source = "Li et al. 2023, arXiv:2309.01507"
    place, drop_order, instead_of, milder = 115, 85, ("muon", "adamw8bit"), ("adamw8bit",)
    form = FOUR
    chunk_launches = 23
    chunk_traffic = (91.0, 67.0)
    stronger = ()


TECHNIQUES = (AdamW8bit(), AdamW4bit())

"""How moments are stored in 8 or 4 bits: codes and the scales of blocks, with their sizes. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

LEAST = 4096  # tensors with fewer elements keep fp32 moments: they are a negligible part
CHUNK = 4915 * 256  # elements that are widened to fp32 at one time: of whole blocks, in 18 MiB


def is_quantised(numel: int) -> bool:
    return numel >= LEAST


def n_chunks(numel: int) -> int:
    return -(-numel // CHUNK) if is_quantised(numel) else 1


@dataclass(frozen=True)
class LowBits:
    """How moments are stored: `bits` of a code, elements of a `block` with one scale, bytes per element at the peak."""

    bits: int
    block: int
    at_once_bytes: int

    def temporary_bytes(self, largest: int) -> int:
        """Return what an update takes for a moment: fp32 moments of the largest chunk, one also as codes."""
        return self.at_once_bytes * min(CHUNK, largest)

    def n_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def n_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def moment_sizes(self, numel: int) -> tuple[int, ...]:
        if not is_quantised(numel):
            return (4 * numel, 4 * numel)
        codes, scales = self.n_bytes(numel), 4 * self.n_blocks(numel)
        return (codes, codes, scales, scales)

    def moments_bytes(self, numels: Mapping[int, int], granule: int = 1) -> int:
        """Return the bytes of the moments of {elements: how many parameters}, each tensor rounded up to the granule."""
        return sum(
            count * -(-size // granule) * granule
            for numel, count in numels.items()
            for size in self.moment_sizes(numel)
        )


EIGHT = LowBits(bits=8, block=256, at_once_bytes=14)
FOUR = LowBits(bits=4, block=128, at_once_bytes=15)

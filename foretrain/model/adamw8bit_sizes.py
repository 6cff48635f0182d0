"""What AdamW with moments in 8 bits stores, in numbers that a plan can use. No torch."""

from collections.abc import Mapping

BLOCK = 256  # elements that share a scale
LEAST = 4096  # tensors with fewer elements keep fp32 moments: they weigh nothing, and biases and norms are few
CHUNK = 2**20  # elements that are widened to fp32 at one time


def temporary_bytes(largest: int) -> int:
    """What an update takes for a moment, where the largest parameter has so many elements: fp32 moments, their fp32
    products and int32 codes of one chunk, at the highest moment (tests/test_adamw8bit.py)."""
    return 20 * min(CHUNK, largest)


def is_quantised(numel: int) -> bool:
    """Are the moments of a parameter with so many elements in 8 bits?"""
    return numel >= LEAST


def n_blocks(numel: int) -> int:
    """Scales of one moment; the last block may be short."""
    return -(-numel // BLOCK)


def moment_sizes(numel: int) -> tuple[int, ...]:
    """Bytes of each tensor that a parameter's two moments are stored in."""
    if not is_quantised(numel):
        return (4 * numel, 4 * numel)
    return (numel, numel, 4 * n_blocks(numel), 4 * n_blocks(numel))


def moments_bytes(numels: Mapping[int, int], granule: int = 1) -> int:
    """Bytes of all moments of {elements: how many parameters}, each tensor rounded up to the allocator's granule."""
    return sum(count * -(-size // granule) * granule for numel, count in numels.items() for size in moment_sizes(numel))


def n_chunks(numel: int) -> int:
    """Rounds of a parameter's update."""
    return -(-numel // CHUNK) if is_quantised(numel) else 1

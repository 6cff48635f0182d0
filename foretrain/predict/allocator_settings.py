"""The allocator's settings, as PYTORCH_ALLOC_CONF (or the older PYTORCH_CUDA_ALLOC_CONF) spells them.

From c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h. Standard library only.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
SMALL_PAGE_BYTES = 2 * MIB
UNLIMITED = sys.maxsize
INTERVALS = 16  # powers of two from 1 MiB to 64 GiB
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts
# Keys that PyTorch knows and that change nothing in how much is reserved.
WITHOUT_EFFECT = {
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "pinned_max_register_threads",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes. `roundup_power2_divisions`: for each power of two from 1 MiB on, 0 for none."""

    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES

    @property
    def max_split_is_unlimited(self) -> bool:
        """Whether max_split_size_mb was left out."""
        return self.max_split_bytes == UNLIMITED

    def divisions_of(self, nbytes: int) -> int:
        """Into how many steps the power of two below a size is divided; 0 for none."""
        if not self.roundup_power2_divisions:
            return 0
        return self.roundup_power2_divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """From 'key:value,key:[a:b,c:d]'. Raises ValueError with one sentence that names the key and its value."""
        values: dict[str, object] = {}
        for key, value in _pairs(text):
            if key in WITHOUT_EFFECT:
                continue
            if key not in _PARSERS:
                raise ValueError(f"allocator setting {key!r} is unknown; known are {', '.join(sorted(_PARSERS))}")
            name, parser = _PARSERS[key]
            try:
                values[name] = parser(value)
            except ValueError as error:
                raise ValueError(f"allocator setting {key}:{value} is wrong: {error}") from None
        values.pop("backend", None)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """What a process with these variables would use. Raises ValueError as `parse`."""
        text = next((environment[name] for name in VARIABLES if environment.get(name)), "")
        return cls.parse(text)

    def text(self) -> str:
        """The shortest text that `parse` reads as these settings."""
        default, parts = Settings(), []
        for key, name, unit in (
            ("max_split_size_mb", "max_split_bytes", MIB),
            ("max_non_split_rounding_mb", "max_non_split_rounding_bytes", MIB),
            ("large_segment_size_mb", "large_segment_bytes", MIB),
            ("garbage_collection_threshold", "garbage_collection_threshold", 0),
            ("expandable_segments", "expandable_segments", 0),
        ):
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append(f"{key}:{value // unit if unit else value}")
        if self.roundup_power2_divisions:
            steps = ",".join(f"{1 << i}:{n}" for i, n in enumerate(self.roundup_power2_divisions))
            parts.append(f"roundup_power2_divisions:[{steps}]")
        return ",".join(parts)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Keys and values; commas inside brackets belong to the value."""
    pairs = []
    rest = re.sub(r"\s", "", text)
    while rest:
        match = re.match(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]]+)(?:,|$)", rest)
        if match is None:
            raise ValueError(f"allocator settings are key:value pairs with commas between; {rest!r} is not")
        pairs.append((match[1], match[2]))
        rest = rest[match.end() :]
    return pairs


def _integer(value: str) -> int:
    if not re.fullmatch(r"\d{1,12}", value):
        raise ValueError("a whole number is meant")
    return int(value)


def _megabytes(value: str) -> int:
    number = _integer(value)
    if number < LARGE_SEGMENT_BYTES // MIB:
        raise ValueError(f"it must be at least {LARGE_SEGMENT_BYTES // MIB}")
    return number * MIB


def _share(value: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+", value) or not 0 < float(value) < 1:
        raise ValueError("a number between 0 and 1 is meant")
    return float(value)


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("True or False is meant")
    return value == "True"


def _backend(value: str) -> str:
    if value != "native":
        raise ValueError("only the native allocator can be simulated")
    return value


def _power_of_two(value: str, *, zero: bool = False) -> int:
    number = _integer(value)
    if number & (number - 1) or (number == 0 and not zero):
        raise ValueError("powers of two are meant")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all sizes, or [256:1,512:2,>:4]: up to 256 MiB, at 512 MiB, from the last one on."""
    if not value.startswith("["):
        return (_power_of_two(value),) * INTERVALS
    divisions, last, first = [0] * INTERVALS, 0, True
    for part in filter(None, value[1:-1].split(",")):
        bound, separator, number = part.partition(":")
        if not separator:
            raise ValueError("pairs such as 256:4 are meant")
        count = _power_of_two(number, zero=True)
        if bound == ">":
            divisions[last:] = [count] * (INTERVALS - last)
            continue
        index = min(_power_of_two(bound).bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:index] = [count] * index
            first = False
        divisions[index] = count
        last = index
    return tuple(divisions)


_PARSERS = {
    "max_split_size_mb": ("max_split_bytes", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _megabytes),
    "large_segment_size_mb": ("large_segment_bytes", _megabytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _switch),
    "backend": ("backend", _backend),
}

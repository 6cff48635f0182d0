"""The caching allocator's settings, by PyTorch 2.11 to 2.15: c10/core/AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.cpp, parseArgs. Stricter in one way: max_split_size_mb:128MB, which PyTorch reads as 128,
is an error here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_; kLargeBuffer before 2.11
MIN_LARGE_ALLOC_BYTES = 10 * MIB  # kMinLargeAlloc: a large segment must be larger than that
UNLIMITED = 2**63 - 1  # std::numeric_limits<size_t>::max(), in a browser with its 32 bits too
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB on one for each power of two, the last without end
FIRST_INTERVAL_BITS = MIB.bit_length()

# AcceleratorAllocatorConfig::instance and CUDAAllocatorConfig::instance: the first that is set counts, even if empty.
# The old name comes first, although the design note in AllocatorConfig.h says the opposite.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

DRIVER_BACKENDS = ("cudaMallocAsync", "hipMallocAsync")

# Known keys of PyTorch that do not change reserved device memory.
WITHOUT_EFFECT = frozenset(
    {
        "expandable_segments_reserve",
        "expandable_segments_reserve_by_class",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)


@dataclass(frozen=True)
class Settings:
    """What changes reserved memory. Sizes in bytes, whole MiB; raises ValueError where PyTorch would.

    `roundup_power2_divisions` holds the divisions of each of the 16 intervals, empty for none anywhere. `reuses_oldest`
    depends on the version (predict/software.py); None: the plans' torch.
    """

    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = 0
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    reuses_oldest: bool | None = None

    def __post_init__(self) -> None:
        if self.max_non_split_rounding_bytes == 0:
            object.__setattr__(self, "max_non_split_rounding_bytes", self.large_segment_bytes)
        large = _mib("large_segment_size_mb", self.large_segment_bytes)
        if self.large_segment_bytes <= MIN_LARGE_ALLOC_BYTES:
            raise _wrong("large_segment_size_mb", large, f"it must be more than {MIN_LARGE_ALLOC_BYTES // MIB}")
        for key, nbytes in (
            ("max_split_size_mb", self.max_split_bytes),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ):
            if nbytes != UNLIMITED and _mib(key, nbytes) < large:
                raise _wrong(key, nbytes // MIB, f"it must be at least a large segment's size, {large}")
        divisions = self.roundup_power2_divisions
        if divisions and (len(divisions) != INTERVALS or not all(n == 0 or _is_power_of_two(n) for n in divisions)):
            raise _wrong("roundup_power2_divisions", list(divisions), f"{INTERVALS} powers of two or zeros are meant")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise _wrong("garbage_collection_threshold", self.garbage_collection_threshold, "it lies between 0 and 1")
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise _wrong("per_process_memory_fraction", self.per_process_memory_fraction, "it lies between 0 and 1")

    @property
    def max_split_is_unlimited(self) -> bool:
        return self.max_split_bytes == UNLIMITED

    def divisions_of(self, nbytes: int) -> int:
        """Return the divisions between powers of two at this size; 0 for none."""
        if not self.roundup_power2_divisions:
            return 0
        return self.roundup_power2_divisions[min(max(nbytes.bit_length() - FIRST_INTERVAL_BITS, 0), INTERVALS - 1)]

    def cap_bytes(self, device_bytes: int) -> int | None:
        """Return per_process_memory_fraction's cap on a device with so many bytes; None without one, as of a fraction
        of 1. Bytes are cut off, not rounded (DeviceCachingAllocator::setMemoryFraction)."""
        if self.per_process_memory_fraction >= 1:
            return None
        return int(self.per_process_memory_fraction * device_bytes)

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Parse 'key:value,key:[a:b,c:d]'. Raises ValueError with one sentence that names the key and its value."""
        values: dict[str, object] = {}
        for key, value in _pairs(text):
            if key in WITHOUT_EFFECT:
                continue
            if key not in _PARSERS:
                known = ", ".join(sorted({*_PARSERS, *WITHOUT_EFFECT}))
                raise ValueError(f"the allocator setting {key}:{value} is unknown; PyTorch knows {known}")
            name, parse = _PARSERS[key]
            try:
                values[name] = parse(value)
            except ValueError as error:
                raise _wrong(key, value, str(error)) from None
        values.pop("backend", None)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Return the settings of a process with these variables and the native backend. Raises ValueError."""
        _, text = _variable(environment)
        pairs = [pair for pair in _pairs(text) if not _is_driver_backend(*pair)]
        return cls.parse(",".join(f"{key}:{value}" for key, value in pairs))

    def text(self) -> str:
        parts = []
        for key, nbytes, default_bytes in (
            ("large_segment_size_mb", self.large_segment_bytes, LARGE_SEGMENT_BYTES),
            ("max_split_size_mb", self.max_split_bytes, UNLIMITED),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes, self.large_segment_bytes),
        ):
            if nbytes != default_bytes:
                parts.append(f"{key}:{nbytes // MIB}")
        default = Settings()
        for name in (
            "garbage_collection_threshold",
            "per_process_memory_fraction",
            "expandable_segments",
            "throw_on_cudamalloc_oom",
        ):
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append(f"{name}:{value}")
        if self.roundup_power2_divisions:
            steps = ",".join(f"{1 << i}:{n}" for i, n in enumerate(self.roundup_power2_divisions))
            parts.append(f"roundup_power2_divisions:[{steps}]")
        return ",".join(parts)


def driver_backend(environment: Mapping[str, str]) -> str:
    """Return the variable that asks for cudaMallocAsync, which is not simulated; '' for none."""
    name, text = _variable(environment)
    try:
        return name if any(_is_driver_backend(*pair) for pair in _pairs(text)) else ""
    except ValueError:
        return ""


def _variable(environment: Mapping[str, str]) -> tuple[str, str]:
    return next(((name, environment[name]) for name in VARIABLES if name in environment), ("", ""))


def merged(own: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that combines a run's own settings with its environment's, which win: they come last, and
    PyTorch counts the last one. {} where there are none."""
    if not own:
        return {}
    name = next((name for name in VARIABLES if name in environment), "PYTORCH_ALLOC_CONF")
    return {name: ",".join(text for text in (own, environment.get(name, "")) if text)}


def of_run(own: str, environment: Mapping[str, str]) -> Settings:
    """Return the settings of a run with its own in this environment. Raises ValueError."""
    return Settings.of_environment({**environment, **merged(own, environment)})


def _is_driver_backend(key: str, value: str) -> bool:
    return key == "backend" and value in DRIVER_BACKENDS


def _wrong(key: str, value: object, reason: str) -> ValueError:
    return ValueError(f"the allocator setting {key}:{value} is wrong: {reason}")


def _mib(key: str, nbytes: int) -> int:
    if nbytes % MIB:
        raise _wrong(key, nbytes / MIB, "it must be a whole number of MiB")
    return nbytes // MIB


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return keys and values in order (ConfigTokenizer): white space is ignored, a list in brackets is one value."""
    rest = re.sub(r"\s", "", text)
    pairs = []
    while rest:
        match = re.match(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)", rest)
        if match is None:
            raise ValueError(f"allocator settings are key:value pairs with commas between them, which {rest!r} is not")
        pairs.append((match[1], match[2]))
        rest = rest[match.end() :]
    return pairs


def _integer(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise ValueError("a whole number is meant")
    return int(value)


def _megabytes(value: str) -> int:
    number = _integer(value)
    if number == 0:
        raise ValueError("it must be more than 0")
    return number * MIB


def _fraction(value: str) -> float:
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", value, re.ASCII | re.IGNORECASE):
        raise ValueError("a number between 0 and 1 is meant")
    return float(value)


def _threshold(value: str) -> float:
    number = _fraction(value)
    if number == 0:
        raise ValueError("it must be more than 0")
    return number


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("True or False is meant")
    return value == "True"


def _backend(value: str) -> str:
    if value in DRIVER_BACKENDS:
        raise ValueError("that allocator belongs to the driver and cannot be simulated, only backend:native can")
    if value != "native":
        raise ValueError("PyTorch's backends are native and cudaMallocAsync")
    return value


def _divisions(value: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or a list such as [256:1,512:2,>:4] (parseRoundUpPower2Divisions): its first
    interval (in MiB) counts for all sizes below, '>' for all above the last one; others are not rounded."""
    if not value.startswith("["):
        number = _integer(value)
        if not _is_power_of_two(number):
            raise ValueError("a power of two is meant")
        return (number,) * INTERVALS
    divisions, last_index, first = [0] * INTERVALS, 0, True
    for part in filter(None, value[1:-1].split(",")):
        bound, separator, number_text = part.partition(":")
        if not separator:
            raise ValueError("a list holds pairs such as 256:4")
        number = _integer(number_text)
        if number and not _is_power_of_two(number):
            raise ValueError("divisions are powers of two, or 0 for none")
        if bound == ">":
            divisions[last_index + 1 :] = [number] * (INTERVALS - last_index - 1)
            continue
        bound_mib = _integer(bound)
        if not _is_power_of_two(bound_mib):
            raise ValueError("sizes in the list are powers of two")
        index = min(bound_mib.bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:index] = [number] * index
            first = False
        divisions[index] = number
        last_index = index
    return tuple(divisions)


_PARSERS = {
    "backend": ("backend", _backend),
    "expandable_segments": ("expandable_segments", _switch),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_bytes", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _megabytes),
    "max_split_size_mb": ("max_split_bytes", _megabytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _switch),
}

"""Options that a device or a dtype makes idle: said, never silently ignored. No torch."""

from collections.abc import Iterator

from foretrain.config.options import OPTIONS, RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu


def idle(config: RunConfig, gpu: Gpu, dtype: Dtype) -> Iterator[tuple[str, str]]:
    """(what is set, why it does nothing here)."""
    for name, option in OPTIONS.items():
        if (why := option.idle_on(gpu.kind, dtype)) and getattr(config, name) != option.default:
            yield name, why

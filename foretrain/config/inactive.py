"""Options that a device or a dtype makes idle, or that a device refuses: said, never silently ignored. No torch."""

from collections.abc import Iterator

from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.hardware.catalogue import Dtype, Gpu

REFUSED = named(lambda option: bool(option.refused))


def idle(config: RunConfig, gpu: Gpu, dtype: Dtype) -> Iterator[tuple[str, str]]:
    """(what is set, why it does nothing here)."""
    for name, option in OPTIONS.items():
        if (why := option.idle_on(gpu.kind, dtype)) and getattr(config, name) != option.default:
            yield name, why


def check_refused(config: RunConfig, gpu: Gpu) -> None:
    """Raise UserError where an option is set that the device refuses."""
    for name in REFUSED:
        if (why := OPTIONS[name].refused_on(gpu.kind)) and getattr(config, name) != OPTIONS[name].default:
            raise UserError("config.refused_here", option=name, gpu=gpu.name, reason=why)

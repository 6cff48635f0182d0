"""foretrain: know what a GPT training run will take before you start it, then run it within those limits.

The library in four lines:

    import foretrain
    forecast = foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8)
    print(forecast)                                     # what `foretrain plan` shows
    forecast.verdict_of("foretrain"), forecast.memory_of("foretrain").worst.allocated_bytes

Names are loaded on first use, so that importing foretrain costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain.analysis.forecast_check import Comparison as Comparison
    from foretrain.analysis.forecast_check import compare as compare
    from foretrain.app.plan import plan as plan
    from foretrain.base.errors import ConfigError as ConfigError
    from foretrain.base.errors import UserError as UserError
    from foretrain.config.options import RunConfig as RunConfig
    from foretrain.config.resolve import from_values as from_values
    from foretrain.config.resolve import resolve as resolve
    from foretrain.hardware.catalogue import Gpu as Gpu
    from foretrain.hardware.catalogue import find as find_gpu
    from foretrain.predict.plan import Plan as Plan
    from foretrain.predict.trace.elsewhere import trace as trace
    from foretrain.predict.trace.traced import Traced as Traced
    from foretrain.training.store import RunRecord as RunRecord

_HOMES = {
    "Comparison": ("foretrain.analysis.forecast_check", "Comparison"),
    "ConfigError": ("foretrain.base.errors", "ConfigError"),
    "Gpu": ("foretrain.hardware.catalogue", "Gpu"),
    "Plan": ("foretrain.predict.plan", "Plan"),
    "RunConfig": ("foretrain.config.options", "RunConfig"),
    "RunRecord": ("foretrain.training.store", "RunRecord"),
    "Traced": ("foretrain.predict.trace.traced", "Traced"),
    "UserError": ("foretrain.base.errors", "UserError"),
    "compare": ("foretrain.analysis.forecast_check", "compare"),
    "find_gpu": ("foretrain.hardware.catalogue", "find"),
    "from_values": ("foretrain.config.resolve", "from_values"),
    "plan": ("foretrain.app.plan", "plan"),
    "resolve": ("foretrain.config.resolve", "resolve"),
    "trace": ("foretrain.predict.trace.elsewhere", "trace"),
}
__all__ = [
    "Comparison",
    "ConfigError",
    "Gpu",
    "Plan",
    "RunConfig",
    "RunRecord",
    "Traced",
    "UserError",
    "compare",
    "find_gpu",
    "from_values",
    "plan",
    "resolve",
    "trace",
]


def __dir__() -> list[str]:
    """What tab completion shows: the public names, before they are loaded, too."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretrain' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    if name in ("Plan", "plan"):
        import_module("foretrain.reports.shown").register()
    return getattr(import_module(module), attribute)

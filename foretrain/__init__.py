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
    from foretrain.advise.forecast_check import Comparison as Comparison
    from foretrain.advise.forecast_check import compare as compare
    from foretrain.app.plan import plan as plan
    from foretrain.config import RunConfig as RunConfig
    from foretrain.configfile import from_values as from_values
    from foretrain.configfile import resolve as resolve
    from foretrain.errors import ConfigError as ConfigError
    from foretrain.errors import UserError as UserError
    from foretrain.hardware import Gpu as Gpu
    from foretrain.hardware import find as find_gpu
    from foretrain.predict.exact.elsewhere import trace as trace
    from foretrain.predict.exact.traced import Traced as Traced
    from foretrain.predict.plan import Plan as Plan
    from foretrain.run.store import RunRecord as RunRecord

_HOMES = {
    "Comparison": ("foretrain.advise.forecast_check", "Comparison"),
    "ConfigError": ("foretrain.errors", "ConfigError"),
    "Gpu": ("foretrain.hardware", "Gpu"),
    "Plan": ("foretrain.predict.plan", "Plan"),
    "RunConfig": ("foretrain.config", "RunConfig"),
    "RunRecord": ("foretrain.run.store", "RunRecord"),
    "Traced": ("foretrain.predict.exact.traced", "Traced"),
    "UserError": ("foretrain.errors", "UserError"),
    "compare": ("foretrain.advise.forecast_check", "compare"),
    "find_gpu": ("foretrain.hardware", "find"),
    "from_values": ("foretrain.configfile", "from_values"),
    "plan": ("foretrain.app.plan", "plan"),
    "resolve": ("foretrain.configfile", "resolve"),
    "trace": ("foretrain.predict.exact.elsewhere", "trace"),
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
        import_module("foretrain.report.shown").register()
    return getattr(import_module(module), attribute)

"""foretrain: know what a GPT training run will take before you start it, then run it within those limits.

The library in four lines:

    import foretrain
    forecast = foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8)
    print(forecast)                                     # what `foretrain plan` shows
    forecast.verdict_of("foretrain"), forecast.memory_of("foretrain").worst.allocated_bytes

Names are loaded on first use, so that importing foretrain costs nothing. They are listed in __init__.pyi.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_HOMES = {
    name: (module, attribute)
    for module, attribute, name in re.findall(
        r"^from (\S+) import (\w+) as (\w+)$", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE
    )
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    """What tab completion shows: the public names, before they are loaded, too."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretrain' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    if name in ("Plan", "plan"):
        import_module("foretrain.reports.shown").register()
    return getattr(import_module(module), attribute)

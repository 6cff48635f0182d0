"""foretrain: know what a GPT training run will take before you start it, then run it within those limits.

The library in four lines:

    import foretrain
    forecast = foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8)
    print(forecast)                                     # what `foretrain plan` shows
    forecast.verdict_of("foretrain"), forecast.memory_of("foretrain").worst.allocated_bytes

Names are loaded on first use, so that importing foretrain costs nothing. They are listed in __init__.pyi.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# What makes records that print as the command line does, and draw themselves in a notebook.
SHOWING = ("Plan", "plan", "explain", "compare", "evaluate")


@cache
def _homes() -> dict[str, tuple[str, str]]:
    """{public name: (its module, its name there)}, read when the first one is asked for."""
    listed = Path(__file__).with_suffix(".pyi").read_text("utf-8")
    found = re.findall(r"^from (\S+) import (\w+) as (\w+)$", listed, re.MULTILINE)
    return {name: (module, attribute) for module, attribute, name in found}


def _show() -> None:
    import_module("foretrain.reports.shown").register()


def __dir__() -> list[str]:
    """What tab completion shows: the public names, before they are loaded, too."""
    return sorted(_homes())


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or name not in _homes():
        raise AttributeError(f"module 'foretrain' has no attribute {name!r}")
    module, attribute = _homes()[name]
    if name in SHOWING:
        import_module("foretrain.base.records").FIRST.add(_show)
    return getattr(import_module(module), attribute)

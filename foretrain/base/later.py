"""Modules that are imported when something of them is first used: what takes long to import and is seldom needed."""

from importlib import import_module
from types import ModuleType
from typing import Any


class Later:
    """Stands for a module. For the types of what is in it, import it under TYPE_CHECKING, too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __repr__(self) -> str:
        return f"Later({self._name!r})"

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)

"""Installed packages, and modules that are imported at their first use."""

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

GPU_FILE_VARIABLE = "FORETRAIN_GPU_FILE"  # a file of the user's own cards


def cache_folder() -> Path:
    """Return FORETRAIN_CACHE, or the user's cache folder by the XDG rules; without a home, one that holds nothing."""
    if own := os.environ.get("FORETRAIN_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "foretrain"
    try:
        return Path.home() / ".cache" / "foretrain"
    except RuntimeError:  # containers run as users that the system does not know
        return Path(os.devnull) / "foretrain"


def installed_torch() -> str:
    return installed("torch")


def installed(package: str) -> str:
    """Return a package's version, "" where it is absent, by its folder's name: importlib.metadata imports slowly."""
    for folder in sys.path:
        for found in Path(folder or ".").glob("*-*.*-info"):
            name, version, *_ = found.stem.split("-")
            if _plain(name) == _plain(package):
                return version
    return ""


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


class Later:
    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __repr__(self) -> str:
        return f"Later({self._name!r})"

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)

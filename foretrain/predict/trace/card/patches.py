"""Attributes of torch that are replaced for a while."""

import contextlib
from typing import Any

from torch.utils import _device

# torch remembers, when it is first asked, which functions `with torch.device(…)` is for. Asked while some of them are
# replaced, it would no longer know the real ones afterwards.
_device._device_constructors()


class Patches(contextlib.ExitStack):
    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set as setattr does, undone at the end; an attribute that was not there is deleted again."""
        missing = object()
        old = owner.__dict__.get(name, missing) if isinstance(owner, type) else getattr(owner, name, missing)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if old is missing else self.callback(setattr, owner, name, old)

    def set_everywhere(self, modules: tuple[Any, ...], name: str, value: Any) -> None:
        """Set in every one of these modules that knows the name, as they keep what they imported by name."""
        for module in modules:
            if hasattr(module, name):
                self.set(module, name, value)

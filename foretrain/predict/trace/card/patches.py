import contextlib
from typing import Any

from torch.utils import _device

# torch caches, when first asked, which functions `with torch.device(…)` covers. Asked while some are replaced, it would
# not know the real ones afterwards.
_device._device_constructors()


class Patches(contextlib.ExitStack):
    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set as setattr does, undone at the end; an attribute that was new is deleted."""
        missing = object()
        old = owner.__dict__.get(name, missing) if isinstance(owner, type) else getattr(owner, name, missing)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if old is missing else self.callback(setattr, owner, name, old)

    def set_everywhere(self, modules: tuple[Any, ...], name: str, value: Any) -> None:
        """Set in every one of these modules that has the name, as they keep what they imported."""
        for module in modules:
            if hasattr(module, name):
                self.set(module, name, value)

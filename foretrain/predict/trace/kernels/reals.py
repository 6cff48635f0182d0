"""Integers and masks that have values in a trace, as they decide shapes: how a picture is cut, where its tokens are."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from foretrain.predict.trace.kernels import values
from foretrain.predict.trace.kernels.values import Values, storage_of

MOST = 2**22  # elements of integers and masks whose values are computed
MOST_FLOATS = 2**16
# Ops whose results have values that no argument's value decides.
FILLED = {*values.FILLED, *values.FILLED_WITH, "arange", "linspace", "eye"}
RANDOM = torch.Tag.nondeterministic_seeded


class Reals:
    """The values of fake tensors, a real storage for each of theirs, so that views share them."""

    def __init__(self, known: Values) -> None:
        self.known = known
        self._held: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}

    def hold(self, fake: Tensor, real: Tensor) -> None:
        """Give a fake tensor, which begins its storage, the values of a real one."""
        storage = storage_of(fake)
        if storage is None or fake.shape != real.shape or fake.storage_offset() or 0 in fake.stride():
            return
        with no_dispatch():
            copy = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype).copy_(real)
            copy.untyped_storage().resize_(max(storage.nbytes(), copy.untyped_storage().nbytes()))
        self._held[storage._cdata] = (weakref.ref(storage), copy.untyped_storage())

    def forget(self, fake: Tensor) -> None:
        if (storage := storage_of(fake)) is not None:
            self._held.pop(storage._cdata, None)

    def of(self, tensor: Any) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):  # what torch.tensor makes is real at first
            return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
        storage = storage_of(tensor)
        found = self._held.get(storage._cdata) if storage is not None else None
        if found is None or found[0]() is not storage:
            return None
        with no_dispatch():
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(found[1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an op gives of real tensors; None where an argument has no values."""
        filled = func.overloadpacket.__name__ in FILLED
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not (given or filled):
            return None
        reals: dict[int, Tensor] = {}
        for each in given:
            real = self.of(each)
            if real is None and not filled:
                return None
            with no_dispatch():
                reals[id(each)] = torch.zeros(each.shape, dtype=each.dtype) if real is None else real
        args, kwargs = tree_map_only(Tensor, lambda tensor: reals[id(tensor)], (args, kwargs))
        with no_dispatch():
            return func(*args, **(kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") else {})))

    def sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an op whose size depends on values that are known; None of any other."""
        found = self.run(func, args, kwargs) if torch.Tag.dynamic_output_shape in func.tags else None
        if found is None:
            return None
        return tree_map_only(Tensor, lambda real: self._fake(real, args[0].device), found)

    def _fake(self, real: Tensor, device: torch.device) -> Tensor:
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)
        self.hold(fake, real)
        return fake

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            known = all(map(_is_asked_for, results)) and self.run(func, args, kwargs) is not None
            for each in () if known else (*args[:1], kwargs.get("out"), *results):
                if isinstance(each, Tensor):
                    self.forget(each)
        elif results and RANDOM not in func.tags and all(map(_is_asked_for, results)):
            if all(self.of(each) is not None for each in results):  # views
                return
            found = [each for each in tree_leaves(self.run(func, args, kwargs)) if isinstance(each, Tensor)]
            for fake, real in zip(results, found or map(self._uniform, results), strict=True):
                if real is not None:
                    self.hold(fake, real)

    def _uniform(self, fake: Tensor) -> Tensor | None:
        known = self.known.of(fake)
        with no_dispatch():
            return torch.full(fake.shape, known.value, dtype=fake.dtype) if known.certain else None


def _is_asked_for(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.dtype.is_floating_point else MOST)

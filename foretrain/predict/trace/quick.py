"""Shortcuts that make a trace faster and change none of its bytes (tests/predict/trace/test_quick.py compares them):
layers are alike, so an op's results for tensors of the same shapes repeat."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretrain.predict.trace import tracer as tracers
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.tracer import Tracer, on_fakes

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param
except ImportError:  # a build without torch.distributed, or another torch
    _fsdp_param = None

_PLAIN = frozenset((int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)))
# Ops whose results depend on values, and those that change an argument's shape.
_OTHERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _tensor_key(tensor: FakeTensor) -> tuple[Any, ...]:
    """Return all that torch's own key has of a tensor without symbols and with strides, in one tuple."""
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
        tensor.is_inference(), tensor.is_quantized,
    )  # fmt: skip


def _is_simple(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    simple = tensor.fake_mode is mode and tensor.constant is None and tensor.layout is torch.strided
    return simple and not tensor._has_symbolic_sizes_strides


def _key_parts(patches: Patches) -> None:
    """Shorten the key under which the fake mode caches results: half of an op's time."""
    original = getattr(FakeTensorMode, "_prep_args_for_hash", None)
    if original is None:  # another torch; its own function stays
        return

    def parts(mode: FakeTensorMode, result: list[Any], args: Any, *rest: Any) -> None:
        if isinstance(args, list | tuple):
            found: list[Any] = [type(args), len(args)]
            if _add_parts(found, args, mode, []):
                result += found
                return
        original(mode, result, args, *rest)

    patches.set(FakeTensorMode, "_prep_args_for_hash", parts)


class Place(NamedTuple):
    """A result of an op. `source`: the argument whose memory it shares, None for its own; `shape` None: that tensor
    itself; `said`: a fake tensor's other attributes."""

    source: int | None
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    attributes: Mapping[str, Any] = MappingProxyType({})

    def filled(self, tensors: Sequence[FakeTensor]) -> Any:
        if self.shape is None:
            return tensors[self.source] if self.source is not None else None
        with torch._C._DisableTorchDispatch():
            inner = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.source is not None:
                inner.set_(tensors[self.source].untyped_storage(), self.offset, self.shape, self.stride)
        made = Tensor._make_subclass(
            FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        if self.attributes["fake_mode"]._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self.attributes)
        return made


class Recipe(NamedTuple):
    kind: type | None
    places: tuple[Place, ...]

    def filled(self, tensors: Sequence[FakeTensor]) -> Any:
        if self.kind is None:
            return self.places[0].filled(tensors)
        return self.kind([place.filled(tensors) for place in self.places])


_NEW = Recipe(None, ())


class Repeats:
    """Results of ops on fake tensors by their arguments' shapes. torch's own cache is slow, and stores no lists and no
    results that share memory without being views (_unsafe_view, which ends every linear layer)."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Recipe | None] = {}
        self.never = set[int]()  # by identity, as hashing an op takes long

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        key = None if id(func) in self.never else _key(func, args, kwargs, tensors)
        if key is None:
            return on_fakes(func, args, kwargs)
        recipe = self.known.get(key, _NEW)
        if recipe is not _NEW:
            return on_fakes(func, args, kwargs) if recipe is None else recipe.filled(tensors)
        if not _always_gives_the_same(func):
            self.never.add(id(func))
            return on_fakes(func, args, kwargs)
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        out = on_fakes(func, args, kwargs)
        unchanged = key == _key(func, args, kwargs, tensors := [])
        unchanged = unchanged and storages == [tensor.untyped_storage()._cdata for tensor in tensors]
        self.known[key] = _recipe(func, tensors, storages, out) if unchanged else None
        return out


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> tuple[Any, ...] | None:
    """Return None where an argument forbids caching. `tensors` collects those among the arguments."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return None
    key = [id(func), mode, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if not _add_parts(key, args, mode, tensors):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if name == "out" or not _add_parts(key, (value,), mode, tensors):
            return None
    return tuple(key)


def _add_parts(key: list[Any], args: Sequence[Any], mode: Any, tensors: list[FakeTensor]) -> bool:
    """Add the arguments to a key; return False where they are not all that decides."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if not _is_simple(arg, mode):
                return False
            tensors.append(arg)
            key.append(_tensor_key(arg))
        elif kind in _PLAIN:
            key += (kind, arg)
        elif kind is list or kind is tuple:
            key += (kind, len(arg))
            if not _add_parts(key, arg, mode, tensors):
                return False
        else:
            return False
    return True


def _always_gives_the_same(func: Any) -> bool:
    return func not in _LIFTED and is_builtin(func) and not any(tag in func.tags for tag in _OTHERS)


def _recipe(func: Any, tensors: list[FakeTensor], storages: list[int], out: Any) -> Recipe | None:
    if func._schema.is_mutable and len(set(storages)) < len(storages):
        return None
    kind = type(out) if type(out) in (list, tuple) else None
    own = set[int]()
    places = [_place(result, tensors, storages, own) for result in ([out] if kind is None else out)]
    found = [place for place in places if place is not None]
    return Recipe(kind, tuple(found)) if len(found) == len(places) else None


def _place(result: Any, tensors: list[FakeTensor], storages: list[int], own: set[int]) -> Place | None:
    """Return how to recreate a result; None where nothing can. `own`: the storages that earlier results allocated."""
    if result is None:
        return Place(None)
    if type(result) is not FakeTensor or not _is_simple(result, result.fake_mode):
        return None
    if sames := [number for number, tensor in enumerate(tensors) if tensor is result]:
        return Place(sames[0]) if len(sames) == 1 else None
    storage = result.untyped_storage()._cdata
    sources = [number for number, its in enumerate(storages) if its == storage]
    if len(sources) > 1 or storage in own:
        return None
    own.add(storage)
    with torch._C._DisableTorchDispatch():
        plain = FakeTensor(result.fake_mode, torch.empty(0, device="meta"), result.fake_device)
    place = Place(
        sources[0] if sources else None, result.shape, result.stride(), int(result.storage_offset()), result.dtype,
        result.fake_device, dict(vars(plain)),
    )  # fmt: skip
    again = place.filled(tensors)
    alike = _tensor_key(again) == _tensor_key(result) and vars(again) == vars(result)
    return place if alike and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(result) else None


def _unwrapped(patches: Patches) -> None:
    """Dispatch without the guards against Dynamo, where no Dynamo runs."""
    for mode in (Tracer, FakeTensorMode):
        raw = getattr(mode.__torch_dispatch__, "__wrapped__", None)
        if raw is not None:
            patches.set(mode, "__torch_dispatch__", raw)


class Chunks:
    """The parts of a weight for all ranks, as torch.chunk cuts it and empty beyond; each is made when asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.count, self.dim = tensor, count, dim

    def __getitem__(self, number: int) -> Tensor:
        length = self.tensor.size(self.dim)
        each = -(-length // self.count)
        start = number * each
        if start >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(each, length - start))


def _parts_when_asked(patches: Patches) -> None:
    """Make parts lazily: FSDP cuts every weight into one per rank, twice, and looks at two of them."""
    if hasattr(_fsdp_param, "_chunk_with_empty"):
        patches.set(_fsdp_param, "_chunk_with_empty", Chunks)


@contextlib.contextmanager
def faster_fake_ops(*, compiled: bool) -> Iterator[None]:
    with Patches() as patches:
        _key_parts(patches)
        _parts_when_asked(patches)
        if not compiled:
            _unwrapped(patches)
            patches.set(tracers, "on_fakes", Repeats().run)
        yield

"""Tensors that wrap others, DTensor above all: what they hold takes memory, they themselves take none."""

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from foretrain.predict.trace.card.patches import Patches

try:
    from torch.distributed import device_mesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
except ImportError:  # a build without torch.distributed
    device_mesh = ShardingPropagator = None

OWN = (FakeTensor, FunctionalTensor)
# They read ranks out of small tensors on the host, so these are real ones.
MESH_METHODS = ("__init__", "__getitem__", "__repr__", "_flatten", "_unflatten", "_concatenate", "get_coordinate")


@cache
def wraps(kind: type) -> bool:
    """Return whether ops on tensors of this class run on the tensors that it holds."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return not issubclass(kind, OWN) and dispatch not in (None, torch._C._disabled_torch_dispatch_impl)


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that take the memory: what a wrapper holds, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [] if wraps(type(tensor)) else [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) for inner in held_tensors(part)]


def patch(patches: Patches) -> None:
    """Let device meshes be made, and shapes of DTensors be found without memory, while a trace runs."""
    if device_mesh is None or ShardingPropagator is None:
        return
    for name in MESH_METHODS:
        if name in vars(device_mesh.DeviceMesh):
            method = vars(device_mesh.DeviceMesh)[name]
            inner = method.__func__ if isinstance(method, staticmethod) else method
            own = outside(inner)
            patches.set(device_mesh.DeviceMesh, name, staticmethod(own) if isinstance(method, staticmethod) else own)
    patches.set(device_mesh, "torch", _RealNumbers())
    # It runs ops on fake tensors of the whole shape.
    name = "_propagate_tensor_meta_non_cached"
    if hasattr(ShardingPropagator, name):
        patches.set(ShardingPropagator, name, outside(getattr(ShardingPropagator, name)))


class _RealNumbers:
    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return outside(found) if name in ("arange", "tensor") else found


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run

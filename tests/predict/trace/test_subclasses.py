"""Tensors that wrap others take what they hold: against PyTorch's CPU allocator, on a process group that sends nothing."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from foretrain.base.units import MIB
from foretrain.model import allocated
from foretrain.predict.trace.session import Tracing, trace, tracing

RANKS = 4


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(device: str) -> None:
    """A matrix of which this rank holds a fourth, trained for two steps."""
    mesh = init_device_mesh(device, (RANKS,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(512, 256, device=device), mesh, [Shard(1)]))
    optimizer = torch.optim.AdamW([weight])
    for _ in range(2):
        x = distribute_tensor(torch.zeros(64, 512, device=device), mesh, [Replicate()])
        (x @ weight).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(device: str) -> None:
    """FSDP2: a layer's weights are whole only while it runs."""
    mesh = init_device_mesh(device, (RANKS,))
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False, device=device) for _ in range(3)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        layers(torch.zeros(64, 256, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Pair(Tensor):
    """Two halves in bytes that look like one tensor of floats."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> "Pair":
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=torch.float32, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        a = func(*tree_map_only(Pair, lambda pair: pair.a, args), **(kwargs or {}))
        b = func(*tree_map_only(Pair, lambda pair: pair.b, args), **(kwargs or {}))
        return Pair(a, b) if isinstance(a, Tensor) else a


def paired(device: str) -> None:
    halves = (torch.zeros(1024, 1024, dtype=torch.uint8, device=device) for _ in range(2))
    x = Pair(*halves)
    y = x + x
    y.clone()


@pytest.mark.parametrize(("code", "mesh_bytes"), [(sharded, 4 * RANKS), (gathered, 4 * RANKS), (paired, 0)])
def test_wrapped_tensors_take_what_the_real_allocator_says(code: Callable[[str], None], mesh_bytes: int) -> None:
    """The mesh keeps the ranks in a tensor on the host, which here is where everything is."""
    gc.collect()
    with group():
        with tracing(None, compiled=False) as session:
            code("cpu")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            code("cpu")
    traced = max(peak for peak, _ in session.tracer.record.finish().peaks().values())
    assert traced + mesh_bytes == allocated.peaks_of(run)[1]


def test_on_a_card_a_rank_has_its_shards_and_they_are_weights() -> None:
    def code(on: Tracing) -> None:
        with group():
            sharded("cuda")

    found = trace(code)
    shard = 4 * 512 * 256 // RANKS
    kinds = {a.category: a.nbytes for a in found.trace.allocations if a.category in ("gradients", "optimizer")}
    assert kinds["gradients"] == shard
    assert found.peak_allocated_bytes < 2 * 8.2 * MIB + 4 * 512 * 256 * 2  # cuBLAS twice; never the whole states

"""One rank of many, traced: PyTorch's "fake" process group (torch/testing/_internal/distributed/fake_pg.py), which has
no peers, and what DDP asks of real tensors. DTensor and meshes are in subclasses.py."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.utils as distributed_utils
import torch.nn.parallel.distributed as ddp_module
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretrain.config.sharing import Sharing
from foretrain.model.parallel import Share
from foretrain.predict.trace import self_test
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.subclasses import outside

COLLECTIVES = ("broadcast_", "allreduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_")


@contextlib.contextmanager
def group(sharing: Sharing, rank: int = 0, *, keeps: bool = False) -> Iterator[Share]:
    """Make this process one rank of `sharing`, alone; yield what shares a model so. `keeps`: see Reducer."""
    dist.init_process_group("fake", rank=rank, world_size=sharing.world, store=FakeStore())
    try:
        with Patches() as patches:
            _know_collectives(patches)
            _patch(patches, keeps)
            yield Share(sharing)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def proven_group(sharing: Sharing, rank: int = 0, *, keeps: bool) -> Iterator[Share]:
    """`group`, once this torch has traced another right. Raises TraceError."""
    with group(sharing, rank) as share:
        self_test.prove_this_torch(share)
    with group(sharing, rank, keeps=keeps) as share:
        yield share


def trace(job: dict[str, Any]) -> Trace:
    """Trace a job of self_test.py as one rank: {…, "sharing", "rank", "keeps"}. Raises TraceError or StandInError."""
    with proven_group(Sharing(**job["sharing"]), job["rank"], keeps=job["keeps"]) as share:
        return self_test.trace(job, share)


@contextlib.contextmanager
def placed(sharing: Sharing, *, keeps: bool) -> Iterator[None]:
    """Let transformers' Trainer be the first rank, whose share of uneven weights is the largest."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": sharing.world, "LOCAL_WORLD_SIZE": sharing.world}
    place = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, place), proven_group(sharing, keeps=keeps), Patches() as patches:
        if sharing.way.shards_weights:
            # accelerate finds an optimizer's weights again by their addresses, which are 0 of fake tensors
            patches.set(Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)
            # here PyTorch would ask which devices this build is for
            mesh = functools.partial(outside(init_device_mesh), "cuda", (sharing.world,))
            patches.set(_fully_shard, "_init_default_mesh", lambda *args: mesh())
            patches.set(torch.accelerator, "current_stream", lambda device=None: torch.cuda.current_stream(device))
        yield


def _know_collectives(patches: Patches) -> None:
    """Let fake tensors through collectives, of which torch 2.9 and before have only the CPU's kernels."""
    library = patches.enter_context(torch.library._scoped_library("c10d", "IMPL"))
    of_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in COLLECTIVES:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            op = getattr(torch.ops.c10d, name).default
            library.impl(name, functools.partial(op.redispatch, of_cpu), "Meta")


def _patch(patches: Patches, keeps: bool) -> None:
    check = "_verify_param_shape_across_processes"  # all ranks have the same shapes: there is one
    for module in (distributed_utils, ddp_module):
        patches.set(module, check, lambda *a, **k: None)
    real: Any = dist.Reducer  # pyright: ignore[reportPrivateImportUsage]
    logger: Any = dist.Logger  # pyright: ignore[reportPrivateImportUsage]
    init = DistributedDataParallel.__init__

    def reducer(parameters: list[Tensor], *args: Any) -> Any:
        is_fake = isinstance(parameters[0], FakeTensor)
        return Reducer(parameters, *args, keeps=keeps) if is_fake else real(parameters, *args)

    def logger_of(its: Any) -> Any:
        return _Silent() if isinstance(its, Reducer) else logger(its)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not isinstance(self.reducer, Reducer):
            self.register_comm_hook(None, _at_once)

    patches.set(dist, "Reducer", reducer)
    patches.set(dist, "Logger", logger_of)
    patches.set(DistributedDataParallel, "__init__", made)


def _at_once(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Answer with a tensor: the reducer refuses the group's own future of None (c10d/comm.cpp)."""
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Silent:
    """DDP's logger, which wants a CUDA timer that a CPU build has not (logger.cpp)."""

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


class Bucket:
    def __init__(self, parameters: Sequence[Tensor], numbers: Sequence[int]) -> None:
        first = parameters[numbers[0]]
        sizes = [parameters[number].numel() for number in numbers]
        self.missing = set(numbers)
        with torch.no_grad():
            self.all = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
            parts = self.all.split(sizes)
            self.views = {n: part.view(parameters[n].shape) for n, part in zip(numbers, parts, strict=True)}


class Reducer:
    """The memory of DDP's own reducer (torch/csrc/distributed/c10d/reducer.cpp), for fake tensors, as the real one has
    timers on the card and compares values. After the first step buckets are remade in the order of gradients. `keeps`:
    NCCL keeps the first bucket until the next ones are sent, as its watchdog looks ten times a second for a
    collective's end (ProcessGroupNCCL.cpp, shelvesToUnstash_); else it is freed when they are made."""

    def __init__(self, parameters: list[Tensor], buckets: list[list[int]], *args: Any, keeps: bool) -> None:
        _, _, sparse, most, unused, as_view, _, first, *_ = args
        self.parameters, self.sparse, self.sizes = parameters, sparse, [first, most]
        self.as_view, self.keeps = as_view, keeps
        self.buckets = [Bucket(parameters, numbers) for numbers in buckets]
        self.used = torch.empty(len(parameters), dtype=torch.int32, device=parameters[0].device) if unused else None
        self.kept: list[Bucket] = []
        self.expects, self.is_rebuilt = False, unused  # buckets are never remade then
        self.order: list[int] = []
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, number))

    def set_logger(self, logger: object) -> None:
        pass

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: object) -> None:
        """Note that the next backward pass is the last one of a step."""
        self.expects = True
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)

    def _ready(self, number: int, parameter: Tensor) -> None:
        if not self.expects:
            return
        self.order.append(number)
        bucket = next(each for each in self.buckets if number in each.missing)
        view = bucket.views[number]
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        if self.as_view:
            parameter.grad = view
        bucket.missing.remove(number)
        if not bucket.missing:
            self.kept = []
        self.expects = any(each.missing for each in self.buckets)

    def _rebuild_buckets(self) -> bool:
        if self.is_rebuilt or not self.order:
            return False
        self.is_rebuilt = True
        of_order = [self.parameters[number] for number in self.order]
        sparse = [self.sparse[number] for number in self.order]
        assigned: Any = dist._compute_bucket_assignment_by_size  # pyright: ignore[reportPrivateImportUsage]
        groups, _ = assigned(of_order, self.sizes, sparse, self.order)
        self.kept = self.buckets if self.keeps else []
        self.buckets = []
        self.buckets = [Bucket(self.parameters, numbers) for numbers in groups]
        return True

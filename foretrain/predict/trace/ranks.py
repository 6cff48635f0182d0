"""One rank of many, traced: a process group that talks to nobody, and what DDP asks of real tensors.

PyTorch's own "fake" group (torch/testing/_internal/distributed/fake_pg.py) gives each collective's result in the right
shape at once. DTensor and meshes are seen to in subclasses.py.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.utils as distributed_utils
import torch.nn.parallel.distributed as ddp_module
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretrain.model.ranks.parallel import Share, sharer
from foretrain.model.ranks.sharing import Sharing
from foretrain.predict.trace import self_test
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.record import Trace


@contextlib.contextmanager
def group(sharing: Sharing, rank: int = 0, *, keeps: bool = False) -> Iterator[Share]:
    """Within it this process is one rank of `sharing`, alone; gives what shares a model so. `keeps`: see Sent."""
    dist.init_process_group("fake", rank=rank, world_size=sharing.world, store=FakeStore())
    try:
        with Patches() as patches:
            _patch(patches, keeps)
            yield sharer(sharing)
    finally:
        dist.destroy_process_group()


def trace(job: dict[str, Any]) -> Trace:
    """Trace a job of self_test.py as one rank of many: {…, "sharing", "rank", "keeps"}. Raises TraceError or
    StandInError."""
    sharing = Sharing(**job["sharing"])
    with group(sharing, job["rank"], keeps=job["keeps"]) as share:
        self_test.prove_this_torch(share)
        return self_test.trace(job, share)


def _patch(patches: Patches, keeps: bool) -> None:
    """What DDP does in C++ with values or with a card's timer."""
    check = "_verify_param_shape_across_processes"  # all ranks have the same shapes: there is one
    for module in (distributed_utils, ddp_module):
        patches.set(module, check, lambda *a, **k: None)
    asked: list[tuple[Any, ...]] = []
    reducer, init = dist.Reducer, DistributedDataParallel.__init__

    def remembered(*args: Any) -> dist.Reducer:
        asked.append(args)
        return reducer(*args)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        parameters = asked[-1][0]
        sent = Sent(keeps)
        self.register_comm_hook(sent, _at_once)
        self.logger = _Silent()
        if isinstance(parameters[0], FakeTensor):
            self.reducer = _Reducer(self, asked[-1], sent)

    patches.set(dist, "Reducer", remembered)
    patches.set(DistributedDataParallel, "__init__", made)


@dataclass
class Sent:
    """Buckets on their way to the other ranks. NCCL `keeps` them until a collective comes after its watchdog has seen
    the end of the last one, which it looks for ten times a second: so DDP's first bucket may be gone when the next ones
    are made, or still be there (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, shelvesToUnstash_)."""

    keeps: bool
    buckets: list[torch.Tensor] = field(default_factory=list)


def _at_once(sent: Sent, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """The group's own answer is a future of None, which the reducer refuses (torch/csrc/distributed/c10d/comm.cpp)."""
    if bucket.index() == 0:
        sent.buckets.clear()
    if sent.keeps:
        sent.buckets.append(bucket.buffer())
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Silent:
    """DDP's logger wants a CUDA timer, which a CPU build has not (logger.cpp)."""

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


class _Reducer:
    """DDP's reducer on fake tensors. After the first step it makes its buckets anew, in the order in which gradients
    were ready, and agrees on them with the other ranks by values (reducer.cpp, rebuild_buckets); here another reducer
    with such buckets takes its place. On real tensors it does so itself."""

    def __init__(self, ddp: DistributedDataParallel, args: tuple[Any, ...], sent: Sent) -> None:
        self._real, self._args, self._sent = ddp.reducer, args, sent
        self._ready: dict[int, None] = {}  # parameters by number
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, ddp, number))
            for number, parameter in enumerate(args[0])
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _note(self, ddp: DistributedDataParallel, number: int, parameter: torch.Tensor) -> None:
        if ddp.require_backward_grad_sync:
            self._ready[number] = None

    def _rebuild_buckets(self) -> bool:
        if not self._hooks or len(self._ready) < len(self._hooks):
            return False
        while self._hooks:
            self._hooks.pop().remove()
        parameters, _, _, group, sparse, most, unused, views, names, first, *more = self._args
        order = list(self._ready)
        buckets, limits = dist._compute_bucket_assignment_by_size(
            [parameters[number] for number in order], [first, most], [sparse[number] for number in order], order
        )
        self._real = None  # its buckets go first
        self._real = dist.Reducer(parameters, buckets, limits, group, sparse, most, unused, views, names, first, *more)
        dist._register_comm_hook(self._real, self._sent, _at_once)
        return True

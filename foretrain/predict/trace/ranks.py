"""One rank of many, traced: a process group that talks to nobody, and what DDP asks of real tensors.

PyTorch's own "fake" group (torch/testing/_internal/distributed/fake_pg.py) gives each collective's result in the right
shape at once. DTensor and meshes are seen to in subclasses.py.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.utils as distributed_utils
import torch.nn.parallel.distributed as ddp_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretrain.model.ranks.parallel import Share, sharer
from foretrain.model.ranks.sharing import Sharing
from foretrain.predict.trace import self_test
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.record import Trace


@contextlib.contextmanager
def group(sharing: Sharing, rank: int = 0) -> Iterator[Share]:
    """Within it this process is one rank of `sharing`, alone; gives what shares a model so."""
    dist.init_process_group("fake", rank=rank, world_size=sharing.world, store=FakeStore())
    try:
        with Patches() as patches:
            _patch(patches)
            yield sharer(sharing)
    finally:
        dist.destroy_process_group()


def trace(job: dict[str, Any]) -> Trace:
    """Trace a job of self_test.py as one rank of many: {…, "sharing", "rank"}. Raises TraceError or StandInError."""
    sharing = Sharing(**job["sharing"])
    with group(sharing, job["rank"]) as share:
        self_test.prove_this_torch(share)
        return self_test.trace(job, share)


def _patch(patches: Patches) -> None:
    """What DDP does in C++ with values or with a card's timer."""
    check = "_verify_param_shape_across_processes"  # all ranks have the same shapes: there is one
    for module in (distributed_utils, ddp_module):
        patches.set(module, check, lambda *a, **k: None)
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.register_comm_hook(None, _at_once)
        self.logger = _Silent()
        self.reducer = _Reducer(self.reducer)

    patches.set(DistributedDataParallel, "__init__", made)


def _at_once(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """The group's own answer is a future of None, which the reducer refuses (torch/csrc/distributed/c10d/comm.cpp)."""
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Silent:
    """DDP's logger wants a CUDA timer, which a CPU build has not (logger.cpp)."""

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


class _Reducer:
    """DDP's reducer, but for the new order of its buckets after the first step, which it reads out of a tensor."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _rebuild_buckets(self) -> bool:
        return False

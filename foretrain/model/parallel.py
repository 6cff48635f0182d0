"""A step's model shared among several cards by PyTorch's own DDP, ZeRO-1 or FSDP2, wrapped from outside."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from foretrain.config.sharing import Sharing
from foretrain.model.language_model import LanguageModel

# Buffers, such as rotary positions, are alike on all ranks. Newer versions of torch name the argument otherwise.
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
NO_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


@dataclass(frozen=True)
class Share:
    sharing: Sharing

    @property
    def moves(self) -> bool:
        return self.sharing.way.shards_weights

    def __call__(self, model: LanguageModel, device: torch.device, dtype: torch.dtype) -> "Parallel":
        return Parallel(self.sharing, model, device, dtype)


class Parallel:
    def __init__(self, sharing: Sharing, model: LanguageModel, device: torch.device, dtype: torch.dtype) -> None:
        self.sharing, self.model = sharing, model
        self.call: Callable[..., Tensor]
        self.asks: Callable[[], bool] = lambda: False  # whether this rank has something to tell the others
        self.asked: Tensor | None = None  # above 0 where one of them had in the last step
        self.behind = False  # resumed from a checkpoint, without a step yet
        self._stale = False  # DDP still expects gradients of a failed pass
        if sharing.way.shards_weights:
            self._shard(model, device, dtype)
            self.call = model
        else:
            options: dict[str, Any] = {NO_SYNC: False, "gradient_as_bucket_view": sharing.bucket_view}
            self.call = DistributedDataParallel(model, **options)

    def _shard(self, model: LanguageModel, device: torch.device, dtype: torch.dtype) -> None:
        """Shard each block as a group of weights gathered together; the embeddings and the head are another."""
        half = None if dtype == torch.float32 else dtype
        options: dict[str, Any] = {
            "mesh": _mesh(self.sharing, device.type),
            "reshard_after_forward": self.sharing.way.reshards,
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
        }
        for block in model.layers():
            fully_shard(block.to(device), **options)
        _move_rest(model, set(model.layers()), device)
        fully_shard(model, **options)

    def optimizer(self, made: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.sharing.strategy != "zero1":
            return made
        settings = {k: v for k, v in made.defaults.items() if k in ("lr", "betas", "eps", "fused")}
        return ZeroRedundancyOptimizer(made.param_groups, type(made), **settings)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        if isinstance(self.call, DistributedDataParallel):
            with contextlib.nullcontext() if last else self.call.no_sync():
                yield
            return
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        if not self.sharing.syncs_each:
            self.model.set_requires_gradient_sync(last)
        yield

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch's backward pass. After a failed pass DDP waits for gradients, so they bypass it until the
        last micro-batch."""
        if self._stale and not last:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            return
        loss.backward()
        if last:
            self._stale = False

    def broken_off(self) -> bool:
        """Note that a step's passes failed; return whether they can be repeated: FSDP sends in every pass."""
        if not isinstance(self.call, DistributedDataParallel):
            return False
        self._stale = True
        try:
            self.call.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def catch_up(self, loss: Callable[[], Tensor]) -> None:
        """Bring a process that is `behind` to its state after a step, by a pass whose gradients are dropped: DDP lays
        out its buckets after the first step, so a resumed run would sum in another order."""
        if self.behind and isinstance(self.call, DistributedDataParallel):
            device = next(self.model.parameters()).device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                loss().backward()
            for parameter in self.model.parameters():
                parameter.grad = None
        self.behind = False

    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a scalar over all ranks. It carries whether any of them `asks`."""
        both = torch.stack((number, number.new_full((), float(self.asks()))))
        dist.all_reduce(both)
        total, self.asked = both.unbind()
        return total / self.sharing.world

    def whole(self, number: Tensor) -> Tensor:
        """Return a scalar of which each rank may have a part, such as the norm of sharded gradients."""
        return number.full_tensor() if isinstance(number, DTensor) else number


def _move_rest(model: nn.Module, blocks: set[nn.Module], device: torch.device) -> None:
    """Move all but the blocks to the device: modules that hold blocks one by one, others at once, as they may tie."""
    above = [part for part in model.modules() if part not in blocks and not blocks.isdisjoint(part.modules())]
    others = [child for part in above for child in part.children() if child not in blocks and child not in above]
    nn.ModuleList(others).to(device)
    for part in above:
        part._apply(lambda tensor: tensor.to(device), recurse=False)


def _mesh(sharing: Sharing, device_type: str) -> Any:
    with _disable_current_modes():  # a trace has no values, and a mesh reads its ranks out of a tensor
        if sharing.way.replicates:
            shape = (sharing.world // sharing.per_node, sharing.per_node)
            return init_device_mesh(device_type, shape, mesh_dim_names=("node", "card"))
        return init_device_mesh(device_type, (sharing.world,))

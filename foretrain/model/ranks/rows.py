"""Which rows of a tensor a rank has, and which of these it writes.

PyTorch gives each rank ceil(rows / ranks), so the last may have none (torch/distributed/tensor/placement_types.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Rows(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class HeldRows:
    local: Tensor
    begin: int
    copy: int
    copies: int

    def own(self) -> tuple[int, Tensor] | None:
        """Return (first row, rows) that this rank writes; None where others write all. A scalar is one row."""
        count = self.local.shape[0] if self.local.dim() else 1
        first, end = (count * each // self.copies for each in (self.copy, self.copy + 1))
        if first == end:
            return None
        return self.begin + first, self.local[first:end] if self.local.dim() else self.local

    def fill(self, source: Rows) -> None:
        with torch.no_grad():
            self.local.copy_(source[self.begin : self.begin + self.local.shape[0]])


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor. An attribute tells, as importing its module takes long."""
    return hasattr(tensor, "device_mesh")


def held_rows(tensor: Tensor, rank: int = 0, world: int = 1) -> HeldRows:
    """Return this rank's rows of a sharded tensor, or the whole, which is then the same on all `world` ranks."""
    if not is_sharded(tensor):
        return HeldRows(tensor.detach(), 0, rank, world)
    sharded: Any = tensor
    index, parts, copy, copies = 0, 1, 0, 1
    for dim, placement in enumerate(sharded.placements):
        size, at = sharded.device_mesh.size(dim), sharded.device_mesh.get_local_rank(dim)
        if placement.is_replicate():
            copy, copies = copy * size + at, copies * size
        else:
            assert placement.is_shard(0), f"{placement}: only rows are cut"
            assert parts == 1, "rows are cut once"
            index, parts = at, size
    local, rows = sharded.detach().to_local(), tensor.shape[0]
    length = -(-rows // parts)
    begin, end = (min(rows, length * each) for each in (index, index + 1))
    assert local.shape[0] == end - begin, f"{local.shape[0]} rows of {rows}, cut into {parts}, are at {index}"
    return HeldRows(local, begin, copy, copies)


def sharded_like(parameter: Tensor, source: Rows, dtype: torch.dtype) -> Tensor:
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    held_rows(made).fill(source)
    return made


def reshard(model: nn.Module) -> None:
    """Free what FSDP holds gathered, as after an evaluation: a parameter then is what the optimizer knows."""
    for module in model.modules():
        give_back = getattr(module, "reshard", None)
        if give_back is not None:
            give_back()


def states_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has this rank's states: ZeRO-1 wraps one for its own share."""
    return getattr(optimizer, "optim", optimizer)

"""Inputs of checkpointed blocks that wait for the backward pass in host memory.

A checkpointed block saves its input alone (Chen et al. 2016, arXiv:1604.06174). In a deep model these inputs are most
of what is left, and one is needed only when the backward pass comes to its block. So each goes to the host while its
block runs, and leaves the card when the next block begins. Its place on the card is taken again, and filled, while the
block after it is recomputed.

PyTorch saves a checkpoint's inputs through the hooks that are open around it (torch/utils/checkpoint.py), so random
states, autocast and the end of the recomputation are its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from foretrain.model.host.leaving import Leaving, host_place


class Inputs:
    """Call checkpointed blocks, the first `count` of a model. The input of the last one stays on the device, since the
    backward pass wants it first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._leaving = Leaving()
        self._host: dict[int, Tensor] = {}  # by block; the places are used again in each micro-batch
        self._coming: dict[int, tuple[Tensor, Any]] = {}  # places on the device by block, and when they are filled

    def call(self, i: int, block: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        if i == 0:  # a pass that was broken off may have left something
            self._coming.clear()
        storage, device = x.untyped_storage()._cdata, x.device

        def pack(saved: Tensor) -> Tensor | None:
            if saved.untyped_storage()._cdata != storage:
                return saved  # what blocks share stays
            if i == self.count - 1:
                self._leaving.settle()
                return saved
            self._send(i, saved)
            return None

        def unpack(held: Tensor | None) -> Tensor:
            found = held if held is not None else self._taken(i, device)
            self._fetch(i - 1, device)
            return found

        with saved_tensors_hooks(pack, unpack):
            result: Tensor = checkpoint(block, x, *others, use_reentrant=False)
        return result

    def _send(self, i: int, x: Tensor) -> None:
        self._leaving.settle()
        place = self._host.get(i)
        if place is None or place.shape != x.shape:
            place = self._host[i] = host_place(x, pinned=self._leaving.runs_beside(x))
        self._leaving.hold(x, self._leaving.copy(x, place, x))

    def _fetch(self, i: int, device: torch.device) -> None:
        if i >= 0 and i not in self._coming:
            host = self._host[i]
            place = torch.empty(host.shape, dtype=host.dtype, device=device)
            self._coming[i] = place, self._leaving.copy(place, place, host)

    def _taken(self, i: int, device: torch.device) -> Tensor:
        self._fetch(i, device)
        place, filled = self._coming.pop(i)
        self._leaving.wait(filled)
        return place

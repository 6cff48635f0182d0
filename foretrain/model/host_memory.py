"""Tensors that leave a card while it works, on a stream of their own, and checkpointed block inputs among them. Each is
held until the next one leaves, so that Python's order, not the bus, decides when memory is free."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Leaving:
    """Copies between a device and the host; at once on a CPU, and for tensors traced without a card."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._held: tuple[Tensor, Any] | None = None  # a tensor being copied, and the event of its end

    def runs_beside(self, x: Tensor) -> bool:
        return type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda

    def copy(self, on_device: Tensor, to: Tensor, source: Tensor) -> Any:
        """Begin a copy and return the event of its end, or None where it is done already."""
        if not self.runs_beside(on_device):
            to.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(on_device.device)
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))  # which made it, or used the place before
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def hold(self, x: Tensor, event: Any) -> None:
        self.settle()
        self._held = x, event

    def settle(self) -> None:
        if self._held is not None:
            self.wait(self._held[1])
            self._held = None


def host_place(like: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


class Inputs:
    """Call checkpointed blocks, the first `count` of a model, whose inputs are on the host until the backward pass.

    A checkpointed block saves only its input (Chen et al. 2016, arXiv:1604.06174). Each goes to the host while its
    block runs and leaves the card when the next begins; that of the last block stays. It comes back while the block
    after it is recomputed. The hooks around PyTorch's checkpoint (torch/utils/checkpoint.py) leave random states and
    autocast to it.
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

"""Inputs of checkpointed blocks that wait for the backward pass in host memory.

A checkpointed block saves its input alone (Chen et al. 2016, arXiv:1604.06174). In a deep model these inputs are most
of what is left, and one is needed only when the backward pass comes to its block. So each goes to the host while its
block runs, and comes back while the block after it is recomputed. Copies have a stream of their own. What decides when
memory is free is the order of Python and two waits of the main stream, never how fast the bus is: an input leaves the
card when the next block begins, and the place that it comes back to is taken one block before it is needed.

PyTorch saves a checkpoint's inputs through the hooks that are open around it (torch/utils/checkpoint.py), so random
states, autocast and the end of the recomputation are its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Inputs:
    """Calls checkpointed blocks, the first `count` of a model. The input of the last one stays on the device, since
    the backward pass wants it first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._host: dict[int, Tensor] = {}  # by block; the places are used again in each micro-batch
        self._leaving: tuple[Tensor, Any] | None = None  # an input that is being copied, and when it is there
        self._coming: dict[int, tuple[Tensor, Any]] = {}  # places on the device by block, and when they are filled
        self._stream: Any = None

    def call(self, i: int, block: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """What block i makes of x."""
        if i == 0:  # a pass that was broken off may have left something
            self._coming.clear()
        storage = x.untyped_storage()._cdata

        def pack(saved: Tensor) -> Tensor | torch.Size:
            if saved.untyped_storage()._cdata != storage:
                return saved  # what blocks share stays
            self._let_go()
            if i == self.count - 1:
                return saved
            self._send(i, saved)
            return saved.shape

        def unpack(held: Tensor | torch.Size) -> Tensor:
            found = held if isinstance(held, Tensor) else self._taken(i)
            self._fetch(i - 1)
            return found

        with saved_tensors_hooks(pack, unpack):
            result: Tensor = checkpoint(block, x, *others, use_reentrant=False)
        return result

    def _send(self, i: int, x: Tensor) -> None:
        place = self._host.get(i)
        if place is None or place.shape != x.shape:
            own = self._copies_of(x) is not None
            place = self._host[i] = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=own)
        self._leaving = x, self._copied(x, place, x)

    def _let_go(self) -> None:
        """The input that left last is not needed on the device from here on."""
        if self._leaving is not None:
            self._wait(self._leaving[1])
            self._leaving = None

    def _fetch(self, i: int) -> None:
        """Take a place for block i's input, and begin to fill it."""
        if i < 0 or i in self._coming:
            return
        host = self._host[i]
        place = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._coming[i] = place, self._copied(place, place, host)

    def _taken(self, i: int) -> Tensor:
        self._fetch(i)
        place, filled = self._coming.pop(i)
        self._wait(filled)
        return place

    # -- streams: none on a CPU, nor for tensors that are traced without a card ---------------------------------

    def _copies_of(self, x: Tensor) -> Any:
        """The stream of copies of a tensor on a card."""
        self._device = x.device
        if type(x) is not Tensor or not x.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        return self._stream

    def _copied(self, on_device: Tensor, to: Tensor, source: Tensor) -> Any:
        """Begin a copy; what tells that it is done."""
        stream = self._copies_of(on_device)
        if stream is None:
            to.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(on_device.device))  # which made it, or had the place before
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

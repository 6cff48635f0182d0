"""Tensors that leave a card while it works on: copies on a stream of their own.

What decides when memory is free is the order of Python and waits of the main stream, never how fast the bus is: a
tensor that leaves is held until the next one does, and the main stream then waits for its copy. So what a step takes
can be traced without a card.
"""

from typing import Any

import torch
from torch import Tensor


class Leaving:
    """Copies between a device and the host. On a CPU, and for tensors that are traced without a card, they are done at
    once.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._held: tuple[Tensor, Any] | None = None  # a tensor that is being copied, and when its copy is done

    def runs_beside(self, x: Tensor) -> bool:
        return type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda

    def copy(self, on_device: Tensor, to: Tensor, source: Tensor) -> Any:
        """Begin a copy; `on_device`: the one of both that is there. Returns the event of its end, or None where it is
        done already.
        """
        if not self.runs_beside(on_device):
            to.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(on_device.device)
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))  # which made it, or had the place before
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def hold(self, x: Tensor, event: Any) -> None:
        """Keep a tensor until the next one leaves, and let go of the one before."""
        self.settle()
        self._held = x, event

    def settle(self) -> None:
        if self._held is not None:
            self.wait(self._held[1])
            self._held = None


def host_place(like: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

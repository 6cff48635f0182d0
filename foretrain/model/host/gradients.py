"""Gradients that leave the card as soon as the backward pass has made them, and are summed on the host beside it
(ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, section 4).

A thread adds what has come to the fp32 sums, one gradient after the other in the order in which they were made, so
the sums are the same as without it.
"""

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from foretrain.model.host.leaving import Leaving, host_place

MOST_ON_THE_WAY = 8  # gradients between card and sum; each takes a place in pinned host memory


class Gradients:
    """Sums the gradients of micro-batches in the host's tensors."""

    def __init__(self) -> None:
        self._leaving = Leaving()
        self._sums: queue.Queue[tuple[Tensor, Tensor, Any]] = queue.Queue()
        self._room = threading.Semaphore(MOST_ON_THE_WAY)
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    @torch.no_grad()
    def send(self, full: Tensor, own: Tensor) -> None:
        """Add the gradient of a micro-batch, `own.grad`, to `full.grad`, and let it go."""
        gradient, own.grad = own.grad, None
        assert gradient is not None
        if not self._leaving.runs_beside(gradient):
            _add(full, gradient.to(full.device))
            if gradient.device != full.device:
                self._leaving.hold(gradient, None)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gradients", daemon=True)
            self._thread.start()
        self._room.acquire()
        self._leaving.settle()
        moved = host_place(gradient, pinned=True)
        event = self._leaving.copy(gradient, moved, gradient)
        self._leaving.hold(gradient, event)
        self._sums.put((full, moved, event))

    def settle(self) -> None:
        """The backward pass is through: nothing of it stays on the card."""
        self._leaving.settle()

    def finish(self) -> None:
        """Wait until all sums are there."""
        self.settle()
        self._sums.join()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            full, moved, event = self._sums.get()
            try:
                event.synchronize()
                _add(full, moved)
            except BaseException as problem:  # handed over by `finish`
                self._problem = problem
            finally:
                del full, moved, event
                self._room.release()
                self._sums.task_done()


def _add(full: Tensor, moved: Tensor) -> None:
    if full.grad is None:
        full.grad = moved.float()
    else:
        full.grad += moved

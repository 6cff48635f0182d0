"""A model that runs, and an fp32 twin of it that the optimizer updates.

Two techniques use it. With weights in half precision (Micikevicius et al. 2017, arXiv:1710.03740, section 3.1) the
model runs without autocast: the residual stream and what norms save are half precision too, and forward casts no
weight. Gradients of each micro-batch are half precision, as autocast's are, and summed in fp32. With the optimizer
offloaded (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840) the twin and its moments are in host memory, and the step
runs there. Gradients go there after a step's micro-batches, or each as soon as backward has made it, in its own dtype,
to be summed there in fp32.
"""

import copy
import queue
import threading
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.model.host_memory import Leaving, host_place

# A thread adds gradients to the fp32 sums on the host in the order in which they were made, so sums do not change.

MOST_ON_THE_WAY = 8  # gradients between card and sum; each takes a place in pinned host memory


class Gradients:
    def __init__(self) -> None:
        self._leaving = Leaving()
        self._sums: queue.Queue[tuple[Tensor, Tensor, Any]] = queue.Queue()
        self._room = threading.Semaphore(MOST_ON_THE_WAY)
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    @torch.no_grad()
    def send(self, full: Tensor, own: Tensor) -> None:
        """Add the gradient of a micro-batch, `own.grad`, to `full.grad`, and free it."""
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
        self._leaving.settle()

    def finish(self) -> None:
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


class Masters:
    """The fp32 twin of a model; it never runs. `dtype`: the model's own weights; `sends`: each gradient at once."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        sends: bool = False,
    ) -> None:
        self.dtype, self._device = dtype, device
        self.sent = Gradients() if sends else None
        self.model = copy.deepcopy(model)
        if dtype is not None:
            model._apply(lambda tensor: tensor.to(dtype) if isinstance(tensor, nn.Parameter) else tensor)

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move the twin once the model is where it runs, and let gradients find it."""
        self.model = self.model.to(self._device or device)
        self._own = list(model.parameters())
        self._full = list(self.model.parameters())
        for own, full in zip(self._own, self._full, strict=True):
            if self.sent:
                own.register_post_accumulate_grad_hook(partial(self.sent.send, full))
            else:
                own.grad_dtype = torch.float32  # so that autograd sums micro-batches in fp32

    def take_gradients(self) -> None:
        """Hand the gradients over to the twin; on one device nothing is copied."""
        if self.sent:
            self.sent.finish()
            return
        for own, full in zip(self._own, self._full, strict=True):
            gradient, own.grad = own.grad, None
            full.grad = None if gradient is None else gradient.to(full.device)

    def settle(self) -> None:
        if self.sent:
            self.sent.settle()

    def drop_gradients(self) -> None:
        if self.sent:
            self.sent.finish()
        for parameter in chain(self._own, self._full):
            parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        own: list[Tensor] = [parameter.detach() for parameter in self._own]
        torch._foreach_copy_(own, [p.detach() for p in self._full])  # type: ignore[attr-defined]

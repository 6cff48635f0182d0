"""Gradients that are summed on the host by a thread, beside the backward pass."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.hardware.links import pinned_bytes_per_s
from foretrain.model import master
from foretrain.model.host_memory import Leaving
from foretrain.model.master import MOST_ON_THE_WAY, Gradients
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, micro_batch
from foretrain.predict.speed.rates import HOST_BYTES_PER_S, CatalogueRates, busy_s
from foretrain.predict.speed.time import waits_s
from tests.kit.tiny import tiny


class Event:
    """A copy that is done when the test says so."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def synchronize(self) -> None:
        self.gate.wait(10)


class Card(Leaving):
    """Copies as on a card, whose end the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waited, self.held_most = threading.Event(), 0, 0

    def runs_beside(self, x: Tensor) -> bool:
        return True

    def copy(self, on_device: Tensor, to: Tensor, source: Tensor) -> Any:
        to.copy_(source)
        return Event(self.gate)

    def wait(self, event: Any) -> None:
        self.waited += 1


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[Gradients, Card]:
    monkeypatch.setattr(master, "host_place", lambda like, *, pinned: torch.empty_like(like))
    found, card = Gradients(), Card()
    found._leaving = card
    return found, card


def weights(count: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    own = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(count)]
    return own, [nn.Parameter(torch.zeros(3)) for _ in range(count)]


def send(sent: Gradients, own: nn.Parameter, full: nn.Parameter, value: float) -> None:
    own.grad = torch.full((3,), value, dtype=torch.bfloat16)
    sent.send(full, own)


def test_sums_are_in_fp32_and_there_when_the_step_asks(sent: tuple[Gradients, Card]) -> None:
    found, card = sent
    own, full = weights(3)
    for value in (1.0, 1 / 256, 1 / 256):  # in bfloat16 the sum would stay 1
        for mine, twin in zip(own, full, strict=True):
            send(found, mine, twin, value)
        if value == 1.0:
            assert all(twin.grad is None for twin in full)  # the copies are on their way
            card.gate.set()
        found.settle()
    found.finish()
    assert all(mine.grad is None for mine in own)
    for twin in full:
        assert twin.grad.dtype == torch.float32
        assert twin.grad.tolist() == [1.0 + 2 / 256] * 3
    assert card.waited == 9  # each gradient is let go of once, after its copy


def test_no_more_are_on_the_way_than_there_is_room_for(sent: tuple[Gradients, Card]) -> None:
    found, card = sent
    own, full = weights(MOST_ON_THE_WAY + 1)
    done = threading.Event()

    def all_of_them() -> None:
        for mine, twin in zip(own, full, strict=True):
            send(found, mine, twin, 1.0)
        done.set()

    threading.Thread(target=all_of_them, daemon=True).start()
    while found._sums.unfinished_tasks < MOST_ON_THE_WAY:
        time.sleep(0.001)
    assert not done.wait(0.05)
    card.gate.set()
    assert done.wait(10)
    found.finish()
    assert all(twin.grad is not None for twin in full)


def test_what_goes_wrong_in_the_thread_is_told_to_the_step(sent: tuple[Gradients, Card]) -> None:
    found, card = sent
    card.gate.set()
    own, _ = weights(1)
    other = nn.Parameter(torch.zeros(2))  # of another size
    other.grad = torch.zeros(2)
    send(found, own[0], other, 1.0)
    with pytest.raises(RuntimeError):
        found.finish()
    found.finish()  # it is told once


def test_copies_and_sums_cost_what_the_backward_does_not_hide() -> None:
    options = {"optimizer_offload": True, "gradient_offload": True, "master_weights": True, "device": "cuda"}
    gpu = find("RTX 4070")
    for config in (tiny(n_embd=512, **options), tiny(n_embd=512, batch_size=64, block_size=512, **options)):
        way = MicroBatchRun(StepSpec.of(config, gpu, dtype="bfloat16", compiled=False))
        rates, operations, shape = CatalogueRates(gpu), micro_batch(way), ModelShape.of(config)
        bus_s, sums_s = (2 * shape.n_params / pinned_bytes_per_s(gpu.name), 10 * shape.n_params / HOST_BYTES_PER_S)
        backward_s = busy_s([op for op in operations if op.part in ("recompute", "backward")], rates)
        last_s = 2 * max(shape.numels) / pinned_bytes_per_s(gpu.name)
        assert waits_s(way, operations, rates) == pytest.approx(max(0.0, max(bus_s, sums_s) - backward_s) + last_s)
    assert waits_s(way, operations, rates) == pytest.approx(last_s)  # a large micro-batch hides it all

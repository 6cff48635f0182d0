"""Inputs of checkpointed blocks in host memory: same maths, fewer tensors on the card, and what the bus costs."""

import pytest
import torch

from foretrain.hardware.catalogue import find
from foretrain.hardware.links import link_of, pinned_bytes_per_s
from foretrain.model.host_memory import Inputs
from foretrain.model.step import build, train_step
from foretrain.predict.memory import estimated
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, micro_batch
from foretrain.predict.speed.rates import CatalogueRates, busy_s
from foretrain.predict.speed.time import waits_s
from tests.kit.kernels import learnable_batches
from tests.kit.techniques import losses
from tests.kit.tiny import tiny

CPU = torch.device("cpu")
DEEP = {"n_layer": 5, "activation_checkpointing": True}


@pytest.mark.parametrize(
    "options", [{}, {"checkpointed_blocks": 3}, {"dropout": 0.2}, {"recipe": "modern"}, {"recipe": "llama"}], ids=str
)
def test_losses_are_those_of_plain_checkpoints_bit_for_bit(options: dict[str, object]) -> None:
    plain = tiny(**DEEP, **options, gradient_accumulation_steps=2)
    assert losses(plain.model_copy(update={"checkpoint_offload": True})) == losses(plain)


def inputs_of(state: object) -> Inputs:
    around = state.model.around[0]  # type: ignore[attr-defined]
    found: Inputs = around.func.__self__
    return found


def test_all_inputs_but_the_last_go_to_the_host() -> None:
    config = tiny(**DEEP, checkpoint_offload=True)
    state = build(config, CPU, torch.float32, compile=False)
    places = []
    for step in range(2):
        train_step(state, learnable_batches(config, step), 1e-3)
        places.append({i: place.data_ptr() for i, place in inputs_of(state)._host.items()})
    assert sorted(places[0]) == [0, 1, 2, 3]
    assert places[0] == places[1]
    assert not inputs_of(state)._coming
    assert inputs_of(state)._leaving._held is None


def test_a_pass_that_was_broken_off_leaves_nothing_to_the_next() -> None:
    config = tiny(**DEEP, checkpoint_offload=True)
    whole, broken = (build(config, CPU, torch.float32, compile=False) for _ in range(2))
    block = broken.model.layers()[2]

    def stop(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = block.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="out of memory"):
        train_step(broken, learnable_batches(config, 0), 1e-3)
    hook.remove()
    found = [float(train_step(state, learnable_batches(config, 0), 1e-3).loss) for state in (whole, broken)]
    assert found[0] == found[1]


def test_what_blocks_share_stays() -> None:
    """The modern recipe hands the embedding to every block: it is no block's own input but the first's."""
    shared = torch.ones(2, 3, requires_grad=True)
    inputs = Inputs(3)
    x = torch.full((2, 3), 2.0, requires_grad=True)
    for i in range(3):
        x = inputs.call(i, lambda x, other: torch.sin(x) * other, x, shared)
    x.sum().backward()
    again, other = torch.full((2, 3), 2.0), torch.ones(2, 3, requires_grad=True)
    for _ in range(3):
        again = torch.sin(again) * other
    again.sum().backward()
    assert torch.equal(shared.grad, other.grad)
    assert sorted(inputs._host) == [0, 1]


GPU = find("RTX 4070")


@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=str)
def test_a_card_holds_one_input_when_the_backward_pass_begins(options: dict[str, object]) -> None:
    """By a closed form: all inputs but the last one less where the head is the peak."""
    plain = tiny(n_layer=8, n_embd=128, block_size=128, batch_size=8, vocab_size=2048, **options)
    plain = plain.model_copy(update={"activation_checkpointing": True, "cuda_graph": "off"})
    moved = plain.model_copy(update={"checkpoint_offload": True})
    found = [
        estimated(StepSpec.of(c, GPU, dtype="bfloat16", compiled=False)).memory.saved_bytes for c in (plain, moved)
    ]
    one = (2 if options else 4) * 8 * 128 * 128
    assert found[0] - found[1] == 7 * one


def test_copies_cost_what_does_not_pass_beside_the_blocks() -> None:
    config = tiny(n_layer=8, n_embd=256, block_size=512, batch_size=16, activation_checkpointing=True, device="cuda")
    config = config.model_copy(update={"checkpoint_offload": True})
    way = MicroBatchRun(StepSpec.of(config, GPU, dtype="bfloat16", compiled=False))
    rates, operations = CatalogueRates(GPU), micro_batch(way)
    bus_s = 7 * 4 * 16 * 512 * 256 / (0.8 * link_of("RTX 4070").link.wire_gb_per_s * 1e9)
    again_s = busy_s([op for op in operations if op.part == "recompute"], rates)
    assert again_s > 0
    assert waits_s(way, operations, rates) == pytest.approx(max(0, bus_s - again_s) + max(0, bus_s - 3 * again_s))
    few = [op for op in operations if op.part != "recompute"]
    assert waits_s(way, few, rates) == pytest.approx(2 * bus_s)


def test_card_without_a_pcie_link_counts_as_one_of_16_lanes() -> None:
    assert pinned_bytes_per_s("H100 SXM5 80GB") == pinned_bytes_per_s("RTX 4070")
    assert pinned_bytes_per_s("RTX 4060") == pytest.approx(pinned_bytes_per_s("RTX 4070") / 2, rel=0.001)

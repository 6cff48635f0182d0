"""Muon against torch.optim.Muon, the singular value decomposition and AdamW."""

import copy
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretrain.config.options import RunConfig
from foretrain.config.shape import NS_STEPS, ModelShape
from foretrain.hardware.cpu import cpu_device
from foretrain.model import muon
from foretrain.model.gpt2 import GPT
from foretrain.model.muon import NS_COEFFICIENTS, MuonAdamW, newton_schulz, update_scale
from foretrain.model.step import build, make_optimizer, train_step
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, flops, optimizer
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from tests.kit.tiny import tiny

CPU = torch.device("cpu")
SHAPES = [(32, 32), (64, 16), (16, 48), (32, 32), (64, 16)]


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters(seed: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(m) for m in matrices(seed)]


def own(parameters: list[torch.nn.Parameter], **knobs: object) -> MuonAdamW:
    group = {"params": parameters, "muon": True, "lr": 0.02, **knobs}
    return MuonAdamW([group], betas=(0.9, 0.95), momentum=0.95)


def steps(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], count: int) -> list[torch.Tensor]:
    """What `count` steps add to the parameters, with gradients that are the same for everybody."""
    before = [p.detach().clone() for p in parameters]
    for step in range(count):
        for parameter, gradient in zip(parameters, matrices(100 + step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() - b for p, b in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24)])
def test_newton_schulz_is_its_polynomial_on_singular_values(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.pow(4).sum(-1, keepdim=True).sqrt().sqrt()
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        s = a * s + b * s**3 + c * s**5
    assert torch.allclose(newton_schulz(x), u @ torch.diag_embed(s) @ vh, atol=1e-9)


def test_singular_values_end_near_one() -> None:
    x = torch.randn(4, 48, 96, generator=torch.Generator().manual_seed(2))
    s = torch.linalg.svdvals(newton_schulz(x))
    assert 0.65 < float(s.min()) <= float(s.max()) < 1.25


def test_a_gradient_of_zeros_changes_nothing() -> None:
    assert torch.equal(newton_schulz(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


def test_steps_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same scale, Nesterov's momentum and decay, where both take the nearest orthogonal matrix itself."""

    def nearest(x: torch.Tensor, *_: object) -> torch.Tensor:
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        return (u @ vh).to(x.dtype)

    monkeypatch.setattr(muon, "newton_schulz", nearest)
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.float32)
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", nearest)
    ours, theirs = parameters(0), parameters(0)
    found = steps(own(ours, weight_decay=0.1), ours, 4)
    expected = steps(
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="original"),
        theirs, 4,
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5
    assert update_scale(64, 16) == 2.0
    assert update_scale(16, 64) == 1.0


def test_batches_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.float32)
    together, apart = parameters(0), parameters(0)
    expected = steps(own(together), together, 2)
    monkeypatch.setattr(muon, "NS_BATCH_ELEMENTS", 1)
    for a, b in zip(steps(own(apart), apart, 2), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_rest_takes_the_steps_of_adamw() -> None:
    ours, theirs = parameters(0), parameters(0)
    group = {"params": ours, "lr": 0.01, "weight_decay": 0.1}
    found = steps(MuonAdamW([group], betas=(0.9, 0.95), momentum=0.9), ours, 5)
    expected = steps(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), fused=True), theirs, 5)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_groups(recipe: str) -> None:
    """Matrices of blocks are Muon's, all else AdamW's; the schedule's rate reaches both at their own height."""
    config = tiny(recipe=recipe, optimizer="muon", learning_rate=0.01, muon_learning_rate=0.04, max_iters=3)
    state = build(config, CPU, torch.float32, compile=False)
    names = {id(p): name for name, p in state.model.named_parameters()}
    groups = state.optimizer.param_groups
    of_muon = [names[id(p)] for group in groups if group["muon"] for p in group["params"]]
    assert len(of_muon) == config.n_layer * (4 if recipe == "nanogpt" else 5)
    assert all("blocks." in name or ".h." in name for name in of_muon)
    assert sum(len(group["params"]) for group in groups) == len(names)
    idx = torch.zeros(2, 16, dtype=torch.long)
    train_step(state, [(idx, idx)] * 2, 0.005)
    assert all(group["lr"] == pytest.approx(0.02) for group in groups if group["muon"])
    assert {group["lr"] for group in groups if not group["muon"]} == {0.005}


@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_a_checkpoint_goes_on_bit_for_bit(recipe: str) -> None:
    config = tiny(recipe=recipe, optimizer="muon", weight_decay=0.1)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 96, (4, 16), generator=generator) for _ in range(5)]
    batches = [[(idx, idx)] * 2 for idx in ids]
    state = build(config, CPU, torch.float32, compile=False)
    for batch in batches[:3]:
        train_step(state, batch, 0.01)
    checkpoint.save(Path("checkpoints"), state, Progress(step=3))
    other = build(config.model_copy(update={"seed": 2}), CPU, torch.float32, compile=False)
    assert checkpoint.load(Path("checkpoints"), other)
    for batch in batches[3:]:
        train_step(state, batch, 0.01)
        train_step(other, batch, 0.01)
    for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in state.optimizer.state[a].items():
            assert torch.equal(value, other.optimizer.state[b][key])


def test_its_state_dict_goes_round() -> None:
    config = tiny(recipe="modern", optimizer="muon")
    state, other = (build(config, CPU, torch.float32, compile=False) for _ in range(2))
    idx = torch.zeros(2, 16, dtype=torch.long)
    train_step(state, [(idx, idx)] * 2, 0.01)
    other.model.load_state_dict(state.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    for each in (state, other):
        train_step(each, [(idx, idx)] * 2, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))


def test_overflow_under_fp16_skips_the_update() -> None:
    state = build(tiny(recipe="modern", optimizer="muon"), CPU, torch.float16, compile=False)
    before = [p.clone() for p in state.model.parameters()]
    state.call = lambda idx, targets: state.model(idx, targets) * float("inf")
    idx = torch.zeros(1, 4, dtype=torch.long)
    train_step(state, [(idx, idx)], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))


@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_flops_of_the_step_are_those_of_flop_counter_mode(recipe: str) -> None:
    config = tiny(recipe=recipe, optimizer="muon", n_layer=3, n_embd=48)
    state = build(config, CPU, torch.float32, compile=False)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        state.optimizer.step()
    way = MicroBatchRun(StepSpec.of(config, cpu_device(), dtype="float32", compiled=False), True)
    assert flops(optimizer(way)) == counter.get_total_flops() > 0
    moved = [op for op in optimizer(way) if op.kind == "adamw"]
    shape = ModelShape.of(config)
    inside = sum(rows * columns * count for (rows, columns), count in shape.block_matrices.items())
    assert sum(op.runs * op.nbytes for op in moved) == 28 * (shape.n_params - inside)


def test_adamw_alone_is_torchs_own() -> None:
    config = RunConfig.model_validate(tiny().model_dump())
    assert isinstance(make_optimizer(GPT(config), config, "cpu"), torch.optim.AdamW)

"""AdamW with moments in 8 bits: its codes, its updates against torch's AdamW, saving and resuming, its forecast."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.model.adamw8bit import AdamW8bit, Tables, dynamic_tree, narrow_, widen
from foretrain.model.adamw8bit_sizes import BLOCK, CHUNK, LEAST, moments_bytes, n_blocks, temporary_bytes
from foretrain.model.shape import ModelShape
from foretrain.model.step import build, train_step
from foretrain.model.techniques.adamw8bit import LAUNCHES
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan, save_time
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import Way
from foretrain.predict.speed.step_ops import optimizer, optimizer_launches
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from foretrain.training.meter import allocator_peak
from tests.kit.kernels import Kernels, random_batches
from tests.kit.tiny import tiny
from tests.kit.training import assert_same, final_tensors, train

CPU = torch.device("cpu")
SIGNED, ROOTS = Tables.of(True, CPU), Tables.of(False, CPU)


# -- codes -------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_published_map() -> None:
    """Dettmers et al. 2021, section 2.1, as their library lists them: 256 numbers, 0 and 1 among them, by tens."""
    signed, unsigned = dynamic_tree(True), dynamic_tree(False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[0] == pytest.approx(-0.9929688, abs=1e-6)
    assert signed[-2:] == pytest.approx([0.9929688, 1.0], abs=1e-6)
    assert signed[128:130] == pytest.approx([5.5e-7, 3.25e-6])
    assert unsigned[:3] == pytest.approx([0.0, 3.25e-7, 7.75e-7])
    assert signed.index(0.0) == 127


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(1, 1000), exponent=st.integers(-60, 30), seed=st.integers(0, 1000), signed=st.booleans(),
    spread=st.floats(0.0, 8.0),
)  # fmt: skip
def test_what_is_stored_is_near(numel: int, exponent: int, seed: int, signed: bool, spread: float) -> None:
    """Within half the gap between neighbouring numbers of a block's scale, and what bfloat16 adds to it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** (-spread * torch.rand(numel, generator=generator))
    x = (x if signed else x.abs()) * 2.0**exponent
    tables = SIGNED if signed else ROOTS
    codes, scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(n_blocks(numel))
    narrow_(x.clone(), codes, scales, tables)
    back = widen(codes, scales, tables)
    numbers = torch.tensor(dynamic_tree(signed), dtype=torch.float64)
    for start in range(0, numel, BLOCK):
        part, again = x[start : start + BLOCK].double(), back[start : start + BLOCK].double()
        scale = part.abs().max().clamp(min=1e-30)
        assert scales[start // BLOCK] == scale.float()
        place = torch.searchsorted(numbers, part / scale).clamp(1, 255)
        gap = (numbers[place] - numbers[place - 1]) * scale
        assert ((again - part).abs() <= gap * 0.51 + part.abs() * 2.0**-8 + (0 if signed else 4e-7 * scale)).all()
    if not signed:
        assert ((back > 0) == (x > 0)).all()  # never to zero, and zero stays zero


# -- updates -----------------------------------------------------------------------------------------------


def pair(shape: tuple[int, ...]) -> tuple[torch.nn.Parameter, torch.nn.Parameter, AdamW8bit, torch.optim.AdamW]:
    torch.manual_seed(1)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    betas = (0.9, 0.95)
    low = AdamW8bit([{"params": [ours], "weight_decay": 0.1}], 1e-2, betas)
    return ours, theirs, low, torch.optim.AdamW([theirs], lr=1e-2, betas=betas, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(63, 65), (LEAST,), (33, 300), (CHUNK + 5000,)])
def test_updates_are_those_of_torchs_adamw(shape: tuple[int, ...]) -> None:
    """The first exactly, as nothing was stored before it; small tensors always; later ones nearly."""
    ours, theirs, low, reference = pair(shape)
    start = ours.detach().clone()
    for step in range(8):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient, gradient.clone()
        low.step()
        reference.step()
        if step == 0 or ours.numel() < LEAST:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    error = (ours - theirs).norm() / (theirs - start).norm()
    assert error < 0.02
    state = low.state[ours]
    assert {name: tuple(value.shape) for name, value in state.items()} == low.state_shapes(ours)
    stored = sum(v.numel() * v.element_size() for name, v in state.items() if name != "step")
    assert stored == moments_bytes({ours.numel(): 1})


def test_rare_rows_do_not_run_away() -> None:
    """A row with one tiny gradient beside large ones: with a squared moment in 8 bits its root is 0, and the update
    is the first moment over eps."""
    ours, theirs, low, reference = pair((64, 64))
    for step in range(10):
        gradient = torch.randn(64, 64)
        gradient[1] = 1e-5 * torch.randn(64) if step == 0 else 0.0
        ours.grad, theirs.grad = gradient, gradient.clone()
        low.step()
        reference.step()
        assert (ours[1] - theirs[1]).abs().max() < 0.1  # ten steps of the rate; over eps it were a hundred a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_learns_as_with_adamw(dtype: torch.dtype) -> None:
    """float16 with its GradScaler too, whose skipped steps leave the moments alone."""
    losses = {}
    for name in ("adamw", "adamw8bit"):
        run = build(tiny(optimizer=name, n_embd=64), CPU, dtype, compile=False)
        if dtype == torch.float16:
            run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # beyond float16: the first steps are skipped
        losses[name] = [float(train_step(run, random_batches(), 3e-3).loss) for _ in range(30)]
        assert run.scaler.get_scale() < 2.0**40
    assert losses["adamw8bit"][-1] == pytest.approx(losses["adamw"][-1], rel=0.1)
    assert losses["adamw8bit"][-1] < 0.7 * losses["adamw8bit"][0]


# -- saving ------------------------------------------------------------------------------------------------


def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    knobs: dict[str, Any] = {"optimizer": "adamw8bit", "n_embd": 64, "max_iters": 6, "eval_interval": 3, "bias": True}
    train(tiny(**knobs, out_dir="whole"))
    train(tiny(**{**knobs, "max_iters": 3}, out_dir="part"))
    train(tiny(**knobs, out_dir="part"), resume=True)
    whole = final_tensors(Path("whole"))
    assert_same(whole, final_tensors(Path("part")))
    codes = whole["optimizer/exp_avg/transformer.h.0.mlp.c_fc.weight"]
    assert codes.dtype == torch.uint8
    assert codes.shape == (256, 64)
    record = json.loads(Path("part/run.json").read_text())
    assert record["resumed_from"] == [3]


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    run = build(tiny(optimizer="adamw8bit", n_embd=64), CPU, torch.float32, compile=False)
    train_step(run, random_batches(), 1e-3)
    weight = run.model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    run.optimizer.state[weight]["exp_avg_scale"] = torch.ones(3)
    checkpoint.save(tmp_path, run, Progress(step=1))
    with pytest.raises(UserError) as caught:
        checkpoint.load(tmp_path, run)
    assert caught.value.id == "checkpoint.bad_contents"
    assert "exp_avg_scale" in str(caught.value)


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    plain = build(tiny(n_embd=64), CPU, torch.float32, compile=False)
    train_step(plain, random_batches(), 1e-3)
    checkpoint.save(tmp_path, plain, Progress(step=1))
    run = build(tiny(optimizer="adamw8bit", n_embd=64), CPU, torch.float32, compile=False)
    with pytest.raises(UserError) as caught:
        checkpoint.load(tmp_path, run)
    assert caught.value.id == "checkpoint.bad_contents"


# -- forecast ----------------------------------------------------------------------------------------------


def test_the_ledger_counts_the_moments() -> None:
    config, gpu = RunConfig(optimizer="adamw8bit"), find("RTX 4070")
    plain = config.model_copy(update={"optimizer": "adamw"})
    sizes = {}
    for name, c in (("low", config), ("plain", plain)):
        made = predict(StepSpec.of(c, gpu, dtype="bfloat16", compiled=True))
        rows = {row.id: row.size_bytes for row in made.phase("evaluate_steady").components}
        sizes[name] = rows["optimizer"]
    P = ModelShape.of(config).n_params
    assert sizes["low"] == pytest.approx(P * (2 + 8 / 256), rel=1e-3)
    assert sizes["plain"] == pytest.approx(8 * P, rel=1e-3)
    nano = [predict(StepSpec.of(c, gpu, "nanogpt", dtype="bfloat16", compiled=True)) for c in (config, plain)]
    assert nano[0] == nano[1]
    low, full = save_time(config), save_time(plain)
    assert low.expected_s / full.expected_s == pytest.approx(6.03 / 12, rel=0.01)


def test_bytes_launches_and_temporaries_are_those_of_a_real_step() -> None:
    numel = 2 * CHUNK
    parameter = torch.nn.Parameter(torch.randn(numel))
    low = AdamW8bit([{"params": [parameter], "weight_decay": 0.1}], 1e-3, (0.9, 0.95))
    parameter.grad = torch.randn(numel)
    low.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        low.step()
    assert allocator_peak(profile) == pytest.approx(temporary_bytes(numel), rel=0.25)
    with Kernels() as seen:
        low.step()
    config = RunConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=numel // 64, optimizer="adamw8bit")
    way = Way(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=False), True)
    update = next(op for op in optimizer(way) if op.kind == "adamw" and op.shape == (numel,))
    assert seen.nbytes == pytest.approx(update.nbytes, rel=0.05)
    assert seen.count == pytest.approx(2 * LAUNCHES, abs=4)
    assert optimizer_launches(way) == 40 + 36 * (2 + len(list(ModelShape.of(config).parameters())) - 1)


def test_a_plan_says_what_the_smaller_states_cost_in_time() -> None:
    """Many small kernels instead of one: a few hundredths of a second a step, whatever the accumulation."""
    times = [plan(RunConfig(optimizer=name), find("RTX 4070")).timing for name in ("adamw", "adamw8bit")]  # type: ignore[arg-type]
    assert times[0]
    assert times[1]
    assert 0.01 < times[1].step_s.expected_s - times[0].step_s.expected_s < 0.2

"""AdamW with moments in 8 and 4 bits: its codes, its updates against torch's AdamW, saving and resuming, its forecast."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model.low_bit_adamw import AdamW4bit, AdamW8bit, LowBitAdamW, Moment, Tables, code_books, narrow_, widen
from foretrain.model.low_bits import CHUNK, EIGHT, FOUR, LEAST, LowBits
from foretrain.model.step import build, train_step
from foretrain.model.techniques import optimizer_of
from foretrain.model.techniques.adamw_low_bits import AdamW8bit as Technique
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan, save_time
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, optimizer, optimizer_launches
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from foretrain.training.meter import allocator_peak
from tests.kit.command import refused
from tests.kit.kernels import Kernels, random_batches
from tests.kit.tiny import tiny
from tests.kit.training import assert_same, final_tensors, train

CPU = torch.device("cpu")
FORMS = {"adamw8bit": EIGHT, "adamw4bit": FOUR}
LOW: dict[str, type[LowBitAdamW]] = {"adamw8bit": AdamW8bit, "adamw4bit": AdamW4bit}
both = pytest.mark.parametrize("name", FORMS)


# -- codes -------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_published_map() -> None:
    """Dettmers et al. 2021, section 2.1, as their library lists them: 256 numbers, 0 and 1 among them, by tens."""
    signed, unsigned = code_books(EIGHT)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[0] == pytest.approx(-0.9929688, abs=1e-6)
    assert signed[-2:] == pytest.approx([0.9929688, 1.0], abs=1e-6)
    assert signed[128:130] == pytest.approx([5.5e-7, 3.25e-6])
    assert unsigned[:3] == pytest.approx([0.0, 3.25e-7, 7.75e-7])
    assert signed.index(0.0) == 127


def test_the_numbers_of_4_bits_are_those_of_the_paper() -> None:
    """Li et al. 2023, appendix E: the same map with one sign bit and up to two zeros; and (i + 1) / 16 without zero."""
    first, second = code_books(FOUR)
    positive = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    assert first == pytest.approx([*(-x for x in reversed(positive[:-1])), 0.0, *positive])
    assert second == [k / 16 for k in range(1, 17)]


def stored(x: torch.Tensor, form: LowBits, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x after it was stored and read, and its scales."""
    tables = Tables.of(code_books(form)[which], form.block, CPU)
    codes = torch.zeros(form.n_bytes(x.numel()), dtype=torch.uint8)
    scales = torch.zeros(form.n_blocks(x.numel()))
    moment = Moment(codes, scales, tables)
    narrow_(x[None].clone(), [moment], x.numel())
    return widen([moment], x.numel())[0, : x.numel()], scales


@settings(deadline=None, max_examples=80)
@given(
    numel=st.integers(1, 1000), exponent=st.integers(-60, 30), seed=st.integers(0, 1000), signed=st.booleans(),
    spread=st.floats(0.0, 8.0), form=st.sampled_from([EIGHT, FOUR]),
)  # fmt: skip
def test_what_is_stored_is_near(
    numel: int, exponent: int, seed: int, signed: bool, spread: float, form: LowBits
) -> None:
    """A plain reference: no number of the book times the block's scale is nearer, but for what bfloat16 moves a border
    by. What is not zero never becomes zero in the second moment."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** (-spread * torch.rand(numel, generator=generator))
    x = (x if signed else x.abs()) * 2.0**exponent
    back, scales = stored(x, form, 0 if signed else 1)
    book = torch.tensor(code_books(form)[0 if signed else 1], dtype=torch.float64)
    for start in range(0, numel, form.block):
        part, again = x[start : start + form.block].double(), back[start : start + form.block].double()
        scale = part.abs().max().clamp(min=1e-30)
        assert scales[start // form.block] == scale.float()
        nearest = (part[:, None] / scale - book).abs().min(1).values * scale
        lifted = 0 if signed or book[0] else book[1] * scale
        assert ((again - part).abs() <= nearest + part.abs() * 2.0**-7 + 1e-7 * scale + lifted).all()
    if not signed:
        assert (back[x > 0] > 0).all()
        assert form == FOUR or (back[x == 0] == 0).all()


@pytest.mark.parametrize("numel", [1, 2, 127, 128, 129, 4097])
def test_two_codes_share_a_byte(numel: int) -> None:
    """The first in its lower half; an odd one has a byte of its own."""
    book = torch.tensor(code_books(FOUR)[1])
    x = book[torch.arange(numel) * 7 % 16]
    x[0] = 1.0  # the scale of a first block
    x[128::128] = 1.0
    tables = Tables.of(book.tolist(), 128, CPU)
    codes, scales = torch.zeros(FOUR.n_bytes(numel), dtype=torch.uint8), torch.zeros(FOUR.n_blocks(numel))
    moment = Moment(codes, scales, tables)
    narrow_(x[None].clone(), [moment], numel)
    expected = (x * 16 - 1).round().to(torch.uint8)
    assert torch.equal(codes & 15, expected[0::2])
    assert torch.equal((codes >> 4)[: numel // 2], expected[1::2])
    assert torch.equal(widen([moment], numel)[0, :numel], x)


# -- updates -----------------------------------------------------------------------------------------------


Pair = tuple[torch.nn.Parameter, torch.nn.Parameter, LowBitAdamW, torch.optim.AdamW]


def pair(shape: tuple[int, ...], name: str) -> Pair:
    torch.manual_seed(1)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    betas = (0.9, 0.95)
    low = LOW[name]([{"params": [ours], "weight_decay": 0.1}], 1e-2, betas)
    return ours, theirs, low, torch.optim.AdamW([theirs], lr=1e-2, betas=betas, weight_decay=0.1)


@both
@pytest.mark.parametrize("shape", [(63, 65), (LEAST,), (65, 65), (33, 300), (CHUNK + 5001,)])
def test_updates_are_those_of_torchs_adamw(shape: tuple[int, ...], name: str) -> None:
    """The first exactly, as nothing was stored before it; small tensors always; later ones nearly."""
    ours, theirs, low, reference = pair(shape, name)
    start = ours.detach().clone()
    for step in range(8):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient, gradient.clone()
        low.step()
        reference.step()
        if step == 0 or ours.numel() < LEAST:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    error = (ours - theirs).norm() / (theirs - start).norm()
    assert error < {"adamw8bit": 0.02, "adamw4bit": 0.25}[name]
    state = low.state[ours]
    assert {name: tuple(value.shape) for name, value in state.items()} == low.state_shapes(ours)
    stored = sum(v.numel() * v.element_size() for name, v in state.items() if name != "step")
    assert stored == FORMS[name].moments_bytes({ours.numel(): 1})
    if ours.numel() >= LEAST:  # a closed form: codes of two moments and an fp32 scale for each block of each
        bits, block = {"adamw8bit": (8, 256), "adamw4bit": (4, 128)}[name]
        n = ours.numel()
        assert stored == 2 * (math.ceil(n * bits / 8) + 4 * math.ceil(n / block))


@both
def test_rare_rows_do_not_run_away(name: str) -> None:
    """A row with one tiny gradient beside large ones: with a squared moment in 8 bits its root is 0, and the update
    is the first moment over eps."""
    ours, theirs, low, reference = pair((64, 64), name)
    for step in range(10):
        gradient = torch.randn(64, 64)
        gradient[1] = 1e-5 * torch.randn(64) if step == 0 else 0.0
        ours.grad, theirs.grad = gradient, gradient.clone()
        low.step()
        reference.step()
        assert (ours[1] - theirs[1]).abs().max() < 0.1  # ten steps of the rate; over eps it were a hundred a step


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_learns_as_with_adamw(dtype: torch.dtype, name: str) -> None:
    """float16 with its GradScaler too, whose skipped steps leave the moments alone."""
    losses = {}
    for each in ("adamw", name):
        run = build(tiny(optimizer=each, n_embd=64), CPU, dtype, compile=False)
        if dtype == torch.float16:
            run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # beyond float16: the first steps are skipped
        losses[each] = [float(train_step(run, random_batches(), 3e-3).loss) for _ in range(30)]
        assert run.scaler.get_scale() < 2.0**40
    assert losses[name][-1] == pytest.approx(losses["adamw"][-1], rel={"adamw8bit": 0.1, "adamw4bit": 0.35}[name])
    assert losses[name][-1] < 0.7 * losses[name][0]


def noisy_batches(config: RunConfig, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """New rows in each step, whose tokens go on by 1, 2, 5 or 10: there is a loss that no model gets below."""
    generator, shape = torch.Generator().manual_seed(step), (config.batch_size, config.block_size + 1)
    first = torch.randint(config.vocab_size, (config.batch_size, 1), generator=generator)
    far, twice = torch.rand(shape, generator=generator) < 0.3, torch.rand(shape, generator=generator) < 0.2
    rows = (first + ((1 + 4 * far) * (1 + 1 * twice)).cumsum(1)) % config.vocab_size
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())]


def test_hundreds_of_steps_learn_what_adamw_learns() -> None:
    """Within 1% of AdamW's loss in the end."""
    ends = {}
    for name in ("adamw", *FORMS):
        config = tiny(optimizer=name, n_embd=64, batch_size=16, gradient_accumulation_steps=1)
        run = build(config, CPU, torch.float32, compile=False)
        losses = [float(train_step(run, noisy_batches(config, step), 3e-3).loss) for step in range(300)]
        ends[name] = sum(losses[-50:]) / 50
        assert ends[name] < 0.35 * losses[0]
    assert ends["adamw8bit"] == pytest.approx(ends["adamw"], rel=0.01)
    assert ends["adamw4bit"] == pytest.approx(ends["adamw"], rel=0.01)


# -- saving ------------------------------------------------------------------------------------------------


@both
def test_a_run_resumes_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    knobs: dict[str, Any] = {"optimizer": name, "n_embd": 64, "max_iters": 6, "eval_interval": 3, "bias": True}
    train(tiny(**knobs, out_dir="whole"))
    train(tiny(**{**knobs, "max_iters": 3}, out_dir="part"))
    train(tiny(**knobs, out_dir="part"), resume=True)
    whole = final_tensors(Path("whole"))
    assert_same(whole, final_tensors(Path("part")))
    codes = whole["optimizer/exp_avg/transformer.h.0.mlp.c_fc.weight"]
    assert codes.dtype == torch.uint8
    assert codes.shape == ((256, 64) if name == "adamw8bit" else (256 * 64 // 2,))
    record = json.loads(Path("part/run.json").read_text())
    assert record["resumed_from"] == [3]


@both
def test_states_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    run = build(tiny(optimizer=name, n_embd=64), CPU, torch.float32, compile=False)
    train_step(run, random_batches(), 1e-3)
    weight = run.model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    run.optimizer.state[weight]["exp_avg_scale"] = torch.ones(3)
    checkpoint.save(tmp_path, run, Progress(step=1))
    with refused("checkpoint.bad_contents") as caught:
        checkpoint.load(tmp_path, run)
    assert "exp_avg_scale" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "resumed"), [("adamw", "adamw8bit"), ("adamw", "adamw4bit"), ("adamw8bit", "adamw4bit")]
)
def test_states_of_another_optimizer_are_refused(saved: str, resumed: str, tmp_path: Path) -> None:
    plain = build(tiny(optimizer=saved, n_embd=64), CPU, torch.float32, compile=False)
    train_step(plain, random_batches(), 1e-3)
    checkpoint.save(tmp_path, plain, Progress(step=1))
    run = build(tiny(optimizer=resumed, n_embd=64), CPU, torch.float32, compile=False)
    with refused("checkpoint.bad_contents"):
        checkpoint.load(tmp_path, run)


# -- forecast ----------------------------------------------------------------------------------------------


@both
def test_the_ledger_counts_the_moments(name: str) -> None:
    config, gpu = RunConfig.model_validate({"optimizer": name}), find("RTX 4070")
    plain = config.model_copy(update={"optimizer": "adamw"})
    sizes = {}
    for which, c in (("low", config), ("plain", plain)):
        made = predict(StepSpec.of(c, gpu, dtype="bfloat16", compiled=True))
        rows = {row.id: row.size_bytes for row in made.phase("evaluate_steady").components}
        sizes[which] = rows["optimizer"]
    P = ModelShape.of(config).n_params
    small = sum(numel * count for numel, count in ModelShape.of(config).numels.items() if numel < LEAST)
    each = {"adamw8bit": 2 + 8 / 256, "adamw4bit": 1 + 8 / 128}[name]
    assert sizes["low"] == pytest.approx((P - small) * each + 8 * small, rel=1e-4)
    assert sizes["plain"] == pytest.approx(8 * P, rel=1e-3)
    nano = [predict(StepSpec.of(c, gpu, "nanogpt", dtype="bfloat16", compiled=True)) for c in (config, plain)]
    assert nano[0] == nano[1]
    low, full = save_time(config), save_time(plain)
    assert low.expected_s / full.expected_s == pytest.approx((4 + each) / 12, rel=0.01)


@both
def test_bytes_launches_and_temporaries_are_those_of_a_real_step(name: str) -> None:
    numel, form = 2 * CHUNK, FORMS[name]
    parameter = torch.nn.Parameter(torch.randn(numel))
    low = LOW[name]([{"params": [parameter], "weight_decay": 0.1}], 1e-3, (0.9, 0.95))
    parameter.grad = torch.randn(numel)
    low.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        low.step()
    assert allocator_peak(profile) == pytest.approx(form.temporary_bytes(numel), rel=0.05)
    with Kernels() as seen:
        low.step()
    config = RunConfig.model_validate(
        {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": numel // 64, "optimizer": name}
    )
    way = MicroBatchRun(StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=False), True)
    update = next(op for op in optimizer(way) if op.kind == "adamw" and op.shape == (numel,))
    assert seen.nbytes == pytest.approx(update.nbytes, rel=0.05)
    technique = optimizer_of(config)
    assert isinstance(technique, Technique)
    assert seen.count == pytest.approx(2 * technique.chunk_launches, abs=4)
    sizes = [p.numel for p in ModelShape.of(config).parameters()]
    parts, plain = 2 + sum(LEAST <= size < numel for size in sizes), sum(size < LEAST for size in sizes)
    assert optimizer_launches(way) == 40 + technique.chunk_launches * parts + technique.plain_launches * plain
    small = torch.nn.Parameter(torch.randn(LEAST - 1))
    small.grad = torch.randn(LEAST - 1)
    few = LOW[name]([{"params": [small], "weight_decay": 0.0}], 1e-3, (0.9, 0.95))
    few.step()
    with Kernels() as seen:
        few.step()
    assert seen.count == pytest.approx(technique.plain_launches, abs=2)


def test_a_plan_says_what_the_smaller_states_cost_in_time() -> None:
    """Many small kernels instead of one: a few hundredths of a second a step, whatever the accumulation."""
    plain, *low = (
        plan(RunConfig.model_validate({"optimizer": name}), find("RTX 4070")).timing for name in ("adamw", *FORMS)
    )
    assert plain
    for each in low:
        assert 0.01 < each.step_s.expected_s - plain.step_s.expected_s < 0.2

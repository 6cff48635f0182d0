"""`recipe = modern`: the model against plain operations, its counts against PyTorch's, its layer of defaults."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.base.errors import ConfigError
from foretrain.config.families import FAMILIES
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_values, resolve, to_toml
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model import layers, modern
from foretrain.model.language_model import make_model
from foretrain.model.layers import norm, squared_relu
from foretrain.model.modern import ModernGPT
from foretrain.model.step import build, evaluation_loss, learning_rate, train_step
from foretrain.model.writer import generate
from foretrain.predict.plan import plan
from foretrain.predict.speed.ops import flops, micro_batch
from foretrain.predict.trace.forecast import traced
from tests.kit.families import assert_a_run_resumes_exactly
from tests.kit.operations import counted, way
from tests.kit.tiny import tiny

CPU = torch.device("cpu")
MODERN = FAMILIES["modern"]


def small(**changes: object) -> RunConfig:
    return tiny(**{"recipe": "modern", "optimizer": "muon", **changes})


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    idx, targets = (torch.randint(0, 96, (4, 16), generator=generator) for _ in range(2))
    return idx, targets


def stirred(model: torch.nn.Module, seed: int = 1) -> None:
    """Nothing is zero any more, so that every path carries something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


# -- the model ---------------------------------------------------------------------------------------------


def reference_loss(w: dict[str, torch.Tensor], c: RunConfig, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The forward pass in plain operations: positions by complex numbers, attention written out."""
    (B, T), D = idx.shape, c.n_embd // c.n_head

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + layers.NORM_EPS).sqrt()

    angles = torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    mask = torch.full((T, T), float("-inf")).triu(1)
    e = w["embedding.weight"][idx]
    x = x0 = rms(e + w["smear"] * torch.cat((torch.zeros(B, 1, c.n_embd), e[:, :-1]), 1))
    for i in range(c.n_layer):
        b = f"blocks.{i}."
        x = x + w[b + "skip"] * x0
        h = rms(x)
        q, k = (h @ w[b + "attention.qk.weight"].T).split(c.n_embd, -1)
        q, k, v = (t.view(B, T, c.n_head, D) for t in (q, k, h @ w[b + "attention.v.weight"].T))
        q, k, v = (t.transpose(1, 2) for t in (rms(turned(q)), rms(turned(k)), v))
        scores = q @ k.transpose(-2, -1) * modern.QK_SCALE / math.sqrt(D) + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, c.n_embd)
        x = x + y @ w[b + "attention.out.weight"].T
        x = x + (rms(x) @ w[b + "mlp.up.weight"].T).clamp(min=0) ** 2 @ w[b + "mlp.down.weight"].T
    logits = rms(x) @ w["lm_head.weight"].T
    return -(logits.log_softmax(-1).gather(-1, targets[..., None])).mean()


def test_loss_and_gradients_are_those_of_plain_operations() -> None:
    config = small(n_layer=3)
    model = make_model(config)
    stirred(model)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss, expected = model(*batch()), reference_loss(weights, config, *batch())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=2e-3, atol=1e-6, msg=name)


def test_norm_is_pytorchs_rms_norm() -> None:
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y, expected = norm(ours, torch.float32), F.rms_norm(theirs, (12,), eps=layers.NORM_EPS)
    torch.testing.assert_close(y, expected)
    y.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squared_relu_is_what_it_says(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 61).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    squared_relu(ours).sum().backward()
    F.relu(theirs).square().sum().backward()
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=0)


def test_the_first_loss_is_that_of_a_guess() -> None:
    assert float(make_model(small(vocab_size=500))(*batch()).detach()) == pytest.approx(math.log(500), rel=1e-5)


def test_no_token_sees_the_future_and_positions_count() -> None:
    model = make_model(small()).eval()
    stirred(model)
    idx, _ = batch()
    a = model.hidden(idx)
    for position in (10, 15):
        changed = idx.clone()
        changed[:, position] = (changed[:, position] + 1) % 96
        b = model.hidden(changed)
        assert torch.equal(a[:, :position], b[:, :position])
        assert not torch.equal(a[:, position:], b[:, position:])
    swapped = idx[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model.hidden(swapped)[:, 15], a[:, 15])


@pytest.mark.parametrize("knobs", [{"activation_checkpointing": True}, {"loss_chunk_size": 24}])
def test_other_ways_to_run_it_are_the_same(knobs: dict[str, object]) -> None:
    found = []
    for changes in ({}, knobs):
        state = build(small(**changes), CPU, torch.float32, compile=False)
        stirred(state.model)
        state.model.train()
        loss = state.call(*batch())
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])
        assert float(evaluation_loss(state, batch())) == pytest.approx(float(loss.detach()), rel=1e-6)
        found.append((float(loss.detach()), gradients))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.13's own, in dynamo
def test_compiled_whole_it_is_the_same() -> None:
    model = make_model(small())
    stirred(model)
    expected = model(*batch())
    compiled = torch.compile(model, fullgraph=True)(*batch())
    assert float(compiled.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    compiled.backward()
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected.backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_learns_and_writes(dtype: torch.dtype) -> None:
    state = build(small(decay_lr=False), CPU, dtype, compile=False)
    idx = torch.arange(17).repeat(4, 1)
    pair = (idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    losses = [float(train_step(state, [pair, pair], 1e-2).loss) for _ in range(8)]
    assert losses[-1] < losses[0] - 2.0
    for tiny_number in (1e-42, 1e-300):  # logits divided by it are beyond fp32
        words = {"top_k": 0, "seed": 0, "vocab_size": 96}
        near = list(generate(state.model, [1, 2, 3], 5, temperature=tiny_number, **words))
        assert near == list(generate(state.model, [1, 2, 3], 5, temperature=0, **words))
    made = generate(state.model, [1, 2, 3], 5, temperature=0, top_k=0, seed=0, vocab_size=96)
    assert list(made) == [4, 5, 6, 7, 8]


def test_killed_runs_resume_exactly() -> None:
    assert_a_run_resumes_exactly(small())


# -- counts and forecasts ----------------------------------------------------------------------------------


def test_shapes_and_counts_are_the_models() -> None:
    config = from_values({**tiny().model_dump(), "recipe": "modern", "n_layer": 3}).config
    model, shape = ModernGPT(config), ModelShape.of(config)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == [
        (p.name, p.shape) for p in sorted(shape.parameters(), key=lambda p: _order(model, p.name))
    ]
    assert sum(p.numel() for p in model.parameters()) == shape.n_params
    assert shape.n_params_nanogpt == shape.n_params - model.embedding.weight.numel()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.n_matmul_params == sum(m.weight.numel() for m in linear)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    assert shape.optimizer_groups()[True] == (len(decayed), sum(p.numel() for p in decayed))


def _order(model: torch.nn.Module, name: str) -> int:
    return [own for own, _ in model.named_parameters()].index(name)


@settings(max_examples=15)
@given(
    layers=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]), width=st.integers(1, 3), block=st.integers(2, 40),
    vocab=st.integers(17, 300), rows=st.integers(1, 3), checkpointing=st.booleans(), chunk=st.sampled_from([0, 20]),
    half=st.booleans(), training=st.booleans(),
)  # fmt: skip
def test_flops_are_those_of_flop_counter_mode(
    layers: int, heads: int, width: int, block: int, vocab: int, rows: int, checkpointing: bool, chunk: int,
    half: bool, training: bool,
) -> None:  # fmt: skip
    config = small(
        n_layer=layers, n_head=heads, n_embd=16 * heads * width, block_size=block, vocab_size=vocab, batch_size=rows,
        activation_checkpointing=checkpointing, loss_chunk_size=chunk,
    )  # fmt: skip
    dtype = "bfloat16" if half else "float32"
    measured = counted(config, getattr(torch, dtype), train=training)
    assert flops(micro_batch(way(config, dtype, train=training))) == pytest.approx(measured, rel=1e-3)
    if not checkpointing:
        assert flops(micro_batch(way(config, dtype, train=training, compiled=True))) == pytest.approx(
            measured, rel=1e-3
        )


def test_a_plan_is_of_this_model_and_nanogpts_step_of_nanogpts() -> None:
    gpu = find("RTX 4070")
    changed = plan(resolve(["gpt2-124m", "--recipe=modern"]).config, gpu)
    plain = plan(resolve(["gpt2-124m"]).config, gpu)
    assert changed.counts.n_params == (2 * 50304 + 1) * 768 + 12 * (12 * 768**2 + 1)
    assert changed.memory[1] == plain.memory[1]
    assert changed.nanogpt_timing.step_s == plain.nanogpt_timing.step_s


def test_the_exact_trace_runs_it() -> None:
    """Weights, gradients, and one momentum for what is Muon's, to the byte."""
    config = small(n_embd=64, vocab_size=512, batch_size=3, dtype="float16")
    found = traced(plan(config, find("RTX 4070")))
    shape = ModelShape.of(config)
    inside = sum(rows * columns * count for (rows, columns), count in shape.block_matrices.items())
    last = next(phase for phase in found.memory[0].phases if phase.phase == "evaluate_steady")
    sizes = {component.id: component.size_bytes for component in last.components}
    assert sizes["weights"] == pytest.approx(4 * shape.n_params, abs=512 * 20)
    assert sizes["optimizer"] == pytest.approx(8 * shape.n_params - 4 * inside, abs=512 * 60)


# -- the recipe as a layer of defaults ---------------------------------------------------------------------


def test_the_recipe_lies_beneath_what_the_user_wrote() -> None:
    Path("a.toml").write_text("recipe = 'modern'\nwarmup_iters = 7\n", "utf-8")
    found = resolve(["a.toml", "--weight_decay=0.3"])
    c = found.config
    assert (c.optimizer, c.lr_schedule, c.learning_rate) == ("muon", "linear", MODERN.rates["learning_rate"])
    assert (c.warmup_iters, c.weight_decay) == (7, 0.3)
    assert found.sources["optimizer"] == found.sources["learning_rate"] == "recipe modern"
    assert found.sources["warmup_iters"] == "a.toml:2"
    assert found.sources["weight_decay"] == "--weight_decay=0.3"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_give_their_shape_and_the_recipe_its_rates(preset: str) -> None:
    found = resolve([preset, "--recipe=modern"])
    for key, value in {**MODERN.sets, **MODERN.rates}.items():
        assert getattr(found.config, key) == value
        assert found.sources[key] == "recipe modern"
    for key in ("n_layer", "n_embd", "batch_size"):
        assert getattr(found.config, key) == getattr(resolve([preset]).config, key)


def test_without_the_recipe_nothing_changes() -> None:
    assert "recipe modern" not in resolve(["baby"]).sources.values()
    assert resolve(["baby", "--recipe=nanogpt"]).config == resolve(["baby"]).config


def test_another_optimizer_keeps_its_own_rates() -> None:
    c = resolve(["baby", "--recipe=modern", "--optimizer=adamw"]).config
    assert (c.recipe, c.optimizer, c.learning_rate) == ("modern", "adamw", 3e-3)


def test_a_written_config_reads_as_itself() -> None:
    found = resolve(["baby", "--recipe=modern"])
    Path("a.toml").write_text(to_toml(found.config), "utf-8")
    again = resolve(["a.toml"])
    assert again.config == found.config
    assert not again.notes


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--dropout=0.1"], "dropout = 0.1"),
        (["--bias=True"], "bias = True"),
        (["--init_from=gpt2"], "init_from = gpt2"),
        (["--n_embd=36", "--n_head=12"], "even width"),
    ],
)
def test_what_the_recipe_lacks_is_said(words: list[str], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["baby", "--recipe=modern", *words])
    assert word in str(caught.value)
    resolve(["baby", *words])


def test_knobs_that_nothing_reads_are_noted() -> None:
    notes = [str(note) for note in resolve(["baby", "--muon_learning_rate=0.5", "--cooldown=0.1"]).notes]
    assert len(notes) == 2
    assert "optimizer is adamw" in notes[0]
    assert not resolve(["baby", "--recipe=modern", "--muon_learning_rate=0.5", "--cooldown=0.1"]).notes


def test_linear_schedule() -> None:
    c = tiny(
        lr_schedule="linear", learning_rate=1.0, min_lr=0.0, warmup_iters=4, cooldown=0.5, lr_decay_iters=20,
        max_iters=30,
    )  # fmt: skip
    rates = [learning_rate(c, step) for step in range(30)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4:11] == [1.0] * 7
    assert rates[15] == pytest.approx(0.5)
    assert rates[20:] == [0.0] * 10
    whole = c.model_copy(update={"cooldown": 1.0})  # what the warm-up leaves
    assert learning_rate(whole, 4) == pytest.approx(1.0)
    assert learning_rate(whole, 12) == pytest.approx(0.5)

"""The model and the step against plain PyTorch: same weights as nanoGPT, same losses as a re-computation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foretrain.model.gpt2 import GPT
from foretrain.model.step import build, evaluation_loss, learning_rate, make_optimizer, train_step
from tests.kit.nanogpt import reference_loss
from tests.kit.tiny import tiny

CPU = torch.device("cpu")


def nanogpt_initial_weights(c) -> dict[str, torch.Tensor]:
    """nanoGPT's initialisation with its seed, drawn in its order, written without any module of ours.

    model.py makes the modules in order (each of which draws its default values), then applies normal(0, 0.02) to
    every linear and embedding depth first, the tied head once more at the end, then draws the projections again.
    """
    torch.manual_seed(c.seed)
    C, V, T = c.n_embd, c.vocab_size, c.block_size
    modules: list[tuple[str, torch.nn.Module]] = [
        ("transformer.wte", torch.nn.Embedding(V, C)), ("transformer.wpe", torch.nn.Embedding(T, C)),
    ]  # fmt: skip
    for i in range(c.n_layer):
        h = f"transformer.h.{i}."
        modules += [
            (h + "ln_1", torch.nn.LayerNorm(C, bias=c.bias)),
            (h + "attn.c_attn", torch.nn.Linear(C, 3 * C, bias=c.bias)),
            (h + "attn.c_proj", torch.nn.Linear(C, C, bias=c.bias)),
            (h + "ln_2", torch.nn.LayerNorm(C, bias=c.bias)),
            (h + "mlp.c_fc", torch.nn.Linear(C, 4 * C, bias=c.bias)),
            (h + "mlp.c_proj", torch.nn.Linear(4 * C, C, bias=c.bias)),
        ]
    modules += [("transformer.ln_f", torch.nn.LayerNorm(C, bias=c.bias))]
    modules += [("lm_head", torch.nn.Linear(C, V, bias=False))]
    head = modules[-1][1].weight
    modules[0][1].weight = head
    with torch.no_grad():
        for _, module in modules:
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(0.0, 0.02)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
        for name, module in modules:
            if name.endswith("c_proj"):
                module.weight.normal_(0.0, 0.02 / math.sqrt(2 * c.n_layer))
    weights = {f"{name}.{kind}": value.detach() for name, m in modules for kind, value in m.named_parameters()}
    return weights


def reference_adamw(w, grads, state, c, rate: float, t: int) -> None:
    unique = {id(p): (name, p) for name, p in w.items()}
    norm = math.sqrt(sum(float(grads[name].pow(2).sum()) for name, _ in unique.values()))
    scale = min(1.0, c.grad_clip / (norm + 1e-6))
    for name, p in unique.values():
        g = grads[name] * scale
        m, v = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
        m.mul_(c.beta1).add_(g, alpha=1 - c.beta1)
        v.mul_(c.beta2).addcmul_(g, g, value=1 - c.beta2)
        if p.dim() >= 2:
            p.data.mul_(1 - rate * c.weight_decay)
        m_hat, v_hat = m / (1 - c.beta1**t), v / (1 - c.beta2**t)
        p.data.addcdiv_(m_hat, v_hat.sqrt() + 1e-8, value=-rate)


def nanogpt_batches(c, data: np.ndarray, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """nanoGPT's get_batch: torch.randint over the global generator."""
    batches = []
    for _ in range(count):
        ix = torch.randint(len(data) - c.block_size, (c.batch_size,))
        rows = [torch.from_numpy(data[i : i + c.block_size + 1].astype(np.int64)) for i in ix]
        batches.append((torch.stack([r[:-1] for r in rows]), torch.stack([r[1:] for r in rows])))
    return batches


@pytest.mark.parametrize("bias", [False, True])
def test_weights_are_nanogpts_with_the_same_seed(bias: bool) -> None:
    config = tiny(bias=bias, seed=1337)
    expected = nanogpt_initial_weights(config)
    state = build(config, CPU, torch.float32, compile=False)
    ours = state.model.state_dict()
    assert set(ours) == set(expected)
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("bias", [False, True])
def test_losses_over_20_steps_equal_a_plain_recomputation(bias: bool) -> None:
    """The parity of the issue: nanoGPT's weights and batches, CPU fp32, 1e-5 relative over 20 steps."""
    c = tiny(bias=bias, max_iters=20, lr_decay_iters=20, warmup_iters=4, learning_rate=3e-3, min_lr=3e-4)
    data = np.random.default_rng(1).integers(0, c.vocab_size, 4000).astype(np.uint16)
    weights = nanogpt_initial_weights(c)
    batches = nanogpt_batches(c, data, 20 * c.gradient_accumulation_steps)
    state = build(c, CPU, torch.float32, compile=False)

    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    w["lm_head.weight"] = w["transformer.wte.weight"]
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(20):
        micro = batches[step * 2 : step * 2 + 2]
        expected = torch.stack([reference_loss(w, c, *batch) for batch in micro]).mean()
        unique = {id(p): (name, p) for name, p in w.items()}
        names = [name for name, _ in unique.values()]
        grads = dict(zip(names, torch.autograd.grad(expected, [p for _, p in unique.values()]), strict=True))
        reference_adamw({n: w[n] for n in names}, grads, moments, c, learning_rate(c, step), step + 1)
        ours = train_step(state, micro, learning_rate(c, step))
        assert float(ours.loss) == pytest.approx(float(expected.detach()), rel=1e-5), f"step {step}"


def test_loss_at_the_start_is_that_of_a_guess() -> None:
    config = tiny(vocab_size=500, n_embd=64)
    torch.manual_seed(0)
    idx = torch.randint(0, 500, (8, 16))
    loss = GPT(config)(idx, torch.randint(0, 500, (8, 16))).detach()
    assert float(loss) == pytest.approx(math.log(500), abs=0.1)


def test_no_token_sees_the_future() -> None:
    model = GPT(tiny()).eval()
    idx = torch.randint(0, 96, (1, 16))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 96
    a, b = model.hidden(idx), model.hidden(changed)
    assert torch.equal(a[0, :10], b[0, :10])
    assert not torch.equal(a[0, 10:], b[0, 10:])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_is_exact(dropout: float) -> None:
    losses, grads = [], []
    for checkpointing in (False, True):
        state = build(tiny(dropout=dropout, activation_checkpointing=checkpointing), CPU, torch.float32, compile=False)
        torch.manual_seed(7)
        idx = torch.randint(0, 96, (4, 16))
        state.model.train()
        loss = state.call(idx, idx)
        loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None]))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(grads[0], grads[1])


def loss_and_gradients(dtype: torch.dtype, *, compile: bool = False, **knobs: int) -> tuple[float, torch.Tensor]:
    state = build(tiny(**knobs), CPU, dtype, compile=compile)
    generator = torch.Generator().manual_seed(3)
    idx, targets = (torch.randint(low, 96, (4, 16), generator=generator) for low in (0, -1))
    with state.autocast():
        loss = state.call(idx, targets)
    loss.backward()
    assert float(evaluation_loss(state, (idx, targets))) == pytest.approx(float(loss.detach()), rel=1e-6)
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
def test_a_chunked_loss_is_that_of_pytorch(chunk: int) -> None:
    loss, gradients = loss_and_gradients(torch.float32)
    chunked, its_gradients = loss_and_gradients(torch.float32, loss_chunk_size=chunk)
    assert chunked == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(its_gradients, gradients, rtol=1e-4, atol=1e-7)


def test_chunked_loss_in_bf16_is_more_exact_than_pytorchs() -> None:
    """Its weight gradient is summed in fp32, and its logits' gradient is rounded before it is divided by N."""
    truth, exact = loss_and_gradients(torch.float32)
    plain, its_gradients = loss_and_gradients(torch.bfloat16)
    chunked, our_gradients = loss_and_gradients(torch.bfloat16, loss_chunk_size=16)
    assert chunked == pytest.approx(truth, rel=2e-3)
    assert chunked == pytest.approx(plain, rel=1e-4)
    assert (our_gradients - exact).norm() < (its_gradients - exact).norm() * 1.05


@pytest.mark.slow  # Inductor compiles C++
def test_a_compiled_chunked_loss_is_the_same() -> None:
    loss, gradients = loss_and_gradients(torch.float32, loss_chunk_size=24)
    compiled, its_gradients = loss_and_gradients(torch.float32, compile=True, loss_chunk_size=24)
    assert compiled == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(its_gradients, gradients, rtol=1e-4, atol=1e-7)


def test_a_chunked_loss_gives_its_gradients_once() -> None:
    state = build(tiny(loss_chunk_size=8), CPU, torch.float32, compile=False)
    idx = torch.randint(0, 96, (2, 16))
    loss = state.call(idx, idx)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        loss.backward()


def test_accumulation_carries_out_the_same_step() -> None:
    """One batch of 8, or 4 of 2: the same gradient up to rounding."""
    norms = []
    idx = torch.randint(0, 96, (8, 16))
    for accumulation in (1, 4):
        config = tiny(batch_size=8 // accumulation, gradient_accumulation_steps=accumulation)
        state = build(config, CPU, torch.float32, compile=False)
        parts = [(part, part) for part in idx.split(config.batch_size)]
        result = train_step(state, parts, 1e-3)
        norms.append((float(result.loss), float(result.grad_norm)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_optimizer_groups_are_nanogpts() -> None:
    model = GPT(tiny(bias=True))
    decayed, plain = make_optimizer(model, tiny(weight_decay=0.3), "cpu").param_groups
    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in plain["params"])
    assert sum(len(g["params"]) for g in (decayed, plain)) == len(list(model.parameters()))


def test_schedule() -> None:
    c = tiny(learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=14, max_iters=20)
    rates = [learning_rate(c, step) for step in range(20)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(0.55)  # half way down
    assert rates[14] == pytest.approx(0.1)
    assert set(rates[15:]) == {0.1}
    assert learning_rate(tiny(decay_lr=False, learning_rate=0.5), 10**6) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_learns(dtype: torch.dtype) -> None:
    """Also the GradScaler's path, which fp16 takes on a CPU too."""
    config = tiny(learning_rate=1e-2, decay_lr=False)
    state = build(config, CPU, dtype, compile=False)
    assert state.scaler.is_enabled() == (dtype == torch.float16)
    idx = torch.arange(17).repeat(4, 1)
    batch = (idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    losses = [float(train_step(state, [batch, batch], 1e-2).loss) for _ in range(12)]
    assert losses[-1] < losses[0] - 1.0
    assert all(p.dtype == torch.float32 for p in state.model.parameters())


def test_overflow_under_fp16_skips_the_update() -> None:
    state = build(tiny(), CPU, torch.float16, compile=False)
    before = [p.clone() for p in state.model.parameters()]
    scale = state.scaler.get_scale()
    state.call = lambda idx, targets: state.model(idx, targets) * float("inf")
    train_step(state, [(torch.zeros(1, 4, dtype=torch.long),) * 2], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert state.scaler.get_scale() < scale


def test_evaluation_moves_nothing() -> None:
    state = build(tiny(dropout=0.5), CPU, torch.float32, compile=False)
    rng = torch.get_rng_state()
    idx = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(0))
    first, second = evaluation_loss(state, (idx, idx)), evaluation_loss(state, (idx, idx))
    assert torch.equal(first, second)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in state.model.parameters())


def test_forward_equals_cross_entropy_of_its_logits() -> None:
    model = GPT(tiny()).eval()
    idx = torch.randint(0, 96, (2, 16))
    logits = model.lm_head(model.hidden(idx))
    assert torch.allclose(model(idx, idx), F.cross_entropy(logits.flatten(0, 1), idx.flatten()))
    assert torch.allclose(model.lm_head(model.hidden(idx)[:, -1]), logits[:, -1])

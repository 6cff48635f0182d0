"""Counts from the config against PyTorch's own model and its FLOP counter, and against nanoGPT's formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.model.gpt2 import GPT
from foretrain.model.language_model import make_model
from tests.kit.tiny import tiny


def nanogpt_count(c: RunConfig) -> int:
    """karpathy/nanoGPT model.py and transformer_sizing.ipynb, written out."""
    norm = c.n_embd * (2 if c.bias else 1)
    attention = c.n_embd * 3 * c.n_embd + c.n_embd * c.n_embd + (4 * c.n_embd if c.bias else 0)
    mlp = 2 * 4 * c.n_embd * c.n_embd + (5 * c.n_embd if c.bias else 0)
    return c.vocab_size * c.n_embd + c.n_layer * (2 * norm + attention + mlp) + norm


@pytest.mark.parametrize(("preset", "bias"), [*((preset, False) for preset in PRESETS), ("gpt2-124m", True)])
def test_parameter_counts_of_every_preset(preset: str, bias: bool) -> None:
    config = resolve([preset, f"--bias={bias}"]).config
    shape = ModelShape.of(config)
    assert config.recipe != "nanogpt" or shape.n_params_nanogpt == nanogpt_count(config)
    with torch.device("meta"):
        model = make_model(config)
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert own == {p.name: p.shape for p in shape.parameters()} or set(own) - {"lm_head.weight"} <= {
        p.name for p in shape.parameters()
    }
    assert sum(p.numel() for p in model.parameters()) == shape.n_params == sum(p.numel for p in shape.parameters())
    assert "lm_head.weight" in model.state_dict()


@pytest.mark.parametrize(
    ("words", "millions"),
    [  # the logged counts of the real cases
        (["gpt2-30m"], 29.94),
        (["gpt2-40m"], 40.56),
        (["gpt2-124m"], 123.59),
        (["gpt2-40m", "--n_embd=576"], 76.77),
    ],
)
def test_logged_parameter_counts(words: list[str], millions: float) -> None:
    assert f"{ModelShape.of(resolve(words).config).n_params_nanogpt / 1e6:.2f}" == f"{millions:.2f}"


def test_logged_optimizer_groups() -> None:
    """Case A: nanoGPT printed 26 decayed tensors with 30.13 M parameters."""
    tensors, parameters = ModelShape.of(resolve(["gpt2-30m"]).config).optimizer_groups()[True]
    assert tensors == 26
    assert f"{parameters / 1e6:.2f}" == "30.13"


@settings(max_examples=12)
@given(
    n_layer=st.integers(1, 3), n_head=st.sampled_from([1, 2, 4]), width=st.integers(1, 6), block=st.integers(2, 24),
    vocab=st.integers(2, 200), batch=st.integers(1, 3), bias=st.booleans(),
)  # fmt: skip
def test_matmul_flops_are_those_that_pytorch_counts(
    n_layer: int, n_head: int, width: int, block: int, vocab: int, batch: int, bias: bool
) -> None:
    """Exactly, with attention as plain matrix products: the counter knows no formula for the CPU's flash kernel."""
    config = tiny(
        n_layer=n_layer, n_head=n_head, n_embd=4 * n_head * width, block_size=block, vocab_size=vocab, bias=bias
    )
    model, shape = GPT(config), ModelShape.of(config)
    idx = torch.zeros(batch, block, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    attention = 12 * n_layer * shape.n_embd * block  # over the full square
    assert counter.get_total_flops() == (6 * shape.n_matmul_params + attention) * block * batch


def test_nanogpts_flops_per_token() -> None:
    shape = ModelShape.of(RunConfig())
    assert shape.flops_per_token == 6 * nanogpt_count(RunConfig()) + 12 * 12 * 12 * 64 * 1024
    assert shape.flops_per_token == pytest.approx(8.55e8, rel=1e-3)  # reference: GPT-2 124M, T 1024

"""nanochat's model: its maths against transformers', counts, forecasts, exact resume, and weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foretrain.advice.advisor import advise
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model.language_model import make_model
from foretrain.predict.plan import plan
from foretrain.training.exports.source import export
from tests.kit.families import (
    assert_a_run_resumes_exactly,
    assert_it_learns_and_samples,
    assert_operations_have_the_flops_that_pytorch_counts,
    assert_parameters_are_theirs,
    assert_the_estimate_is_near_the_trace,
    assert_the_maths_is_theirs,
    assert_weights_come_in_and_go_out,
    flops_in_matmuls,
    large,
    problems,
    started_from_a_run,
    theirs,
    tokens,
    why_not_started,
)
from tests.kit.tiny import tiny
from tests.kit.training import train

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64}


def small(**changes: Any) -> RunConfig:
    return tiny(**{"recipe": "nanochat", **SIZES, **changes})


# -- the maths -----------------------------------------------------------------------------------------------


def test_logits_loss_and_gradients_are_those_of_transformers() -> None:
    """The largest logits are over half of their cap."""
    config = small()
    torch.manual_seed(1)
    ours, others = large(make_model(config), by=0.15, head_by=0.4), theirs(config)
    others.load_state_dict(ours.state_dict())
    assert 7.5 < assert_the_maths_is_theirs(ours, others, config).abs().max() < 15


def test_the_first_loss_is_that_of_chance() -> None:
    config = small(vocab_size=500)
    loss = make_model(config)(tokens(config), tokens(config).flip(0))
    assert float(loss.detach()) == pytest.approx(torch.log(torch.tensor(500.0)).item(), abs=1e-5)


# -- counts --------------------------------------------------------------------------------------------------


def test_d20_has_the_published_parameters() -> None:
    config = resolve(["nanochat-d20"]).config
    assert PRESETS["nanochat-d20"]["recipe"] == config.recipe == "nanochat"
    assert config.tokens_per_step == 524_288
    assert (config.optimizer, config.muon_learning_rate, config.beta1) == ("muon", 0.02, 0.8)
    assert_parameters_are_theirs(config, 560_988_160)


def test_flops_are_those_that_pytorch_counts() -> None:
    config = small()
    shape = ModelShape.of(config)
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    assert shape.flops_per_token == flops_in_matmuls(config) == 6 * shape.n_matmul_params + attention


# -- forecasts -----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "n_layer": 2, "n_head": 6, "n_embd": 768, "vocab_size": 32_000, "block_size": 1024, "batch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("card", "dtype", "values"),
    [
        ("RTX 4070", "bfloat16", WIDE),
        ("Tesla T4", "float16", {**WIDE, "n_head": 8, "vocab_size": 4096}),
        ("RTX 4090", "bfloat16", {**WIDE, "activation_checkpointing": True, "optimizer": "muon"}),
        ("RTX 4070", "float32", WIDE),
    ],
)
def test_the_estimate_is_within_half_a_percent_of_the_trace(card: str, dtype: str, values: dict[str, Any]) -> None:
    """Uncompiled; a recorded compiled trace is in tests/data/compiled_traces.json."""
    assert_the_estimate_is_near_the_trace(small(**values, dtype=dtype), card)


@settings(max_examples=8)
@given(checkpointing=st.booleans(), half=st.booleans(), training=st.booleans())
def test_operations_have_the_flops_of_flop_counter_mode(checkpointing: bool, half: bool, training: bool) -> None:
    config = small(activation_checkpointing=checkpointing)
    dtype = "bfloat16" if half else "float32"
    assert_operations_have_the_flops_that_pytorch_counts(config, dtype, training=training)


def test_advice_keeps_to_what_the_recipe_can() -> None:
    """No chunked loss, though logits are most of what this needs."""
    config = small(**{**WIDE, "vocab_size": 65_536, "batch_size": 16})
    found = advise(plan(config, find("RTX 4070")), "foretrain", "fit")
    named = {setting.option for each in found.advised + found.partial for setting in each.settings}
    assert named
    assert not named & {"loss_chunk_size", "auto_chunker"}


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "activation_checkpointing": True}])
def test_runs_resume_exactly(changes: dict[str, Any]) -> None:
    assert_a_run_resumes_exactly(small(**changes))


def test_it_learns_and_samples() -> None:
    assert_it_learns_and_samples(small(max_iters=60, lr_decay_iters=60, activation_checkpointing=True))


# -- weights in and out --------------------------------------------------------------------------------------


def test_weights_of_transformers_come_in_and_go_out() -> None:
    config = small()
    brought, _ = assert_weights_come_in_and_go_out(config)
    for name in ("recipe", "n_layer", "n_head", "n_embd", "vocab_size"):
        assert getattr(brought, name) == getattr(config, name)


def test_a_run_is_a_start_for_another() -> None:
    config = started_from_a_run(small(max_iters=3))
    assert (config.recipe, config.n_head) == ("nanochat", 4)


def test_what_cannot_be_started_from_is_said() -> None:
    theirs(small()).save_pretrained("theirs")
    (found,) = problems(init_from="./theirs", recipe="llama")
    assert (found.id, found.values["own"]) == ("config.init_from_other_recipe", "nanochat")
    assert [p.id for p in problems(init_from="gpt2", recipe="nanochat")] == ["config.init_from_recipe"]
    path = Path("theirs/config.json")
    config = json.loads(path.read_text("utf-8"))
    for change, said in (
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2; only 4 is supported"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping = None; only 15.0"),
        ({"intermediate_size": 128}, "intermediate_size = 128; only 256"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"), ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta = 1000000.0; only 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "scales rotary positions"),
        ({"model_type": "llama"}, "model_type = llama, not nanochat"), ({"num_attention_heads": "4"}, "heads = 4"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 21}, "3 heads do not divide a width of 64"),
        ({"attention_bias": True}, "attention_bias = True"), ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ):  # fmt: skip
        path.write_text(json.dumps({**config, **change}), "utf-8")
        assert said in why_not_started()
    path.unlink()
    assert "config.json" in why_not_started()


def test_lacking_and_strange_tensors_are_said() -> None:
    theirs(small()).save_pretrained("theirs")
    file = "theirs/model.safetensors"
    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if name != "lm_head.weight"}, file)
    assert "it lacks lm_head.weight" in why_not_started()
    save_file({**weights, "model.norm.weight": torch.zeros(64)}, file)
    assert "it has model.norm.weight" in why_not_started()
    save_file({**weights, "model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 64)}, file)
    assert "k_proj.weight is 32 x 64 instead of 64 x 64" in why_not_started()
    save_file({**weights, "model.layers.2000000000.mlp.fc1.weight": torch.zeros(1)}, file)
    assert "it has model.layers.2000000000.mlp.fc1.weight" in why_not_started()


@pytest.mark.parametrize("recipe", ["nanochat", "llama"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_head": 0}, "n_head = 0, which is not possible"),
        ({"n_head": "many"}, "n_head = many, which is not possible"),
        ({"block_size": None}, "block_size = None, which is not possible"),
    ],
)
def test_a_config_beside_our_own_weights_that_cannot_be_is_said(recipe: str, change: dict[str, Any], said: str) -> None:
    train(small(recipe=recipe, out_dir="out", max_iters=1))
    export(Path("out"), "safetensors", Path("ours"))
    path = Path("ours/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), "utf-8")
    (found,) = problems(init_from="./ours")
    assert said in found.values["reason"]


# -- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "id"),
    [
        ({"loss_chunk_size": 64}, "nanochat_whole_loss"),
        ({"auto_chunker": True, "compile": True}, "nanochat_whole_loss"),
        ({"dropout": 0.1}, "recipe_without_dropout"), ({"bias": True}, "recipe_without_bias"),
        ({"n_embd": 60}, "recipe_odd_heads"), ({"recompute_norm_gelu": True}, "recipe_recomputes"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(values: dict[str, Any], id: str) -> None:
    assert [p.id for p in problems(**{"recipe": "nanochat", **SIZES, **values})] == [f"config.{id}"]


def test_options_of_llama_do_nothing_here_and_are_said() -> None:
    notes = {note.values["key"] for note in resolve(["nanochat-d20", "--n_kv_head=2", "--rope_theta=1e6"]).notes}
    assert notes == {"n_kv_head", "rope_theta"}

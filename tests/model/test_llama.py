"""The Llama family: its maths against transformers', counts, forecasts, exact resume, and weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foretrain.advice.rules.base import State
from foretrain.advice.rules.others import narrower
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_values, resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model import llama
from foretrain.model.language_model import make_model
from foretrain.predict.abstract import step
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.memory import RunMemory, predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, micro_batch
from foretrain.reports.views import plan as plan_view
from foretrain.training.starting import config_digest
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
    loaded,
    problems,
    started_from_a_run,
    theirs,
    tokens,
    why_not_started,
)
from tests.kit.tiny import tiny

QWEN3 = {"qk_norm": True, "n_kv_head": 2, "head_dim": 32, "tied_embeddings": True, "rope_theta": 1e6, "norm_eps": 1e-6}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {}, "grouped": {"n_kv_head": 2}, "one head of keys, tied": {"n_kv_head": 1, "tied_embeddings": True},
    "Qwen3": QWEN3,
}  # fmt: skip
SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "mlp_width": 96}


def small(**changes: Any) -> RunConfig:
    return tiny(**{"recipe": "llama", **SIZES, **changes})


# -- the maths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_those_of_transformers(kind: str) -> None:
    config = small(**KINDS[kind])
    torch.manual_seed(1)
    ours, others = large(make_model(config)), theirs(config)
    assert others.load_state_dict(ours.state_dict(), strict=False).unexpected_keys == []
    assert assert_the_maths_is_theirs(ours, others, config).std() > 0.3


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_copied_heads_of_keys_are_the_same_attention(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cards without FlashAttention take them, and fp32."""
    model, idx = large(make_model(config := small(n_kv_head=kv_heads))), tokens(small())
    expected = model(idx, idx)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(llama, "takes_groups", lambda q: False)
    found = model(idx, idx)
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
    assert config.kv_heads == kv_heads


def test_the_first_loss_is_about_that_of_chance() -> None:
    config = small(vocab_size=500)
    idx = tokens(config)
    loss = make_model(config)(idx, tokens(config).flip(0))
    assert float(loss.detach()) == pytest.approx(torch.log(torch.tensor(500.0)).item(), rel=0.02)


# -- counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "published"),
    [("smollm2-135m", 134_515_008), ("qwen3-0.6b", 596_049_920), ("tinyllama-1.1b", 1_100_048_384),
     ("llama-3.2-1b", 1_235_814_400), ("llama-124m", 123_587_328)],
)  # fmt: skip
def test_presets_have_the_published_parameters(preset: str, published: int) -> None:
    config = resolve([preset]).config
    assert PRESETS[preset]["recipe"] == config.recipe == "llama"
    assert_parameters_are_theirs(config, published)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_pytorch_counts(kind: str) -> None:
    config = small(**KINDS[kind])
    shape = ModelShape.of(config)
    attention = 12 * config.n_layer * config.n_head * config.head_width * config.block_size
    assert flops_in_matmuls(config) == 6 * shape.n_matmul_params + attention
    # MFU's formula counts the weights of norms, too, as nanoGPT's does.
    norms = shape.n_params_nanogpt - shape.n_matmul_params
    assert shape.flops_per_token == 6 * (shape.n_matmul_params + norms) + attention
    assert 0 < norms < 0.02 * shape.n_params
    assert shape.causal_flops_per_token == shape.flops_per_token - attention // 2
    block = (shape.n_matmul_params - config.vocab_size * config.n_embd) // config.n_layer
    assert shape.block_forward_flops_per_token == 2 * block + attention // 3 // config.n_layer


# -- forecasts -----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "n_layer": 2, "n_head": 12, "n_embd": 768, "n_kv_head": 4, "mlp_width": 0, "vocab_size": 32_000,
    "block_size": 1024, "batch_size": 4,
}  # fmt: skip
QWEN3_WIDE: dict[str, Any] = {
    **QWEN3, "n_layer": 2, "n_head": 16, "n_kv_head": 8, "head_dim": 128, "n_embd": 1024, "mlp_width": 3072,
    "vocab_size": 50_000, "block_size": 1024, "batch_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("card", "dtype", "values"),
    [
        ("RTX 4070", "bfloat16", WIDE),
        ("Tesla T4", "float16", QWEN3_WIDE),
        ("RTX 4090", "bfloat16", {**QWEN3_WIDE, "activation_checkpointing": True, "loss_chunk_size": 512}),
        ("RTX 4070", "float32", {**WIDE, "n_kv_head": 1, "tied_embeddings": True}),
    ],
)
def test_the_estimate_is_within_half_a_percent_of_the_trace(card: str, dtype: str, values: dict[str, Any]) -> None:
    assert_the_estimate_is_near_the_trace(small(**values, dtype=dtype), card)


def formulas(memory: RunMemory) -> str:
    return " + ".join(row.formula for row in memory.phase("first_step").components)


def test_formulas_have_the_familys_letters() -> None:
    found = formulas(predict(StepSpec.of(small(**WIDE), find("RTX 4070"), dtype="bfloat16", compiled=False)))
    assert "2·B·T·F" in found
    assert "2·B·T·K·D" in found
    assert "2·B·T·C" in found  # all heads of queries are as wide as the model
    wider = small(**QWEN3_WIDE)
    found = formulas(predict(StepSpec.of(wider, find("RTX 4070"), dtype="bfloat16", compiled=False)))
    assert "2·B·T·H·D" in found


@settings(max_examples=10)
@given(
    kv_heads=st.sampled_from([1, 2, 4]), wide=st.booleans(), qk_norm=st.booleans(), tied=st.booleans(),
    checkpointing=st.booleans(), half=st.booleans(), training=st.booleans(),
)  # fmt: skip
def test_operations_have_the_flops_of_flop_counter_mode(
    kv_heads: int, wide: bool, qk_norm: bool, tied: bool, checkpointing: bool, half: bool, training: bool
) -> None:
    config = small(
        n_kv_head=kv_heads, head_dim=32 if wide else 0, qk_norm=qk_norm, tied_embeddings=tied,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    dtype = "bfloat16" if half else "float32"
    assert_operations_have_the_flops_that_pytorch_counts(config, dtype, training=training)


def test_its_kernels_do_not_hang_on_what_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that copy heads of keys run other kernels than those that do not."""
    config = small(**WIDE)
    found = []
    for card in ("Tesla T4", "RTX 4070"):
        for kept in ("_recorders", "_structures", "_launches", "_alike"):
            monkeypatch.setattr(step, kept, {})
        SimulatedRun(StepSpec.of(config, find(card), dtype="float16", compiled=False)).peaks()
        found.append(micro_batch(MicroBatchRun(StepSpec.of(config, find("RTX 4070"), dtype="float16", compiled=False))))
    assert found[0] == found[1]


def test_nanogpts_own_step_is_not_shown() -> None:
    """It is of another model."""
    found = plan(small(), find("RTX 4070"))
    assert [memory.step for memory in found.memories] == ["foretrain"]
    assert "step.nanogpt" not in repr(plan_view.document(found))


def test_a_plan_says_what_it_does_not_know() -> None:
    found = plan(small(compile=True), find("RTX 4070"))
    ids = {note.id for note in found.notes}
    family = family_of(found.config)
    assert ("time_of_recipe_unknown" in ids) == (found.timing is None) == (not family.is_timed(compiled=True))
    assert found.work.flops == ModelShape.of(found.config).flops_per_token * found.work.tokens


def test_advice_keeps_to_the_recipes_rules() -> None:
    """Fewer heads are a number that the heads of keys divide."""
    state = State(small(n_head=12, n_embd=768, n_kv_head=4), find("RTX 4070"), "foretrain", 0)
    assert [change.options["n_head"] for change in narrower(state)] == [8, 4]


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"n_kv_head": 2, "optimizer": "muon"}, QWEN3])
def test_runs_resume_exactly(changes: dict[str, Any]) -> None:
    assert_a_run_resumes_exactly(small(**changes))


def test_its_options_take_no_part_in_resuming_other_recipes() -> None:
    """A run of before this recipe was there goes on; one of this recipe does not with another architecture."""
    plain = tiny()
    assert config_digest(plain) == config_digest(plain.model_copy(update={"n_kv_head": 1, "qk_norm": True}))
    own = small()
    for changed in ({"n_kv_head": 1}, {"qk_norm": True}, {"rope_theta": 5e5}, {"tied_embeddings": True}):
        assert config_digest(own) != config_digest(own.model_copy(update=changed)), changed


def test_it_learns_and_samples() -> None:
    more: dict[str, Any] = {"n_kv_head": 1, "activation_checkpointing": True, "loss_chunk_size": 20}
    assert_it_learns_and_samples(small(max_iters=60, lr_decay_iters=60, **more))


# -- weights in and out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_transformers_come_in_and_go_out(kind: str) -> None:
    config = small(**KINDS[kind])
    brought, back = assert_weights_come_in_and_go_out(config)
    shaping = ("n_layer", "n_head", "n_embd", "vocab_size", "qk_norm", "tied_embeddings", "rope_theta", "norm_eps")
    assert [getattr(brought, name) for name in shaping] == [getattr(config, name) for name in shaping]
    assert (brought.recipe, brought.kv_heads, brought.mlp_inner) == ("llama", config.kv_heads, 96)
    assert back.kv_heads == config.kv_heads


def test_more_rows_of_the_vocabulary_are_the_mean_row() -> None:
    theirs(small()).save_pretrained("theirs")
    _, model = loaded("./theirs", vocab_size=100)
    weights = load_file("theirs/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        grown = dict(model.named_parameters())[name]
        assert torch.equal(grown[:96], weights[name])
        assert torch.allclose(grown[96:], weights[name].mean(0).expand(4, -1))


def test_the_context_is_the_configs_own_up_to_the_models() -> None:
    theirs(small(), max_position_embeddings=2048).save_pretrained("theirs")
    assert from_values({"init_from": "./theirs"}).config.block_size == 1024
    assert from_values({"init_from": "./theirs", "block_size": 2048}).config.block_size == 2048
    assert [p.id for p in problems(init_from="./theirs", block_size=4096)] == ["config.init_from_beyond"]


def test_what_cannot_be_started_from_is_said() -> None:
    theirs(small(n_kv_head=2)).save_pretrained("theirs")
    assert [p.id for p in problems(init_from="./theirs", recipe="modern")] == ["config.init_from_recipe"]
    (found,) = problems(init_from="./theirs", recipe="nanogpt")
    assert (found.id, found.values["own"]) == ("config.init_from_other_recipe", "llama")
    assert [p.id for p in problems(init_from="gpt2", recipe="llama")] == ["config.init_from_recipe"]
    assert {p.values["key"] for p in problems(init_from="./theirs", n_kv_head=1, mlp_width=64)} == {
        "n_kv_head", "mlp_width",
    }  # fmt: skip
    path = Path("theirs/config.json")
    config = json.loads(path.read_text("utf-8"))
    for change, said in (
        ({"model_type": "mistral"}, "model_type = mistral"), ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "scales rotary positions (llama3)"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "(linear)"),
        ({"num_attention_heads": "4"}, "num_attention_heads = 4"), ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "k_proj.weight is 32 x 64 instead of 64 x 64"),
    ):  # fmt: skip
        path.write_text(json.dumps({**config, **change}), "utf-8")
        assert said in why_not_started()
    path.unlink()
    assert "config.json" in why_not_started()


def test_lacking_and_strange_tensors_are_said() -> None:
    theirs(small()).save_pretrained("theirs")
    file = "theirs/model.safetensors"
    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if name != "model.norm.weight"}, file)
    assert "it lacks model.norm.weight" in why_not_started()
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file)
    assert "q_proj.bias" in why_not_started()


def test_a_run_is_a_start_for_another() -> None:
    config = started_from_a_run(small(n_kv_head=2, max_iters=3))
    assert (config.recipe, config.kv_heads, config.mlp_width) == ("llama", 2, 96)


# -- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "id"),
    [
        ({"n_kv_head": 3}, "llama_groups"), ({"n_kv_head": 8}, "llama_groups"), ({"head_dim": 33}, "llama_odd_heads"),
        ({"n_embd": 60}, "llama_odd_heads"), ({"dropout": 0.1}, "recipe_without_dropout"),
        ({"bias": True}, "recipe_without_bias"), ({"recompute_norm_gelu": True}, "recipe_recomputes"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(values: dict[str, Any], id: str) -> None:
    assert [p.id for p in problems(**{"recipe": "llama", **SIZES, **values})] == [f"config.{id}"]


def test_its_options_do_nothing_elsewhere_and_are_said() -> None:
    notes = {note.values["key"] for note in resolve(["baby", "--n_kv_head=2", "--qk_norm"]).notes}
    assert notes == {"n_kv_head", "qk_norm"}
    assert resolve(["baby", "--recipe=llama", "--n_kv_head=2"]).notes == ()


def test_sizes_that_are_not_given_follow_from_others() -> None:
    config = RunConfig(recipe="llama", n_embd=2048, n_head=32)
    assert (config.kv_heads, config.head_width, config.mlp_inner) == (32, 64, 5632)
    assert RunConfig(recipe="llama", n_embd=4096, n_head=32).mlp_inner == 11_008  # Llama 2 7B

"""The Llama family: its maths against transformers', counts, forecasts, exact resume, and weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from foretrain.advice.rules.base import State
from foretrain.advice.rules.others import narrower
from foretrain.base.errors import ConfigError
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_values, resolve
from foretrain.hardware.catalogue import find
from foretrain.model import llama
from foretrain.model.generate import generate
from foretrain.model.language_model import make_model
from foretrain.model.shape import ModelShape
from foretrain.model.step import build
from foretrain.predict.abstract import step
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.memory import StepMemory, predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import Way, flops
from foretrain.predict.speed.step_ops import micro_batch
from foretrain.predict.trace.forecast import traced
from foretrain.reports.views import plan as plan_view
from foretrain.training import starting
from foretrain.training.export import export
from foretrain.training.starting import config_digest
from tests.kit.operations import counted, way
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import assert_same, final_tensors, train

QWEN3 = {"qk_norm": True, "n_kv_head": 2, "head_dim": 32, "tied_embeddings": True, "rope_theta": 1e6, "norm_eps": 1e-6}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {}, "grouped": {"n_kv_head": 2}, "one head of keys, tied": {"n_kv_head": 1, "tied_embeddings": True},
    "Qwen3": QWEN3,
}  # fmt: skip
SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "mlp_width": 96}


def small(**changes: Any) -> RunConfig:
    return tiny(**{"recipe": "llama", **SIZES, **changes})


def tokens(config: RunConfig, rows: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randint(0, config.vocab_size, (rows, config.block_size), generator=random)


def large(model: torch.nn.Module) -> Any:
    """The model with weights large enough to show every difference."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def theirs(config: RunConfig, **changes: Any) -> Any:
    """transformers' model of a config, with weights of its own."""
    transformers = pytest.importorskip("transformers")
    values = family_of(config).write_config(config, None)
    made = getattr(transformers, values["architectures"][0])
    values = {key: value for key, value in values.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(3)
    return large(made(made.config_class(**{**values, **changes})))


# -- the maths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_those_of_transformers(kind: str) -> None:
    config = small(**KINDS[kind])
    torch.manual_seed(1)
    ours, others = large(make_model(config)), theirs(config)
    assert others.load_state_dict(ours.state_dict(), strict=False).unexpected_keys == []
    idx = tokens(config)
    targets = torch.cat([idx[:, 1:], torch.full((len(idx), 1), -1)], 1)
    expected, loss = others(idx, labels=idx), ours(idx, targets)
    found = ours.lm_head(ours.hidden(idx))
    assert found.std() > 0.3
    assert (found - expected.logits).abs().max() < 1e-5
    assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in others.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5), name


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
    assert ModelShape.of(config).n_params == published
    with torch.device("meta"):
        own, others = make_model(config), theirs(config)
    assert sum(p.numel() for p in others.parameters()) == published
    shapes = {name: tuple(p.shape) for name, p in own.named_parameters()}
    assert shapes == {p.name: p.shape for p in ModelShape.of(config).parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in others.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_pytorch_counts(kind: str) -> None:
    """Exactly, with attention as plain matmuls: the counter knows no formula for the CPU's flash kernel."""
    config = small(**KINDS[kind])
    model, shape, idx = make_model(config), ModelShape.of(config), tokens(small())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    attention = 12 * config.n_layer * config.n_head * config.head_width * config.block_size
    assert counter.get_total_flops() == (6 * shape.n_matmul_params + attention) * idx.numel()
    # MFU's formula counts the weights of norms, too, as nanoGPT's does.
    norms = shape.n_params_nanogpt - shape.n_matmul_params
    assert shape.flops_per_token == 6 * (shape.n_matmul_params + norms) + attention
    assert 0 < norms < 0.02 * shape.n_params
    assert shape.causal_flops_per_token == shape.flops_per_token - attention // 2
    block = (shape.n_matmul_params - config.vocab_size * config.n_embd) // config.n_layer
    assert shape.block_forward_flops_per_token == 2 * block + attention // 3 // config.n_layer


# -- forecasts -----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "n_layer": 3, "n_head": 12, "n_embd": 768, "n_kv_head": 4, "mlp_width": 0, "vocab_size": 32_000,
    "block_size": 1024, "batch_size": 4,
}  # fmt: skip
QWEN3_WIDE: dict[str, Any] = {
    **QWEN3, "n_layer": 3, "n_head": 16, "n_kv_head": 8, "head_dim": 128, "n_embd": 1024, "mlp_width": 3072,
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
    estimated = plan(small(**values, dtype=dtype), find(card))
    found = traced(estimated)
    assert found.exact, found.notes
    expected, ours = found.memory[0], estimated.memory[0]
    assert expected.source == "traced"
    assert ours.saved_bytes == pytest.approx(expected.saved_bytes, rel=1e-4)
    for phase in expected.phases:
        if phase.phase != "resume":
            assert ours.phase(phase.phase).allocated_bytes == pytest.approx(phase.allocated_bytes, rel=5e-3), (
                phase.phase
            )


def formulas(memory: StepMemory) -> str:
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
    measured = counted(config, getattr(torch, dtype), train=training)
    for compiled in (False, True):
        found = flops(micro_batch(way(config, dtype, train=training, compiled=compiled)))
        assert found == pytest.approx(measured, rel=1e-3)


def test_its_kernels_do_not_hang_on_what_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that copy heads of keys run other kernels than those that do not."""
    config = small(**WIDE)
    found = []
    for card in ("Tesla T4", "RTX 4070"):
        for kept in ("_recorders", "_structures", "_launches", "_alike"):
            monkeypatch.setattr(step, kept, {})
        SimulatedRun(StepSpec.of(config, find(card), dtype="float16", compiled=False)).peaks()
        found.append(micro_batch(Way(StepSpec.of(config, find("RTX 4070"), dtype="float16", compiled=False))))
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
    assert [change.knobs["n_head"] for change in narrower(state)] == [8, 4]


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"n_kv_head": 2, "optimizer": "muon"}, QWEN3])
def test_runs_resume_exactly(changes: dict[str, Any], own_directory: Path) -> None:
    """Twelve steps, or seven and then the rest."""
    train(small(out_dir="whole", **changes))
    train(small(out_dir="parts", max_iters=7, **changes))
    record = train(small(out_dir="parts", **changes), resume=True)
    assert record.resumed_from == (7,)
    assert_same(final_tensors(Path("whole")), final_tensors(Path("parts")))


def test_its_options_take_no_part_in_resuming_other_recipes() -> None:
    """A run of before this recipe was there goes on; one of this recipe does not with another architecture."""
    plain = tiny()
    assert config_digest(plain) == config_digest(plain.model_copy(update={"n_kv_head": 1, "qk_norm": True}))
    own = small()
    for changed in ({"n_kv_head": 1}, {"qk_norm": True}, {"rope_theta": 5e5}, {"tied_embeddings": True}):
        assert config_digest(own) != config_digest(own.model_copy(update=changed)), changed


def test_it_learns_and_samples(own_directory: Path) -> None:
    train(small(max_iters=60, lr_decay_iters=60, n_kv_head=1, activation_checkpointing=True, loss_chunk_size=20))
    config, model = loaded(export(Path("out"), "safetensors").path)
    made = list(generate(model, [1, 2, 3], 6, temperature=0, top_k=0, seed=0, vocab_size=config.vocab_size))
    assert all(0 < b - a <= 3 for a, b in zip([3, *made], made, strict=False))


# -- weights in and out --------------------------------------------------------------------------------------


def loaded(init_from: str, **values: Any) -> tuple[Any, Any]:
    """(config, model) of a run that starts from these weights, before its first step."""
    unsaid = {key: value for key, value in TINY.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = from_values({**unsaid, "init_from": init_from, **values}).config
    state = build(config, torch.device("cpu"), torch.float32, compile=False)
    found = starting.find(init_from)
    assert found
    starting.put(found, state, Path())
    return config, state.model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_transformers_come_in_and_go_out(kind: str, own_directory: Path) -> None:
    """Both ways: their folder trains here, and what is exported is theirs again, with the same logits."""
    transformers = pytest.importorskip("transformers")
    config = small(**KINDS[kind])
    others, idx = theirs(config), tokens(config)
    others.save_pretrained("theirs")
    expected = others(idx).logits
    brought, model = loaded("./theirs")
    shaping = ("n_layer", "n_head", "n_embd", "vocab_size", "qk_norm", "tied_embeddings", "rope_theta", "norm_eps")
    assert [getattr(brought, name) for name in shaping] == [getattr(config, name) for name in shaping]
    assert (brought.recipe, brought.kv_heads, brought.mlp_inner) == ("llama", config.kv_heads, 96)
    assert (model.lm_head(model.hidden(idx)) - expected).abs().max() < 1e-5
    train(brought.model_copy(update={"max_iters": 1, "eval_interval": 1, "out_dir": "out"}))
    said = export(Path("out"), "hf", Path("ours"))
    again = transformers.AutoModelForCausalLM.from_pretrained("ours").eval()
    assert type(again) is type(others)
    assert said.notes in ((), ("no_tokenizer",))
    weights = final_tensors(Path("out"))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[f"model/{name}"]), name
    back, model = loaded("./ours")
    assert back.kv_heads == config.kv_heads
    assert (model.lm_head(model.hidden(idx)) - again(idx).logits).abs().max() < 1e-5


def test_more_rows_of_the_vocabulary_are_the_mean_row(own_directory: Path) -> None:
    theirs(small()).save_pretrained("theirs")
    _, model = loaded("./theirs", vocab_size=100)
    weights = load_file("theirs/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        grown = dict(model.named_parameters())[name]
        assert torch.equal(grown[:96], weights[name])
        assert torch.allclose(grown[96:], weights[name].mean(0).expand(4, -1))


def test_the_context_is_the_configs_own_up_to_the_models(own_directory: Path) -> None:
    theirs(small(), max_position_embeddings=2048).save_pretrained("theirs")
    assert from_values({"init_from": "./theirs"}).config.block_size == 1024
    assert from_values({"init_from": "./theirs", "block_size": 2048}).config.block_size == 2048
    assert [p.id for p in problems(init_from="./theirs", block_size=4096)] == ["config.init_from_beyond"]


def problems(**values: Any) -> Any:
    with pytest.raises(ConfigError) as error:
        from_values(values)
    return error.value.problems


def test_what_cannot_be_started_from_is_said(own_directory: Path) -> None:
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
        (found,) = problems(init_from="./theirs")
        assert found.id == "config.init_from_unusable"
        assert said in found.values["reason"]
    path.unlink()
    (found,) = problems(init_from="./theirs")
    assert "config.json" in found.values["reason"]


def test_lacking_and_strange_tensors_are_said(own_directory: Path) -> None:
    theirs(small()).save_pretrained("theirs")
    file = "theirs/model.safetensors"
    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if name != "model.norm.weight"}, file)
    (found,) = problems(init_from="./theirs")
    assert "it lacks model.norm.weight" in found.values["reason"]
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file)
    (found,) = problems(init_from="./theirs")
    assert "q_proj.bias" in found.values["reason"]


def test_a_run_is_a_start_for_another(own_directory: Path) -> None:
    write_dataset(Path("data/toy"))
    train(small(n_kv_head=2, max_iters=3))
    config, model = loaded("./out")
    assert (config.recipe, config.kv_heads, config.mlp_width) == ("llama", 2, 96)
    assert_same(
        {f"model/{name}": p.detach() for name, p in model.named_parameters()},
        {name: t for name, t in final_tensors(Path("out")).items() if name.startswith("model/")},
    )


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

"""nanochat's model: its maths against transformers', counts, forecasts, exact resume, and weights in and out."""

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

from foretrain.advice.advisor import advise
from foretrain.base.errors import ConfigError
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_values, resolve
from foretrain.hardware.catalogue import find
from foretrain.model.generate import generate
from foretrain.model.language_model import make_model
from foretrain.model.shape import ModelShape
from foretrain.model.step import build
from foretrain.predict.plan import plan
from foretrain.predict.speed.ops import flops
from foretrain.predict.speed.step_ops import micro_batch
from foretrain.predict.trace.forecast import traced
from foretrain.training import starting
from foretrain.training.export import export
from tests.kit.operations import counted, way
from tests.kit.tiny import TINY, tiny
from tests.kit.training import assert_same, final_tensors, train

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64}


def small(**changes: Any) -> RunConfig:
    return tiny(**{"recipe": "nanochat", **SIZES, **changes})


def tokens(config: RunConfig, rows: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randint(0, config.vocab_size, (rows, config.block_size), generator=random)


def large(model: torch.nn.Module) -> Any:
    """The model with weights large enough to show every difference; the largest logits are over half of their cap."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.4 if "lm_head" in name else 0.15))
    return model.eval()


def theirs(config: RunConfig, **changes: Any) -> Any:
    """transformers' model of a config, with weights of its own."""
    transformers = pytest.importorskip("transformers")
    values = family_of(config).write_config(config, None)
    values = {key: value for key, value in values.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(3)
    return large(transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**{**values, **changes})))


# -- the maths -----------------------------------------------------------------------------------------------


def test_logits_loss_and_gradients_are_those_of_transformers() -> None:
    config = small()
    torch.manual_seed(1)
    ours, others = large(make_model(config)), theirs(config)
    others.load_state_dict(ours.state_dict())
    idx = tokens(config)
    targets = torch.cat([idx[:, 1:], torch.full((len(idx), 1), -1)], 1)
    expected, loss = others(idx, labels=idx), ours(idx, targets)
    found = ours.lm_head(ours.hidden(idx))
    assert 7.5 < found.abs().max() < 15
    assert (found - expected.logits).abs().max() < 1e-5
    assert (ours.next_logits(idx) - expected.logits[:, -1]).abs().max() < 1e-5
    assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in others.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, name
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5), name


def test_the_first_loss_is_that_of_chance() -> None:
    config = small(vocab_size=500)
    loss = make_model(config)(tokens(config), tokens(config).flip(0))
    assert float(loss.detach()) == pytest.approx(torch.log(torch.tensor(500.0)).item(), abs=1e-5)


# -- counts --------------------------------------------------------------------------------------------------


def test_d20_has_the_published_parameters() -> None:
    config = resolve(["nanochat-d20"]).config
    assert PRESETS["nanochat-d20"]["recipe"] == config.recipe == "nanochat"
    assert ModelShape.of(config).n_params == 560_988_160
    assert config.tokens_per_step == 524_288
    assert (config.optimizer, config.muon_learning_rate, config.beta1) == ("muon", 0.02, 0.8)
    with torch.device("meta"):
        own, others = make_model(config), theirs(config)
    shapes = {name: tuple(p.shape) for name, p in own.named_parameters()}
    assert shapes == {p.name: p.shape for p in ModelShape.of(config).parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in others.named_parameters()}


def test_flops_are_those_that_pytorch_counts() -> None:
    """Exactly, with attention as plain matmuls: the counter knows no formula for the CPU's flash kernel."""
    config = small()
    model, shape, idx = make_model(config), ModelShape.of(config), tokens(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    assert counter.get_total_flops() == (6 * shape.n_matmul_params + attention) * idx.numel()
    assert shape.flops_per_token == 6 * shape.n_matmul_params + attention


# -- forecasts -----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "n_layer": 3, "n_head": 6, "n_embd": 768, "vocab_size": 32_000, "block_size": 1024, "batch_size": 4,
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
    estimated = plan(small(**values, dtype=dtype), find(card))
    found = traced(estimated)
    assert found.exact, found.notes
    expected, ours = found.memory[0], estimated.memory[0]
    assert expected.source == "traced"
    assert ours.saved_bytes == pytest.approx(expected.saved_bytes, rel=1e-4)
    for phase in expected.phases:
        if phase.phase != "resume":
            predicted = ours.phase(phase.phase).allocated_bytes
            assert predicted == pytest.approx(phase.allocated_bytes, rel=5e-3), phase.phase


@settings(max_examples=8)
@given(checkpointing=st.booleans(), half=st.booleans(), training=st.booleans())
def test_operations_have_the_flops_of_flop_counter_mode(checkpointing: bool, half: bool, training: bool) -> None:
    config = small(activation_checkpointing=checkpointing)
    dtype = "bfloat16" if half else "float32"
    measured = counted(config, getattr(torch, dtype), train=training)
    for compiled in (False, True):
        found = flops(micro_batch(way(config, dtype, train=training, compiled=compiled)))
        assert found == pytest.approx(measured, rel=1e-3)


def test_advice_keeps_to_what_the_recipe_can() -> None:
    """No chunked loss, though logits are most of what this needs."""
    config = small(**{**WIDE, "vocab_size": 65_536, "batch_size": 16})
    found = advise(plan(config, find("RTX 4070")), "foretrain", "fit")
    named = {setting.option for each in found.advised + found.partial for setting in each.settings}
    assert named
    assert not named & {"loss_chunk_size", "auto_chunker"}


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "activation_checkpointing": True}])
def test_runs_resume_exactly(changes: dict[str, Any], own_directory: Path) -> None:
    """Twelve steps, or seven and then the rest."""
    train(small(out_dir="whole", **changes))
    train(small(out_dir="parts", max_iters=7, **changes))
    record = train(small(out_dir="parts", **changes), resume=True)
    assert record.resumed_from == (7,)
    assert_same(final_tensors(Path("whole")), final_tensors(Path("parts")))


def test_it_learns_and_samples(own_directory: Path) -> None:
    train(small(max_iters=60, lr_decay_iters=60, activation_checkpointing=True))
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


def test_weights_of_transformers_come_in_and_go_out(own_directory: Path) -> None:
    """Both ways: their folder trains here, and what is exported is theirs again, with the same logits."""
    transformers = pytest.importorskip("transformers")
    config = small()
    others, idx = theirs(config), tokens(config)
    others.save_pretrained("theirs")
    expected = others(idx).logits
    brought, model = loaded("./theirs")
    for name in ("recipe", "n_layer", "n_head", "n_embd", "vocab_size"):
        assert getattr(brought, name) == getattr(config, name)
    assert (model.lm_head(model.hidden(idx)) - expected).abs().max() < 1e-5
    train(brought.model_copy(update={"max_iters": 1, "eval_interval": 1, "out_dir": "out"}))
    export(Path("out"), "hf", Path("ours"))
    again = transformers.AutoModelForCausalLM.from_pretrained("ours").eval()
    assert type(again) is type(others)
    weights = final_tensors(Path("out"))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[f"model/{name}"]), name
    _, model = loaded("./ours")
    assert (model.lm_head(model.hidden(idx)) - again(idx).logits).abs().max() < 1e-5


def test_a_run_is_a_start_for_another(own_directory: Path) -> None:
    train(small(max_iters=3))
    config, model = loaded("./out")
    assert (config.recipe, config.n_head) == ("nanochat", 4)
    assert_same(
        {f"model/{name}": p.detach() for name, p in model.named_parameters()},
        {name: t for name, t in final_tensors(Path("out")).items() if name.startswith("model/")},
    )


def problems(**values: Any) -> Any:
    with pytest.raises(ConfigError) as error:
        from_values(values)
    return error.value.problems


def test_what_cannot_be_started_from_is_said(own_directory: Path) -> None:
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
    save_file({name: t for name, t in weights.items() if name != "lm_head.weight"}, file)
    (found,) = problems(init_from="./theirs")
    assert "it lacks lm_head.weight" in found.values["reason"]
    save_file({**weights, "model.norm.weight": torch.zeros(64)}, file)
    (found,) = problems(init_from="./theirs")
    assert "it has model.norm.weight" in found.values["reason"]
    save_file({**weights, "model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 64)}, file)
    (found,) = problems(init_from="./theirs")
    assert "k_proj.weight is 32 x 64 instead of 64 x 64" in found.values["reason"]
    save_file({**weights, "model.layers.2000000000.mlp.fc1.weight": torch.zeros(1)}, file)
    (found,) = problems(init_from="./theirs")
    assert "it has model.layers.2000000000.mlp.fc1.weight" in found.values["reason"]


@pytest.mark.parametrize("recipe", ["nanochat", "llama"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_head": 0}, "n_head = 0, which is not possible"),
        ({"n_head": "many"}, "n_head = many, which is not possible"),
        ({"block_size": None}, "block_size = None, which is not possible"),
    ],
)
def test_a_config_beside_our_own_weights_that_cannot_be_is_said(
    recipe: str, change: dict[str, Any], said: str, own_directory: Path
) -> None:
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

"""config.json read as data: every family's parameters against the model that transformers builds, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.families import FAMILIES
from foretrain.config.hub.parameters import parameter_count, parameters_of
from foretrain.config.hub.source import MAX_BYTES, config_of, facts_of, read_config
from tests.kit.command import refused
from tests.kit.hub import named_shapes, transformers_config

_SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32}
_NEOX = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
_MIXTURE: dict[str, Any] = {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip

# (model_type, what its config.json says beside the small sizes)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", _SMALL),
    ("llama", {**_SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    ("mistral", _SMALL),
    ("mistral", {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"} | {"num_attention_heads": 8}),
    ("qwen2", _SMALL),
    ("qwen2", {**_SMALL, "tie_word_embeddings": True}),
    ("qwen3", _SMALL),
    ("qwen3", {**_SMALL, "head_dim": 24, "attention_bias": True}),
    ("gemma", _SMALL),
    ("gemma2", {**_SMALL, "head_dim": 16}),
    ("gemma3_text", _SMALL),
    ("gemma3", {"text_config": {**_SMALL, "model_type": "gemma3_text"}, "vision_config": _TOWER}),
    ("smollm3", _SMALL),
    ("smollm3", {**_SMALL, "tie_word_embeddings": False, "attention_bias": True}),
    ("gpt_neox", _NEOX),
    ("gpt_neox", {**_NEOX, "attention_bias": False, "tie_word_embeddings": True}),
    ("phi", _SMALL),
    ("phi3", _SMALL),
    ("gpt2", _GPT2),
    ("gpt2", {**_GPT2, "n_inner": 80, "tie_word_embeddings": False}),
    ("gpt_bigcode", _GPT2),
    ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    ("olmo", _SMALL),
    ("olmo2", _SMALL),
    ("olmo3", _SMALL),
    ("stablelm", _SMALL),
    ("stablelm", {**_SMALL, "use_qkv_bias": True, "use_parallel_residual": True}),
    ("starcoder2", _SMALL),
    ("starcoder2", {**_SMALL, "use_bias": False}),
    ("granite", _SMALL),
    ("mixtral", {**_SMALL, "num_local_experts": 4}),
    ("qwen3_moe", _MIXTURE),
    ("qwen3_moe", {**_MIXTURE, "mlp_only_layers": [0]}),
    ("qwen3_moe", {**_MIXTURE, "decoder_sparse_step": 2}),
    ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 48}),
    ("olmoe", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    ("olmoe", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    ("falcon", _NEOX),
    ("falcon", {**_NEOX, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("arcee", _SMALL),
    ("arcee", {**_SMALL, "attention_bias": True, "mlp_bias": True}),
    ("seed_oss", _SMALL),
    ("seed_oss", {**_SMALL, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("glm", _SMALL),
    ("glm4", {**_SMALL, "attention_bias": False}),
    ("helium", {**_SMALL, "head_dim": 16}),
    ("helium", {**_SMALL, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("ernie4_5", _SMALL),
    ("ernie4_5", {**_SMALL, "use_bias": True, "tie_word_embeddings": False}),
    ("hunyuan_v1_dense", {**_SMALL, "head_dim": 16}),
    ("exaone4", _SMALL),
    ("ministral3", _SMALL),
]  # fmt: skip


def facts(config: dict[str, Any]) -> ModelFacts:
    found = facts_of(config)
    assert found
    return found


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_parameters_are_those_of_transformers(number: int) -> None:
    name, own = CASES[number]
    config = {"model_type": name, **own}
    found = parameters_of(facts(config))
    assert [(each.name, each.shape) for each in found] == named_shapes(config)


def test_every_family_is_compared() -> None:
    assert {name for name, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_roles_are_the_modules_that_peft_gives_an_adapter(number: int) -> None:
    """ "all-linear" of peft: every nn.Linear and Conv1D but the head."""
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
    from transformers import AutoModelForCausalLM

    name, own = CASES[number]
    config = {"model_type": name, **own}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    wanted = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear"), model).target_modules
    assert isinstance(wanted, set)
    found = {each.module for each in parameters_of(facts(config)) if each.role == "linear"}
    named = {
        module
        for module, _ in model.named_modules()
        if module in wanted or module.endswith(tuple(f".{each}" for each in wanted))
    }
    assert found == named
    assert {each.layer for each in parameters_of(facts(config))} == {None, 0, 1, 2}


def defaults(config: Any) -> dict[str, Any]:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return {"max_positions": config.max_position_embeddings, "sliding": [each == "sliding_attention" for each in types]}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "smollm3"])
@pytest.mark.parametrize("used", [False, True])
def test_windows_by_layer_are_those_of_transformers(name: str, used: bool) -> None:
    config = {"model_type": name, **_SMALL, "num_hidden_layers": 31, "use_sliding_window": used, "sliding_window": 512,
              "max_window_layers": 28}  # fmt: skip
    found, theirs = facts(config), defaults(transformers_config(config))
    layers = tuple(layer for layer, each in enumerate(theirs["sliding"]) if each)
    assert found.sliding_layers == layers
    assert found.sliding_window == (512 if layers else 0)


@pytest.mark.parametrize("name", ["mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"])
@pytest.mark.parametrize("own", [{}, {"sliding_window": None}, {"sliding_window": 100, "use_sliding_window": True}])
def test_a_window_of_all_layers_is_that_of_transformers(name: str, own: dict[str, Any]) -> None:
    config = {"model_type": name, **_SMALL, **own}
    window = transformers_config(config).sliding_window or 0
    found = facts(config)
    assert (found.sliding_window, len(found.sliding_layers)) == (window, 3 if window else 0)


@pytest.mark.parametrize("name", ["gpt_neox", "phi", "stablelm", "phi3"])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"partial_rotary_factor": 0.75, "rotary_pct": 0.75},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_what_is_rotated_is_that_of_transformers(name: str, own: dict[str, Any]) -> None:
    config = {"model_type": name, **(_NEOX if name == "gpt_neox" else _SMALL), **own}
    theirs = transformers_config({**config, **json.loads(json.dumps(own))}).rope_parameters["partial_rotary_factor"]
    assert (facts(config).rotary_dim or 16) == int(16 * theirs)


def test_layers_without_rotary_are_those_of_transformers() -> None:
    for own in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 1, 0]}):
        config = {"model_type": "smollm3", **_SMALL, "num_hidden_layers": 9, **own}
        rotated = transformers_config(config).no_rope_layers
        assert facts(config).layers_without_rotary == tuple(n for n, each in enumerate(rotated) if not each)


def test_dropout_that_gpt2_does_not_name_is_a_tenth() -> None:
    found, theirs = facts({"model_type": "gpt2", **_GPT2}), transformers_config({"model_type": "gpt2", **_GPT2})
    assert (found.embedding_dropout, found.attention_dropout, found.residual_dropout) == (
        theirs.embd_pdrop, theirs.attn_pdrop, theirs.resid_pdrop,
    ) == (0.1, 0.1, 0.1)  # fmt: skip


def saved_for_backward(module: Any) -> int:
    import torch

    saved: list[int] = []

    def pack(each: Any) -> Any:
        saved.append(each.data_ptr())
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        module(torch.randn(8, requires_grad=True))
    return len({*saved})


def test_activations_are_named_as_they_are_computed() -> None:
    """gelu_new and gelu_fast are several kernels in transformers, gelu_pytorch_tanh is one."""
    from transformers.activations import ACT2FN

    ours = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_new",
        "gelu_fast": "gelu_fast",
    }
    kept = {}
    for theirs, name in ours.items():
        assert facts({"model_type": "llama", **_SMALL, "hidden_act": theirs}).activation == name
        kept[name] = saved_for_backward(ACT2FN[theirs])
    assert kept["silu"] == kept["gelu"] == kept["gelu_tanh"] == 1
    assert kept["gelu_new"] > 3
    assert kept["gelu_fast"] > 3


def test_dtype_and_quantization_are_of_the_published_weights() -> None:
    assert facts({"model_type": "llama", **_SMALL}).dtype == "float32"
    assert facts({"model_type": "llama", **_SMALL, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert facts({"model_type": "llama", **_SMALL, "dtype": "torch.float16"}).dtype == "float16"
    four_bit = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert facts({"model_type": "llama", **_SMALL, "quantization_config": four_bit}).quantization == "bitsandbytes"


@pytest.mark.parametrize("config", [
    {"model_type": "mamba", "hidden_size": 768},
    {"model_type": "gpt_oss", **_SMALL},
    {"model_type": "llama", **_SMALL, "hidden_act": "quick_gelu"},
    {"model_type": "qwen2", **_SMALL, "use_sliding_window": True, "layer_types": ["linear_attention"] * 3},
    {"model_type": "olmo", **_SMALL, "clip_qkv": 8.0},
    {"model_type": "phi", **_SMALL, "qk_layernorm": True},
    {"model_type": "falcon", **_NEOX, "alibi": True},
])  # fmt: skip
def test_a_part_without_facts_gives_none(config: dict[str, Any]) -> None:
    assert facts_of(config) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": -64}, "hidden_size = -64"),
    ({"hidden_size": "64"}, 'hidden_size = "64"'),
    ({"hidden_size": 64.5}, "hidden_size = 64.5"),
    ({"hidden_size": True}, "hidden_size = true"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**300}, "300 digits"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": [128]}, "vocab_size = [128]"),
    ({"num_attention_heads": 5}, "5 heads"),
    ({"num_key_value_heads": 3}, "3 heads"),
    ({"max_position_embeddings": {"a": 1}}, "max_position_embeddings"),
    ({"attention_dropout": 2}, "attention_dropout = 2"),
    ({"attention_dropout": float("nan")}, "attention_dropout"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"hidden_act": 7}, "hidden_act = 7"),
    ({"model_type": None}, "model_type"),
    ({"model_type": 5}, "model_type"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [7]}, "mlp_only_layers"),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3"),
    ({"model_type": "gemma3", "text_config": 4}, "text_config"),
    ({"quantization_config": 4}, "quantization_config"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_sizes_that_no_model_has_are_one_sentence(number: int) -> None:
    changed, named = BAD[number]
    with pytest.raises(UserError) as error:
        facts_of({"model_type": "llama", **_SMALL, **changed}, "model/config.json")
    said = str(error.value)
    assert error.value.exit_code is ExitCode.USAGE
    assert "model/config.json" in said
    assert named in said
    assert "\n" not in said
    assert len(said) < 300


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", "\x00\x01"])
def test_what_is_not_a_config_is_one_sentence(text: str) -> None:
    with refused(code=ExitCode.USAGE) as error:
        config_of(text, "config.json")
    assert "\n" not in str(error.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.json", tmp_path / "binary.json"
    large.write_text('{"a": "' + "x" * MAX_BYTES + '"}')
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (large, binary, tmp_path / "missing.json", tmp_path):
        with refused(code=ExitCode.USAGE) as error:
            read_config(path)
        assert path.name in str(error.value)


def test_parameter_count_is_the_sum() -> None:
    found = facts({"model_type": "gemma3_text", **_SMALL})
    assert parameter_count(found) == sum(each.elements for each in parameters_of(found))

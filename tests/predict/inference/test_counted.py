"""`plan --inference` of models without an estimate: parameters and caches against transformers' own classes."""

from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.base.units import GIB
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.parameters import counts_of, parameter_count
from foretrain.config.inference import Inference
from foretrain.predict.inference.counted import facts_to_generate
from foretrain.predict.inference.shares import check_shares, shares_of
from foretrain.predict.inference.speed import cache_bytes
from foretrain.predict.inference.stored import bits_of

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**SIZES, **EXPERTS, "sliding_window": 16},
    "qwen3_next": {
        **SIZES, **EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mamba2": {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16,
               "vocab_size": 320, "n_groups": 1},
}  # fmt: skip


def source_of(model_type: str) -> ModelSource:
    return ModelSource(name="x", where="x", config={"model_type": model_type, **MODELS[model_type]}, facts=None)


def cached(facts: ModelFacts, context: int) -> int:
    (share,) = shares_of(facts, 1, "", "pytorch")
    return cache_bytes(facts, Inference(context=context, kv="bf16"), share)


@pytest.mark.parametrize("model_type", MODELS)
def test_counts_are_those_of_the_real_class(model_type: str) -> None:
    """The cache after a text of 600 tokens, in bf16; a sliding layer of transformers' keeps one token less."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    facts, length = facts_to_generate(source_of(model_type)), 600
    assert parameter_count(facts) == sum(p.numel() for p in model.parameters())
    assert (facts.n_expert, facts.experts_per_token) == ((0, 0) if model_type == "mamba2" else (8, 2))
    with torch.no_grad():
        found = model(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=True)
    cache = next(value for value in found.values() if hasattr(value, "layers"))
    parts = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    names = ("conv_states", "recurrent_states")
    states = [state for layer in cache.layers for name in names for state in getattr(layer, name, {}).values()]
    kept = sum(part.nbytes for part in [*parts, *states] if part is not None)
    kept += len(facts.sliding_layers) * 2 * 2 * 16 * 2
    assert cached(facts, length) == kept
    assert cached(facts, 2 * length) == kept if model_type == "mamba2" else cached(facts, 2 * length) > kept


GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
    "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201_088, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip


def test_gpt_oss_20b_is_as_large_as_its_files() -> None:
    """llama-bench prints 11.27 GiB and 20.91 B of its GGUF; its model card says 12.8 GiB of the checkpoint."""
    pytest.importorskip("transformers")
    facts = facts_to_generate(ModelSource(name="x", where="x", config=GPT_OSS_20B, facts=None))
    counts = counts_of(facts)
    assert (facts.published, round(counts.total / 1e9, 2)) == ("mxfp4", 20.91)
    for weights, size_gib in (("mxfp4_moe", 11.27), ("mxfp4", 12.8)):
        stored = sum(count * bits for count, bits in zip(counts, bits_of(facts, weights), strict=True)) / 8
        assert stored / GIB == pytest.approx(size_gib, abs=0.03), weights


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "t5"}, "no decoder"),
    ({"model_type": "gpt_oss", "auto_map": {"AutoConfig": "x.Y"}}, "never run"),
])  # fmt: skip
def test_what_cannot_be_counted_is_refused(config: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=says):
        facts_to_generate(ModelSource(name="x", where="x", config=config, facts=None))


def test_matrices_of_a_counted_model_are_not_divided() -> None:
    pytest.importorskip("transformers")
    facts = facts_to_generate(source_of("gpt_oss"))
    with pytest.raises(UserError, match="--split tensor"):
        check_shares(facts, Inference(world=2, split="tensor"), "pytorch")

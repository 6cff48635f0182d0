"""Small models of each family, and their estimates against traces of transformers' own Trainer."""

from typing import Any

import pytest
import transformers

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import facts_of
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import FineTuneEstimate
from foretrain.predict.trace.finetune import drive
from foretrain.predict.trace.finetune.request import FineTuneRequest, answered
from tests.kit.finetune import source_of

COMMON = {"vocab_size": 1024, "max_position_embeddings": 512, "rope_theta": 10_000.0, "pad_token_id": 0}
LLAMA = {**COMMON, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-6}  # fmt: skip
PLAIN = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
PLAIN |= {"intermediate_size": 1024, "layer_norm_eps": 1e-5}
GPT2 = {"vocab_size": 1024, "n_positions": 512, "n_embd": 256, "n_layer": 6, "n_head": 8}
GEMMA = {
    **LLAMA,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, **LLAMA},
    "mistral": {"model_type": "mistral", "sliding_window": None, **LLAMA},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0, 1, 1], "tie_word_embeddings": True, **LLAMA},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 512, **GEMMA},
    "gemma3, short window": {"model_type": "gemma3_text", "sliding_window": 64, **GEMMA},
    "phi3": {"model_type": "phi3", **LLAMA},
    "olmo2": {"model_type": "olmo2", **LLAMA},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.25, **PLAIN},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5, **PLAIN},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "multi_query": True, **GPT2},
    "arcee": {"model_type": "arcee", **LLAMA},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32, **LLAMA},
    "glm": {"model_type": "glm", "head_dim": 32, **LLAMA},
    "glm4": {"model_type": "glm4", "head_dim": 32, **LLAMA},
    "helium": {"model_type": "helium", "head_dim": 32, **LLAMA},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 32, **LLAMA},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 32, **LLAMA},
    "exaone4": {"model_type": "exaone4", "sliding_window": 64, **LLAMA},
    "ministral3": {"model_type": "ministral3", "head_dim": 32, **LLAMA},
}  # fmt: skip
NARROW = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
CONFIGS |= {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **LLAMA},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 128, "norm_topk_prob": True, **LLAMA},
    "qwen3_moe, dense layers": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 128, "mlp_only_layers": [0, 3], **LLAMA},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                  "shared_expert_intermediate_size": 256, **LLAMA},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128, **NARROW},
}  # fmt: skip
CARD = "RTX 4090"


def built_config(name: str) -> dict[str, Any]:
    return built_config_of(CONFIGS[name])


def built_config_of(given: dict[str, Any]) -> dict[str, Any]:
    config = dict(given)
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config).to_dict()


def agree_in_all_phases(config: dict[str, Any], *, only: tuple[str, ...] = (), **options: Any) -> None:
    """From loading to merging, or in these phases `only`, with drive.py's loop of transformers, peft, bitsandbytes and
    TRL: 0.3% where the model runs, 0.5% where it does not."""
    tune = FineTune.model_validate({"dtype": "bfloat16", "batch_size": 2, "seq_len": 256, **EVALUATED, **options})
    found_facts, gpu = facts_of(config), find_gpu(CARD)
    assert found_facts is not None
    found = {p.phase: p.allocated_bytes for p in FineTuneEstimate(found_facts, tune, gpu).memory.phases}
    asked = FineTuneRequest(source_of(config), tune, gpu)
    trace = answered([asked.whole(drive.trace(asked.job()))], tune, gpu, None)
    expected = {p.phase: p.allocated_bytes for p in trace.memory.phases}
    if not tune.adapters and not tune.references:
        expected.pop("prepare", None)  # nothing is done in it
    assert found.keys() == expected.keys()
    for phase, nbytes in expected.items():
        if only and phase not in only:
            continue
        runs = phase in ("first_step", "steady_step", "evaluate")
        assert found[phase] == pytest.approx(nbytes, rel=0.003 if runs else 0.005), (config, options, phase)


EVALUATED = {"evaluate": True, "eval_batch_size": 2, "eval_batches": 2, "merge": True}

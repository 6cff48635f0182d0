"""Models without an estimate: their real code is traced by itself, and gives memory, counts, FLOPs and time."""

from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.finetune.plan import FineTunePlan, plan, replanned
from foretrain.predict.trace.finetune.request import FineTuneRequest
from tests.kit.command import foretrain
from tests.kit.finetune import small, source_of

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow

GPU = find("RTX 4090")
APERTUS = {
    "model_type": "apertus", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "dtype": "bfloat16",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def planned(config: dict[str, Any], **options: Any) -> FineTunePlan:
    tune = FineTune.model_validate({"seq_len": 64, "batch_size": 2, "lora_r": 8, **options})
    return plan(source_of(config), tune, GPU)


def built(config: dict[str, Any]) -> Any:
    import torch

    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(**config)
        return transformers.AutoModelForCausalLM.from_config(made)


def test_unknown_model_is_planned_from_its_real_code() -> None:
    found = planned(APERTUS, method="full")
    assert found.facts is None
    assert found.memory.source == "traced"
    assert found.verdict == "fits"
    assert found.counts.n_params == found.counts.n_trained == built(APERTUS).num_parameters()
    assert found.tune.dtype == "bfloat16"
    assert {note.id for note in found.notes} >= {"family_traced"}


def test_trace_alone_needs_what_the_estimate_needs() -> None:
    """A family with an estimate, once with its facts and once without: FLOPs are equal, bytes and seconds near."""
    from foretrain.config.hub.source import facts_of

    config = small("qwen3-0.6b", num_hidden_layers=2)
    several = {"world": 2, "link": "pcie3x4", "method": "full"}
    for options in (
        {"method": "lora"}, {"method": "full", "gradient_checkpointing": True, "grad_accum": 2}, several,
        {**several, "strategy": "fsdp", "grad_accum": 2},
    ):  # fmt: skip
        traced = planned(config, **options)
        tune = FineTune.model_validate({"seq_len": 64, "batch_size": 2, "lora_r": 8, **options})
        known = plan(source_of(config).model_copy(update={"facts": facts_of(config)}), tune, GPU)
        assert traced.counts == known.counts
        assert traced.timing.flops_per_step == known.timing.flops_per_step
        assert traced.timing.hardware_flops_per_step == known.timing.hardware_flops_per_step
        assert traced.memory.worst.allocated_bytes == pytest.approx(known.memory.worst.allocated_bytes, rel=0.01)
        assert traced.timing.step_s.expected_s == pytest.approx(known.timing.step_s.expected_s, rel=0.1)


def test_change_of_an_unknown_model_is_traced_again() -> None:
    found = planned(APERTUS, method="lora")
    larger = replanned(found, batch_size=4)
    assert larger.needed_bytes > found.needed_bytes
    assert larger.timing.flops_per_step == 2 * (found.timing.flops_per_step or 0)


MIXED = {  # of two kinds of layers in turn
    **APERTUS, "model_type": "gpt_oss", "num_hidden_layers": 20, "num_local_experts": 4, "num_experts_per_tok": 2,
    "head_dim": 32, "sliding_window": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({**APERTUS, "num_hidden_layers": 14}, {"method": "lora", "gradient_checkpointing": True, "evaluate": True}),
        ({**APERTUS, "num_hidden_layers": 14}, {"method": "full", "amp": "bf16", "grad_accum": 3}),
        (MIXED, {"method": "lora"}),
    ],
)
def test_trace_of_few_layers_is_that_of_all(config: dict[str, Any], options: dict[str, Any]) -> None:
    from foretrain.predict.trace.finetune import drive

    tune = FineTune.model_validate({"seq_len": 64, "batch_size": 2, "lora_r": 8, **options})
    job = FineTuneRequest(source_of(config), tune, GPU).job()
    tune = FineTune.model_validate(job["tune"])
    with drive.quiet():
        few, whole = drive.trace_few_layers(job, tune), drive.trace_whole(job, tune)
    for trace in (few, whole):
        trace.facts["work"] = sorted(map(str, trace.facts["work"]))
    assert few.to_json() == whole.to_json()


def test_layers_that_peft_refuses_are_said_in_its_words() -> None:
    mamba = {
        "model_type": "mamba2", "vocab_size": 512, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16,
        "n_groups": 1, "num_hidden_layers": 2, "dtype": "bfloat16",
    }  # fmt: skip
    with pytest.raises(UserError) as caught:
        planned(mamba, method="lora")
    assert "peft raised ValueError" in str(caught.value)
    assert "--lora-targets" in str(caught.value)


def test_option_that_needs_an_estimate_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        planned(APERTUS, method="lora", unsloth=True)
    assert caught.value.id == "usage.family_alone"
    assert caught.value.values["option"] == "--unsloth"


def test_unknown_model_on_several_cards_is_traced_as_one_of_them() -> None:
    one, ddp, fsdp = (
        planned(APERTUS, method="full", **each) for each in ({}, {"world": 2}, {"world": 2, "strategy": "fsdp"})
    )
    assert fsdp.memory.worst.bytes_of("weights") == pytest.approx(one.memory.worst.bytes_of("weights") / 2, rel=0.01)
    assert ddp.memory.worst.bytes_of("buckets") == pytest.approx(2 * one.counts.n_trained, rel=0.01)
    assert ddp.timing.step_s.expected_s > one.timing.step_s.expected_s
    with pytest.raises(UserError, match="DeepSpeed"):
        planned(APERTUS, method="full", world=2, strategy="zero1")


def test_model_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        planned({**APERTUS, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, method="lora")
    assert caught.value.id == "usage.family_unknown"
    assert "never run" in str(caught.value)


def test_weights_in_mxfp4_are_trained_in_16_bits() -> None:
    found = planned({**APERTUS, "quantization_config": {"quant_method": "mxfp4"}}, method="lora")
    assert "family_dequantized" in {note.id for note in found.notes}
    assert found.needed_bytes == planned(APERTUS, method="lora").needed_bytes


def test_first_screen_says_that_it_was_traced(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(APERTUS))
    said = foretrain("plan", str(tmp_path), "--method", "lora", "--seq-len", "64", "--gpu", "4090", code=0).stdout
    assert "memory traced, time estimated" in said
    assert "a step" in said

"""The head of a fine-tuning run with an adapter, and names of modules that a model has not.

Compared with a trace of transformers' Trainer with peft.
"""

import json
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import text_source
from foretrain.hardware.catalogue import catalogue
from foretrain.predict.finetune.plan import FineTunePlan, plan
from foretrain.predict.finetune.traced import exact_finetune
from tests.kit.finetune import small

TIED, APART = "smollm2-135m", "mistral-7b-v0.1"
HEAD = {"lora_targets": "q_proj,lm_head"}
WAYS: list[dict[str, Any]] = [
    HEAD, {**HEAD, "method": "qlora"}, {**HEAD, "method": "dora"},
    {**HEAD, "gradient_checkpointing": True, "lora_dropout": 0.1, "amp": "bf16"},
    {"lora_targets": "lm_head", "optim": "adamw_torch", "amp": "bf16"},
]  # fmt: skip


def planned(name: str, **options: Any) -> FineTunePlan:
    tune = FineTune.model_validate({"method": "lora", "seq_len": 64, "batch_size": 1, **options})
    config = small(name, vocab_size=4096)
    return plan(text_source(json.dumps(config), "config.json", name), tune, catalogue()["RTX 4090"])


def agree(name: str, options: dict[str, Any]) -> None:
    """Each phase within 0.3%."""
    found = planned(name, **options)
    source = text_source(json.dumps(small(name, vocab_size=4096)), "config.json", name)
    traced = exact_finetune(source, found.tune, found.gpu, found.available_bytes, lambda state: None, None).memory
    for ours, theirs in zip(found.memory.phases, traced.phases, strict=True):
        assert ours.phase == theirs.phase
        assert ours.allocated_bytes == pytest.approx(theirs.allocated_bytes, rel=0.003), (ours.phase, options)


def test_an_adapter_on_the_head_is_planned() -> None:
    agree(TIED, HEAD)
    r, wide = 16, small(TIED)["hidden_size"]
    base = planned(TIED, lora_targets="q_proj").counts.n_trained
    assert planned(TIED, **HEAD).counts.n_trained - base == r * (wide + 4096)
    assert planned(TIED, lora_targets="all-linear").counts.n_trained == planned(TIED).counts.n_trained


@pytest.mark.slow
@pytest.mark.parametrize("name", [TIED, APART])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_an_adapter_on_the_head_agrees_with_the_trace(options: dict[str, Any], name: str) -> None:
    agree(name, options)


@pytest.mark.parametrize(("options", "id"), [
    ({"lora_targets": "q_proj,embed_tokens"}, "lora_embedding"), ({**HEAD, "loop": "trl"}, "lora_head"),
    ({**HEAD, "liger": True}, "lora_head"), ({"lora_targets": "foo"}, "lora_targets_own"),
    ({"lora_targets": "dense,c_proj"}, "lora_targets_own"), ({"lora_targets": "all-linear,lm_head"}, "lora_all_alone"),
    ({"lora_saved": "q_proj"}, "lora_saved_layer"), ({**HEAD, "lora_targets": "lm_head", "lora_saved": "lm_head"}, "lora_targets_own"),
    ({"method": "full", "dtype": "float16", "amp": "fp16"}, "fp16_weights"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], id: str) -> None:
    with pytest.raises(UserError) as refused:
        planned(TIED, **options)
    assert refused.value.id == f"usage.{id}"


def test_unsloth_trains_a_head_whole_that_shall_get_an_adapter() -> None:
    asked, whole = (
        planned(TIED, unsloth=True, **o) for o in (HEAD, {"lora_targets": "q_proj", "lora_saved": "lm_head"})
    )
    assert asked.memory == whole.memory


def test_a_misspelt_module_is_told_from_those_of_the_model() -> None:
    with pytest.raises(UserError, match=r"called q_porj; .* q_proj\."):
        planned(TIED, lora_targets="q_porj")
    with pytest.raises(UserError, match=r"m0, m1, m2, m3, m4, m5, m6, m7, …"):
        planned(TIED, lora_targets=",".join(f"m{i}" for i in range(300)))


def test_names_that_no_module_has_are_said() -> None:
    for options in ({"lora_targets": "q_proj,foo"}, {"lora_saved": "foo"}):
        notes = {note.id: note.values for note in planned(TIED, **options).notes}
        assert notes["finetune_no_modules"]["names"] == "foo"
    assert "finetune_no_modules" not in {note.id for note in planned(TIED, lora_saved="model.norm,lm_head").notes}

"""The work of a fine-tuning step: its FLOPs against what PyTorch counts in transformers' and peft's own models."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.read import facts_of
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops
from tests.kit.finetune import small

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# peft asks for names that transformers 5.23 calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
BATCH, TOKENS = 2, 64


def counted(config: dict[str, Any], tune: FineTune) -> int:
    """FLOPs of a forward and a backward pass of the real model, as FlopCounterMode counts them."""
    made = transformers.AutoConfig.for_model(**{**config, "use_cache": False, "attn_implementation": "eager"})
    model = transformers.AutoModelForCausalLM.from_config(made)
    if tune.adapters:
        options = {"r": tune.lora_r, "target_modules": tune.lora_targets.split(",")}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    if tune.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": tune.reentrant})
    model.train()
    ids = torch.zeros((BATCH, TOKENS), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


LORA = {"method": "lora", "lora_r": 8, "lora_targets": "q_proj,v_proj,down_proj"}
AGAIN = {"gradient_checkpointing": True}
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "full, checkpointing": AGAIN, "full, reentrant": {**AGAIN, "reentrant": True},
    "lora": LORA, "lora, checkpointing": {**LORA, **AGAIN}, "lora, reentrant": {**LORA, **AGAIN, "reentrant": True},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_flops_are_those_that_pytorch_counts(name: str, way: str) -> None:
    config = small(name)
    tune = FineTune.model_validate(
        {"dtype": "float32", "batch_size": BATCH, "seq_len": TOKENS, "attn": "eager", **WAYS[way]}
    )
    facts = facts_of(config)
    assert facts is not None
    assert flops(StepWork(facts, tune, find_gpu("RTX 4090")).micro) == counted(config, tune)

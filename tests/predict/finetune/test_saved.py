"""Modules that are trained whole beside adapters: peft keeps the original and trains a copy."""

from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import facts_of
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import FineTuneEstimate
from foretrain.predict.finetune.targets import saved_notes

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
import torch
import transformers

from tests.kit.finetune_traces import CARD, CONFIGS, agree_in_all_phases, built_config_of

# peft asks for a name that transformers 5.23 calls old, and warns where embedding and head part.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]
SAVED = ("lm_head", "embed_tokens", "embed_tokens,lm_head")


def small(name: str) -> dict[str, Any]:
    """A large vocabulary and few layers, so that head and embedding decide."""
    return built_config_of({**CONFIGS[name], "vocab_size": 8192})


def test_a_copy_and_its_original_are_there() -> None:
    """One weight, which head and embedding share, becomes three."""
    agree_in_all_phases(small("llama tied"), method="lora", seq_len=64, lora_saved="embed_tokens,lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("saved", [*SAVED, "norm", "wte"])
@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen3", "gemma3", "gpt2", "gpt_neox", "phi"])
def test_each_family_agrees_with_its_trace(name: str, saved: str) -> None:
    agree_in_all_phases(small(name), method="lora", seq_len=64, lora_saved=saved)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["trainer", "trl"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_beside_4_bits_it_agrees_too(name: str, saved: str, loop: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("trl")
    options = {"method": "qlora", "amp": "bf16", "seq_len": 64, "loop": loop}
    agree_in_all_phases(small(name), lora_saved=saved, **options)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", ["llama tied", "gpt2", "phi"])
def test_parameters_are_those_that_peft_counts(name: str, saved: str) -> None:
    config = built_config_of(CONFIGS[name])
    own = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(own)
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=saved.split(","),
            fan_in_fan_out=name == "gpt2",
        )  # fmt: skip
        trained, params = peft.get_peft_model(model, lora).get_nb_trainable_parameters()
    found, tune = facts_of(config), FineTune(method="lora", lora_r=8, lora_saved=saved, dtype="bfloat16")
    assert found is not None
    ledger = FineTuneEstimate(found, tune, find_gpu(CARD))
    assert (ledger.n_trained, ledger.n_params) == (trained, params)


def test_a_name_of_another_family_is_said() -> None:
    """peft passes over it without a word."""
    found = facts_of(built_config_of(CONFIGS["gpt2"]))
    assert found is not None
    tune = FineTune(method="lora", lora_saved="embed_tokens,lm_head")
    [note] = saved_notes(found, tune)
    assert note.values == {"names": "embed_tokens", "model": "gpt2", "own": "wte, lm_head"}
    assert not saved_notes(found, tune.model_copy(update={"lora_saved": "wte,lm_head,ln_f"}))
    assert not saved_notes(found, tune.model_copy(update={"method": "full"}))

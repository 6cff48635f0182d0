"""LoRA over weights in 8 bits (LLM.int8): what is stored is counted, outliers are not, so figures are a bound."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.app.finetune import plan_question, question
from foretrain.base.errors import UserError
from foretrain.predict.finetune.plan import FineTunePlan
from tests.kit.command import foretrain

LAYERS, WIDTH, MLP, TOKENS = 4, 256, 1024, 1024
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}  # fmt: skip
WORDS = ("--method=lora", "--load-in-8bit", "--lora-r=8", "--batch-size=1", f"--seq-len={TOKENS}", "--amp=bf16")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def planned(model: str, *words: str) -> FineTunePlan:
    return plan_question(question(model, [*WORDS, *words]), "RTX 4090")


def weights_bytes(plan: FineTunePlan, phase: str) -> int:
    found = next(each for each in plan.memory.phases if each.phase == phase)
    return sum(part.size_bytes for part in found.components if part.id == "weights")


def test_the_weights_are_those_of_bitsandbytes(model: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers, peft = pytest.importorskip("transformers", minversion="5"), pytest.importorskip("peft")
    quantized = transformers.BitsAndBytesConfig(load_in_8bit=True)
    config = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "saved")
    real = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", quantization_config=quantized, dtype="bfloat16", device_map={"": "cpu"}
    )
    real = peft.prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    stored = sum(p.numel() * p.element_size() for p in real.parameters())
    stored += sum(part.weight.SCB.nbytes for part in real.modules() if getattr(part, "weight", None) is not None
                  and getattr(part.weight, "SCB", None) is not None)  # fmt: skip
    rounded = weights_bytes(planned(model, "--loop=trainer"), "prepare")  # each tensor to 512 bytes
    assert 0 <= rounded - stored < 512 * len(list(real.parameters())) * 2


def test_what_checkpoints_do_not_free_is_counted(model: str) -> None:
    """MatMul8bitLt holds its input in its context, where only the older way to checkpoint reaches. A block's are two
    norms' outputs in fp32, the attention's in 16 bits, and the MLP's in the dtype of its input."""
    held, freed = (planned(model, f"--reentrant={word}").memory.phase("steady_step") for word in ("false", "true"))
    of_block = TOKENS * (2 * 4 * WIDTH + 2 * WIDTH + 4 * MLP)
    assert held.allocated_bytes - freed.allocated_bytes == LAYERS * of_block


def test_it_is_a_bound_without_a_time(model: str) -> None:
    plan = planned(model)
    assert (plan.bound, plan.verdict, plan.timing) == ("at_least", None, None)
    assert plan.bounded_by == ("outliers of load_in_8bit",)
    assert planned("llama-3.3-70b").verdict == "does_not_fit"
    said = foretrain("plan", model, *WORDS, "--gpu", "4090").stdout
    assert "Needs at least" in said
    assert "in 8 bits" in " ".join(said.split())
    assert foretrain("plan", model, *WORDS, "--gpu", "4090", "--check").returncode == 2


def test_a_search_for_the_largest_names_the_8_bits(model: str) -> None:
    said = foretrain("plan", model, *WORDS, "--gpu", "4090", "--largest", "batch_size").stderr
    assert "outliers of load_in_8bit" in said
    assert "--training" not in said


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_without_adapters_over_16_bits_it_is_refused(method: str, model: str) -> None:
    with pytest.raises(UserError) as refused:
        question(model, [f"--method={method}", "--load-in-8bit"])
    assert refused.value.id.startswith("usage.finetune_idle")


@pytest.mark.parametrize(("name", "text"), [
    ("a.yml", "base_model: {model}\nadapter: lora\nload_in_8bit: true\nmicro_batch_size: 1\nsequence_len: 256\n"),
    ("b.yaml", "model_name_or_path: {model}\nfinetuning_type: lora\nquantization_bit: 8\ncutoff_len: 256\n"),
    ("c.yaml", "model_name_or_path: {model}\nuse_peft: true\nload_in_8bit: true\nmax_length: 256\ndataset_name: x\n"),
])  # fmt: skip
def test_files_that_load_in_8_bits(name: str, text: str, tmp_path: Path, model: str) -> None:
    (tmp_path / name).write_text(text.format(model=model))
    plan = plan_question(question(str(tmp_path / name)), "RTX 4090")
    assert (plan.tune.method, plan.tune.load_in_8bit, plan.bound) == ("lora", True, "at_least")
    assert plan.bounded_by == ("outliers of load_in_8bit",)

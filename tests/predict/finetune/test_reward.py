"""Plans of TRL's RewardTrainer: its loss by values, its memory against traces of it and a real run, and its scripts."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretrain.advice.finetune import advise as advise_plan
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.families import FAMILIES
from foretrain.config.hub.source import facts_of, find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.model.hub.reward import RewardModel
from foretrain.predict.finetune.plan import WITHOUT_SCORE, FineTunePlan, plan
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("peft")

import transformers
from accelerate import Accelerator
from trl.trainer.reward_trainer import RewardTrainer

from tests.kit import finetune_proof as proof
from tests.kit.finetune import small
from tests.kit.finetune_traces import agree_in_all_phases, built_config
from tests.kit.trainers import SIZES

REWARD: dict[str, Any] = {"training": "reward", "loop": "trl"}
SCRIPT = """
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
model = AutoModelForSequenceClassification.from_pretrained("qwen3-0.6b", num_labels=1, dtype="bfloat16")
args = RewardConfig(per_device_train_batch_size=4, max_length=512, center_rewards_coefficient=0.01{more})
peft_config = LoraConfig(r=8, task_type="SEQ_CLS", modules_to_save=["score"])
RewardTrainer(model=model, args=args, train_dataset=data, peft_config=peft_config).train()
"""


def planned(name: str = "llama-3.2-1b", **options: Any) -> FineTunePlan:
    tune = FineTune.model_validate({"dtype": "bfloat16", "seq_len": 512, "batch_size": 2, **REWARD, **options})
    return plan(find_source(name), tune, find_gpu("RTX 4090"))


class Runnable:
    """Facts that the model runs on real tensors."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts, self.written_attention, self.padded, self.groups = facts, False, False, facts.groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


def test_rewards_are_those_of_transformers_and_the_loss_trls() -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("llama", **SIZES, num_labels=1)
    theirs = transformers.LlamaForSequenceClassification(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    facts = facts_of(config.to_dict())
    assert facts is not None
    ours = RewardModel(Runnable(facts)).eval()
    renamed = {key.removeprefix("model.").replace("score", "lm_head"): w for key, w in theirs.state_dict().items()}
    ours.load_state_dict(renamed)
    ids = torch.randint(1, SIZES["vocab_size"], (4, 48))
    torch.testing.assert_close(ours.rewards(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    trainer: Any = SimpleNamespace(
        model=theirs, args=SimpleNamespace(center_rewards_coefficient=None), accelerator=Accelerator(cpu=True),
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    losses: Any = ours(ids, ids), RewardTrainer.compute_loss(trainer, theirs, batch)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(ours.lm_head.weight.grad, theirs.score.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_estimate_is_that_of_the_trainers_trace(name: str, method: str) -> None:
    agree_in_all_phases(built_config(name), method=method, **REWARD)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing": ("mistral", {"method": "lora", "gradient_checkpointing": True}),
    "autocast": ("llama", {"amp": "bf16", "dtype": "float32", "gradient_checkpointing": True}),
    "tied": ("llama tied", {"method": "lora", "lora_targets": "q_proj,v_proj"}),
    "accumulated": ("llama", {"grad_accum": 3}), "padded": ("llama", {"method": "lora", "padded": True}),
    "dropout": ("gpt2", {"method": "lora"}), "experts": ("qwen3_moe", {"method": "lora"}),
    "collected": ("llama", {"keeps_logits": True, "eval_batches": 6}),
    "qlora": ("llama", {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHERS)
def test_other_ways_agree_with_their_traces(way: str) -> None:
    name, options = OTHERS[way]
    if options.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    agree_in_all_phases(built_config(name), **options, **REWARD)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_traced_run_takes_what_the_real_one_does(method: str) -> None:
    tune = FineTune.model_validate({"seq_len": 64, "batch_size": 2, "optim": "adamw_torch", "method": method, **REWARD})
    truth = proof.compare(small("llama-3.2-1b"), tune)
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


def test_a_sample_is_two_sequences_without_logits() -> None:
    found = planned()
    assert found.tune.tokens_per_step == 2 * 2 * 512
    assert (found.bound, found.verdict) == ("exact", "fits")
    assert "finetune_pairs" in {note.id for note in found.notes}
    assert not [row for row in found.needs.worst.components if row.id.startswith("logits")]
    trained = {method: planned(method=method).counts for method in ("full", "lora")}
    head = 128_256 * 2048  # llama-3.2-1b's, tied to its embedding, is no reward model's
    assert trained["full"].n_trained == 1_235_814_400 + 2048
    assert trained["lora"].n_params > trained["full"].n_params > head
    sft = FineTune.model_validate({**found.tune.model_dump(), "training": "sft", "batch_size": 4})
    work = [flops(StepWork(found.facts, each, found.gpu).micro) for each in (found.tune, sft)]
    assert work[0] < work[1] - 6 * head * 2048


@pytest.mark.parametrize(("name", "options", "said"), [
    ("olmoe-1b-7b", {"method": "lora"}, "no olmoe model"), ("llama-3.2-1b", {"world": 2, "strategy": "fsdp"}, "reward"),
    ("llama-3.2-1b", {"liger": True}, "--liger"), ("llama-3.2-1b", {"unsloth": True}, "--unsloth"),
])  # fmt: skip
def test_what_is_not_planned_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(name, **options)


def test_advice_offers_no_loop_that_is_not_planned() -> None:
    found = advise_plan(planned("llama-3.1-8b", method="full"), "fit")
    changes = [change.options for change in (*found.advised, *found.partial)]
    assert any("method" in options for options in changes)
    assert not [options for options in changes if options.keys() & {"loop", "unsloth", "liger"}]


@pytest.mark.parametrize("word", ["--packing", "--lora-dropout=0.1"])
def test_what_a_reward_model_does_not_have_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="does nothing for a reward model"):
        read_finetune("llama-3.2-1b", ["--method=lora", "--training=reward", word])


@pytest.mark.parametrize("loop", ["trainer", "axolotl", "llama-factory", "unsloth"])
def test_the_reward_models_of_others_have_no_verdict(loop: str) -> None:
    assert planned(loop=loop).bound == "unknown"


@pytest.mark.parametrize(("more", "unplanned"), [
    ("", {}), (", activation_offloading=True", {"activation_offloading = True": "at_most"}),
    (", disable_dropout=False", {"disable_dropout = False": "at_least"}),
])  # fmt: skip
def test_a_script_of_the_reward_trainer_is_read(more: str, unplanned: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(more=more))
    _, tune, reading = read_finetune(str(path))
    assert tune.rewards
    assert tune.rows(tune.batch_size) == (8, 512)
    assert (tune.method, tune.lora_r, tune.gradient_checkpointing, tune.amp) == ("lora", 8, True, "bf16")
    assert (reading.unplanned, reading.unknown) == (unplanned, ())


def test_families_without_a_score_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    assert set(FAMILIES) - set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) == set(WITHOUT_SCORE)

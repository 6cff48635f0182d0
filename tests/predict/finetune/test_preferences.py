"""Plans of TRL's trainers of preferences: their losses by values, their memory against traces of them and real runs, and
their scripts and files."""

from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretrain.advice.finetune import advise as advise_plan
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.families import FAMILIES
from foretrain.config.hub.source import facts_of, find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.model.hub.preferences import Others, Pair, Policy, RewardModel
from foretrain.predict.finetune.plan import WITHOUT_SCORE, FineTunePlan, plan, replanned
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops
from foretrain.predict.trace.finetune.drive import Run
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.self_test import CPU
from foretrain.predict.trace.tracer import Tracer

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("peft")

import transformers
from accelerate import Accelerator
from trl.trainer.reward_trainer import RewardTrainer

from tests.kit import finetune_proof as proof
from tests.kit.finetune import small
from tests.kit.finetune_traces import CONFIGS, agree_in_all_phases, built_config, built_config_of
from tests.kit.trainers import SIZES, Runnable

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")

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


TRAININGS = ("dpo", "kto")
WHOLE = ("orpo", "cpo", "simpo")
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "lora": {"method": "lora"}, "precomputed": {"precompute_reference": True},
}  # fmt: skip


def planned(name: str = "llama-3.2-1b", **options: Any) -> FineTunePlan:
    tune = FineTune.model_validate({"dtype": "bfloat16", "seq_len": 512, "batch_size": 2, **REWARD, **options})
    return plan(find_source(name), tune, find_gpu("RTX 4090"))


def test_rewards_are_those_of_transformers_and_the_loss_trls() -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("llama", **SIZES, num_labels=1)
    theirs = transformers.LlamaForSequenceClassification(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    facts = facts_of(config.to_dict())
    assert facts is not None
    ours = RewardModel(Runnable(facts, 1)).eval()
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


CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"labels": 5}), "dropout": ("gpt2", {"dtype": "float32"}),
    "lora": ("qwen3", {"method": "lora", "amp": "bf16", "keeps_logits": True, "gradient_checkpointing": True}),
}  # fmt: skip


@pytest.mark.parametrize("way", CLASSES)
def test_the_estimate_of_a_classifier_is_that_of_a_trace(way: str) -> None:
    name, options = CLASSES[way]
    agree_in_all_phases(built_config(name), training="classification", **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_traced_classifier_takes_what_the_real_one_does(method: str) -> None:
    values = {"seq_len": 64, "batch_size": 2, "optim": "adamw_torch", "method": method, "training": "classification"}
    truth = proof.compare(small("llama-3.2-1b"), FineTune.model_validate(values))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


def test_a_classifier_has_a_head_of_its_classes() -> None:
    found = planned("llama-3.2-1b", training="classification", loop="trainer", labels=7)
    assert (found.bound, found.verdict, found.counts.n_trained) == ("exact", "fits", 1_235_814_400 + 7 * 2048)
    assert not [row for row in found.needs.worst.components if row.id.startswith("logits")]
    reward = planned("llama-3.2-1b", training="reward", batch_size=1)
    assert found.timing.flops_per_step == pytest.approx(reward.timing.flops_per_step, rel=1e-4)
    with pytest.raises(UserError, match="--loop trl"):
        replanned(found, loop="trl")
    with pytest.raises(UserError, match="--liger"):
        replanned(found, liger=True)
    assert planned("llama-3.2-1b", training="classification", loop="axolotl").bound == "at_most"


@pytest.mark.parametrize(("words", "said"), [
    (["--training=classification", "--packing"], "sequence of its own"), (["--labels=3"], "has no classes"),
])  # fmt: skip
def test_what_classes_have_no_use_for_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_finetune("llama-3.2-1b", ["--method=lora", *words])


@pytest.mark.parametrize("training", TRAININGS)
def test_the_loss_of_a_policy_is_the_trainers(training: str, tmp_path: Path) -> None:
    tune = FineTune.model_validate({"seq_len": 48, "batch_size": 2, "training": training, "loop": "trl"})
    config = transformers.AutoConfig.for_model("llama", **SIZES).to_dict()
    facts = facts_of(config)
    assert facts is not None
    tracer = Tracer("cpu")
    with proof.fresh():
        run = Run(config, tune, CPU, tracer, Names(tracer))
        trainer: Any = run.trainer(str(tmp_path))
    torch.manual_seed(1)
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    ours = Policy(Runnable(facts), tiled=True)
    ours.copy = Policy(Runnable(facts), tiled=True)
    for own, their in ((ours, trainer.model), (ours.copy, trainer.ref_model)):
        own.load_state_dict({f"{key.removeprefix('model.')}": w for key, w in their.state_dict().items()}, strict=False)
    batch = run.batch([None] * 2)
    others = None
    for prefix in ("", "KL_") if tune.drifts else ("",):
        batch[f"{prefix}input_ids"] = torch.randint(1, SIZES["vocab_size"], batch["input_ids"].shape)
        batch[f"{prefix}completion_mask"][:, :9] = 0
    if tune.drifts:
        batch["label"][1] = False
        others = Others(batch["KL_input_ids"], batch["KL_completion_mask"], batch["label"] * 2 - 1)
    losses = (
        ours.compared(batch["input_ids"], batch["completion_mask"], nullcontext, reference=True, others=others),
        trainer.compute_loss(trainer.model, batch),
    )
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(ours.norm.weight.grad, trainer.model.model.norm.weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("training", WHOLE)
def test_the_loss_of_whole_logits_is_the_trainers(training: str, tmp_path: Path) -> None:
    tune = FineTune.model_validate({"seq_len": 48, "batch_size": 2, "training": training, "loop": "trl"})
    config = transformers.AutoConfig.for_model("llama", **SIZES).to_dict()
    facts = facts_of(config)
    assert facts is not None
    tracer = Tracer("cpu")
    with proof.fresh():
        run = Run(config, tune, CPU, tracer, Names(tracer))
        trainer: Any = run.trainer(str(tmp_path))
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours = Pair(Runnable(facts))
    ours.load_state_dict({key.removeprefix("model."): w for key, w in trainer.model.state_dict().items()})
    idx, mask = torch.randint(1, SIZES["vocab_size"], (4, 48)), torch.ones((4, 48), dtype=torch.int64)
    mask[:, :9] = 0
    tensors = {"input_ids": idx, "attention_mask": torch.ones_like(idx), "labels": idx.masked_fill(mask == 0, -100)}
    halves = ((name, *tensor.chunk(2)) for name, tensor in tensors.items())
    batch = {
        f"{k}_{name}": half for name, *both in halves for k, half in zip(("chosen", "rejected"), both, strict=True)
    }
    assert batch.keys() == run.batch([None] * 2).keys()
    trainer.store_metrics = lambda *_, **__: None
    predicts = training != "simpo"
    losses = (
        ours.compared(idx, mask, nullcontext, odds=training == "orpo", predicts=predicts),
        trainer.compute_loss(trainer.model, batch),
    )
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(ours.norm.weight.grad, trainer.model.model.norm.weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("training", WHOLE)
def test_whole_logits_take_what_a_trace_of_them_does(training: str) -> None:
    wide = {**CONFIGS["llama"], "vocab_size": 16_384, "num_hidden_layers": 2}
    options: Any = {"method": "lora", "amp": "bf16"} if training == "cpo" else {"gradient_checkpointing": True}
    agree_in_all_phases(built_config_of(wide), training=training, loop="trl", **options)


@pytest.mark.slow
@pytest.mark.parametrize("training", WHOLE)
def test_traced_whole_logits_take_what_the_real_ones_do(training: str) -> None:
    """In fp32: in bf16 a CPU's log_softmax takes a row in fp32, which a card does not."""
    values = {"seq_len": 64, "batch_size": 2, "optim": "adamw_torch", "training": training, "loop": "trl"}
    truth = proof.compare(small("llama-3.2-1b"), FineTune.model_validate({**values, "dtype": "float32"}))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", TRAININGS)
def test_the_estimate_of_a_policy_is_that_of_a_trace(training: str, way: str) -> None:
    agree_in_all_phases(built_config("llama"), training=training, loop="trl", **WAYS[way])


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing": ("mistral", {"gradient_checkpointing": True}), "padded": ("llama", {"padded": True}),
    "autocast": ("llama", {"amp": "bf16", "dtype": "float32"}), "dora": ("qwen3", {"method": "dora"}),
    "windows": ("gemma3, short window", {}), "dropout": ("gpt2", {"method": "lora"}),
    "accumulated": ("llama tied", {"grad_accum": 3, "method": "lora", "lora_targets": "q_proj,v_proj"}),
    "experts": ("qwen3_moe", {"method": "lora"}), "all experts": ("mixtral", {"gradient_checkpointing": True}),
    "collected": ("llama", {"keeps_logits": True, "eval_batches": 6}), "liger": ("llama", {"liger": True}),
    "qlora": ("llama", {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("training", TRAININGS)
def test_other_ways_of_a_policy_agree_with_a_trace(training: str, way: str) -> None:
    name, options = POLICIES[way]
    if options.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    agree_in_all_phases(built_config(name), training=training, loop="trl", **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", TRAININGS)
def test_a_traced_policy_takes_what_the_real_one_does(training: str, way: str) -> None:
    tune = FineTune.model_validate({
        "seq_len": 64, "batch_size": 2, "optim": "adamw_torch", "training": training, "loop": "trl", **WAYS[way],
    })  # fmt: skip
    truth = proof.compare(small("llama-3.2-1b"), tune)
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


def test_a_reference_is_a_copy_unless_there_are_adapters() -> None:
    path = Path(__file__).parents[2] / "data/field/yaml/trl_dpo_full_15b.yaml"
    source, tune, _ = read_finetune(str(path))
    full = plan(source, tune, find_gpu("4080"))
    assert (full.bound, full.verdict, tune.tokens_per_step) == ("exact", "does_not_fit", 2 * 4 * 4 * 1024)
    rows = {row.id: row.size_bytes for row in full.needs.worst.components}
    assert rows["reference"] == rows["weights"]
    without = plan(source, tune.model_copy(update={"precompute_reference": True}), find_gpu("4080"))
    assert without.needs.worst.allocated_bytes < full.needs.worst.allocated_bytes - 0.9 * rows["reference"]
    needed = [each.timing.flops_per_step or 0 for each in (full, without) if each.timing]
    assert needed[0] == pytest.approx(needed[1] * 4 / 3, rel=0.01)
    lora = plan(source, tune.model_copy(update={"method": "lora"}), find_gpu("4080"))
    assert lora.verdict == "fits"
    notes = [{note.id for note in each.notes if "reference" in note.id} for each in (full, without, lora)]
    assert notes == [{f"finetune_reference_{how}"} for how in ("copied", "precomputed", "adapters")]


PAIRS = """
from trl import DPOConfig, DPOTrainer
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("qwen3-0.6b", dtype="bfloat16")
DPOTrainer(model=model, args=DPOConfig(beta=0.1{more}), train_dataset=data{given}).train()
"""


@pytest.mark.parametrize(("more", "given", "unplanned"), [
    ("", "", {}), (", sync_ref_model=True", "", {"sync_ref_model = True": "at_least"}),
    ("", ", ref_model=other", {}), ("", ", peft_config=LoraConfig(r=8)", {}),
    ("", ", ref_model=other, peft_config=LoraConfig(r=8)", {"ref_model": "at_least"}),
])  # fmt: skip
def test_a_script_of_the_dpo_trainer_is_read(more: str, given: str, unplanned: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PAIRS.format(more=f", precompute_ref_log_probs=True{more}", given=given))
    _, tune, reading = read_finetune(str(path))
    assert (tune.references, tune.precompute_reference, reading.unplanned) == (True, True, unplanned)


@pytest.mark.parametrize(("more", "unplanned"), [
    ("", {}), (", loss_type='apo_zero_unpaired'", {"loss_type = apo_zero_unpaired": "at_most"}),
])  # fmt: skip
def test_a_script_of_the_kto_trainer_is_read(more: str, unplanned: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PAIRS.format(more=more, given="").replace("DPO", "KTO"))
    _, tune, reading = read_finetune(str(path))
    assert (tune.drifts, tune.bound, reading.unplanned) == (True, "exact", unplanned)


@pytest.mark.parametrize(("options", "said"), [
    ({"unsloth": True}, "--unsloth"), ({"world": 2, "strategy": "fsdp"}, "training = dpo"),
])  # fmt: skip
def test_what_is_not_planned_of_a_policy_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(training="dpo", **options)


@pytest.mark.parametrize(("more", "training"), [
    ("", "cpo"), (", loss_type='simpo'", "cpo"), (", loss_type='simpo', cpo_alpha=0.0", "simpo"),
])  # fmt: skip
def test_a_script_of_the_cpo_trainer_is_read(more: str, training: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        PAIRS.format(more=more, given="").replace("DPO", "CPO").replace(", precompute_ref_log_probs=True", "")
    )
    source, tune, reading = read_finetune(str(path))
    assert (tune.training, tune.whole, reading.unplanned, reading.unknown) == (training, True, {}, ())
    found = plan(source, tune.model_copy(update={"batch_size": 1}), find_gpu("RTX 4090"))
    assert (found.bound, found.verdict) == ("exact", "fits")


def test_what_orpo_does_over_quantized_weights_is_bounded() -> None:
    assert planned(training="orpo", method="qlora").bound == "at_least"
    assert planned(training="orpo", method="lora").bound == "exact"
    refused: list[dict[str, Any]] = [{"liger": True}, {"world": 2, "strategy": "zero2"}]
    for options in refused:
        with pytest.raises(UserError, match="orpo"):
            planned(training="orpo", **options)


def test_a_setting_of_the_reference_needs_one() -> None:
    with pytest.raises(UserError, match="DPO and KTO in TRL"):
        read_finetune("llama-3.2-1b", ["--method=lora", "--precompute-reference"])


def test_kto_takes_single_samples_and_runs_each_twice() -> None:
    found = planned("qwen2.5-0.5b", training="kto", method="lora", gradient_checkpointing=True)
    assert (found.bound, found.verdict, found.tune.sequences) == ("exact", "fits", 2)
    assert {"finetune_reference_adapters", "finetune_drift"} <= {note.id for note in found.notes}
    dpo = replanned(found, training="dpo", batch_size=1)
    needed = [each.timing.flops_per_step or 0 for each in (found, dpo) if each.timing]
    assert needed[0] / needed[1] == pytest.approx(5 / 3, rel=0.1)  # 3 passes beside one that learns; DPO has 1
    with pytest.raises(UserError, match="2 samples or more"):
        replanned(found, batch_size=1)
    _, tune, _ = read_finetune("llama-3.2-1b", ["--method=lora", "--training=kto"])
    assert tune.batch_size == 2


def test_options_of_other_cards_and_lengths_are_answered() -> None:
    found = planned("qwen2.5-0.5b", training="dpo", method="lora", world=2, gradient_checkpointing=True)
    assert (found.bound, found.verdict) == ("exact", "fits")
    longer = replanned(found, seq_len=1024)
    assert longer.needs.worst.allocated_bytes > found.needs.worst.allocated_bytes


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
    assert found.facts is not None
    work = [flops(StepWork(found.facts, each, found.gpu).micro) for each in (found.tune, sft)]
    assert work[0] < work[1] - 6 * head * 2048


@pytest.mark.parametrize(("name", "options", "said"), [
    ("olmoe-1b-7b", {"method": "lora"}, "no olmoe model"), ("llama-3.2-1b", {"world": 2, "strategy": "fsdp"}, "reward"),
    ("llama-3.2-1b", {"liger": True}, "--liger"), ("llama-3.2-1b", {"unsloth": True}, "--unsloth"),
])  # fmt: skip
def test_what_is_not_planned_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(name, **options)


def test_advice_runs_a_reference_first_whose_copy_does_not_fit() -> None:
    given = planned("qwen2.5-1.5b", training="dpo", batch_size=1, gradient_checkpointing=True)
    full = plan(given.source, given.tune, find_gpu("4080"))
    assert full.verdict == "does_not_fit"
    change = next(each for each in advise_plan(full, "fit").advised if each.rules == ("precomputed",))
    assert (change.options, change.exactness) == ({"precompute_reference": True}, "exact")
    assert change.effect.saved_bytes > 0.9 * 2 * full.counts.n_params
    lora = plan(given.source, given.tune.model_copy(update={"method": "lora", "batch_size": 64}), find_gpu("4080"))
    assert not [each for each in advise_plan(lora, "fit").advised if "precomputed" in each.rules]


def test_advice_offers_no_loop_that_is_not_planned() -> None:
    found = advise_plan(planned("llama-3.1-8b", method="full"), "fit")
    changes = [change.options for change in (*found.advised, *found.partial)]
    assert any("method" in options for options in changes)
    assert not [options for options in changes if options.keys() & {"loop", "unsloth", "liger"}]


@pytest.mark.parametrize("word", ["--packing", "--lora-dropout=0.1"])
def test_what_a_reward_model_does_not_have_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="does nothing with --training reward"):
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

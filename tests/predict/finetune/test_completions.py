"""Plans of TRL's GRPOTrainer, which learns from completions of the model's own: its loss by values, its memory against
traces of it and real runs, vLLM's share, and its scripts and files."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.advice.finetune import advise as advise_plan
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.source import facts_of, find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.hardware.devices import device_named
from foretrain.model.hub.preferences import Group, Written
from foretrain.predict.finetune.plan import FineTunePlan, plan, replanned
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.finetune import standins
from foretrain.predict.trace.finetune.drive import Run, loop_of
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.self_test import CPU
from foretrain.predict.trace.tracer import Tracer

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("peft")

import transformers
import trl.trainer.utils

from tests.kit import finetune_proof as proof
from tests.kit.finetune import small
from tests.kit.finetune_traces import agree_in_all_phases, built_config
from tests.kit.trainers import SIZES, Runnable

GRPO: dict[str, Any] = {"training": "grpo", "loop": "trl", "completion_len": 128, "grad_accum": 2}
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
args = GRPOConfig(num_generations=4, max_completion_length=256, per_device_train_batch_size=4{more})
GRPOTrainer(model="qwen3-0.6b", reward_funcs=length, args=args, train_dataset=data, peft_config=LoraConfig(r=8)).train()
"""


def planned(name: str = "llama-3.2-1b", gpu: str = "RTX 4090", **options: Any) -> FineTunePlan:
    given = {"dtype": "bfloat16", "seq_len": 1024, "batch_size": 1, "grad_accum": 8, "gradient_checkpointing": True}
    tune = FineTune.model_validate({**GRPO, **given, "completion_len": 512, **options})
    return plan(find_source(name), tune, device_named(gpu))


def bytes_of(found: FineTunePlan, phase: str) -> int:
    return next(each.allocated_bytes for each in found.memory.phases if each.phase == phase)


@pytest.mark.parametrize(("training", "beta"), [("grpo", 0.0), ("grpo", 0.04), ("rloo", 0.0)])
def test_the_loss_is_the_trainers(training: str, beta: float, tmp_path: Path) -> None:
    values = {"seq_len": 48, "batch_size": 4, "training": training, "loop": "trl", "completion_len": 30, "beta": beta}
    tune = FineTune.model_validate(values)
    config = transformers.AutoConfig.for_model("llama", **SIZES).to_dict()
    facts = facts_of(config)
    assert facts is not None
    tracer = Tracer("cpu")
    with proof.fresh():
        trainer: Any = Run(config, tune, CPU, tracer, Names(tracer)).trainer(str(tmp_path))
    torch.manual_seed(1)
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    trainer.current_gradient_accumulation_steps = 1
    ours = Group(Runnable(facts), tiled=True)
    ours.load_state_dict({f"{key.removeprefix('model.')}": w for key, w in trainer.model.state_dict().items()})
    idx, mask = torch.randint(1, SIZES["vocab_size"], (4, 48)), torch.ones((4, 48), dtype=torch.int64)
    counted, advantages = torch.ones((4, 30), dtype=torch.int64), torch.randn(4)
    with torch.no_grad():
        labels = mask.clone()
        labels[:, :18] = 0
        near = ours.scored(idx, labels, 30, nullcontext, reference=False)
    old, reference = near + 0.3 * torch.randn(4, 30), near + torch.randn(4, 30)
    inputs = {
        "prompt_ids": idx[:, :18], "prompt_mask": mask[:, :18], "completion_ids": idx[:, 18:],
        "completion_mask": counted, "advantages": advantages, "num_items_in_batch": counted.sum(),
        "old_per_token_logps": old, "ref_per_token_logps": reference, "old_logps": old.sum(1),
    }  # fmt: skip
    given = Written(labels, advantages.unsqueeze(1), 30, old, reference if beta else None, training == "rloo")
    losses = ours.learned(idx, given, nullcontext, beta), trainer._compute_loss(trainer.model, inputs)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(ours.norm.weight.grad, trainer.model.model.norm.weight.grad, rtol=1e-3, atol=1e-6)
    begun = ours.begun(idx)
    cache = trainer.model(idx, use_cache=True).past_key_values
    torch.testing.assert_close(begun[1][0], cache.layers[1].keys, rtol=1e-4, atol=1e-4)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": ("llama", {"beta": 0.1}),
    "adapters": ("llama", {"method": "lora", "amp": "bf16", "gradient_checkpointing": True}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "again": ("llama tied", {"method": "lora", "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1}),
    "autocast": ("llama", {"amp": "bf16", "dtype": "float32", "gradient_checkpointing": True}),
    "dropout": ("gpt2", {"method": "lora", "lora_dropout": 0.1, "dtype": "float32"}),
    "experts": ("qwen3_moe", {"method": "lora"}), "padded": ("llama", {"method": "lora", "padded": True}),
    "rloo": ("llama", {"method": "lora", "training": "rloo", "beta": 0.05}), "server": ("llama", {"vllm": "server"}), "windows": ("gemma3, short window", {}),
    "many": ("qwen3", {"steps_per_generation": 8}),
    "qlora": ("llama", {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_estimate_is_that_of_the_trainers_trace(way: str) -> None:
    name, options = WAYS[way]
    agree_in_all_phases({**built_config(name), "num_hidden_layers": 3}, **{**GRPO, **options})


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHERS)
def test_other_ways_agree_with_their_traces(way: str) -> None:
    name, options = OTHERS[way]
    if options.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    agree_in_all_phases(built_config(name), **{**GRPO, **options})


# Whose peak is in generation, where no tile of logits is larger; of the step; of what scores the completions.
REAL: dict[str, dict[str, Any]] = {
    "generation": {"batch_size": 1, "grad_accum": 16, "method": "lora"}, "step": {"batch_size": 4},
    "score": {"batch_size": 4, "num_iterations": 2, "beta": 0.1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", REAL)
def test_a_trace_takes_what_the_real_one_does(way: str) -> None:
    """All of generate's steps are run. Weights are 0, as of no probabilities nothing can be drawn."""
    tune = FineTune.model_validate({**GRPO, "seq_len": 112, "completion_len": 16, "optim": "adamw_torch", **REAL[way]})
    loop_of(tune)
    with Patches() as patches:
        patches.set(standins.CheckpointTensor, "__getitem__", lambda own, _: torch.zeros(own.shape, dtype=own.dtype))
        patches.set(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)
        peaks = proof.traced_on_cpu(small("llama-3.2-1b"), tune).peaks()
        _, real = proof.real_peaks(small("llama-3.2-1b"), tune)
    traced = {phase: peak for phase, (peak, _) in peaks.items()}
    assert abs(max(traced.values()) - real) <= max(64, 0.001 * real)
    if way == "generation":
        assert max(traced, key=lambda phase: traced[phase]) == "generate"


def test_a_group_is_generated_together_and_learned_in_parts() -> None:
    found = planned(method="lora")
    assert (found.bound, found.verdict, found.tune.generated) == ("exact", "fits", 8)
    phases = [phase.phase for phase in found.memory.phases]
    assert phases == ["load", "prepare", "generate", "first_step", "steady_step", "save"]
    more = replanned(found, steps_per_generation=64)
    cache = 2 * 16 * 8 * 64 * 2 * 64 * 1024  # keys and values of 64 completions
    assert bytes_of(more, "generate") > bytes_of(found, "generate") + cache * 7 // 8
    assert bytes_of(more, "steady_step") == pytest.approx(bytes_of(found, "steady_step"), rel=0.01)
    for shorter in (found, replanned(found, completion_len=256)):
        assert shorter.timing.generation_s
        assert 0.5 < shorter.timing.generation_s / shorter.timing.step_s.expected_s < 1
    longer = replanned(found, num_iterations=2)
    taken = [each.timing.generation_s or 0 for each in (longer, found) if each.timing]
    assert taken[0] == pytest.approx(taken[1] / 2, rel=0.01)
    assert "score" in {phase.phase for phase in longer.memory.phases}


def test_a_reference_is_a_copy_where_beta_is_not_0() -> None:
    full, plain = planned("qwen2.5-0.5b", beta=0.04), planned("qwen2.5-0.5b")
    rows = {row.id: row.size_bytes for row in full.needs.worst.components}
    assert rows["reference"] == rows["weights"]
    assert not [row for row in plain.needs.worst.components if row.id == "reference"]
    lora = planned("qwen2.5-0.5b", beta=0.04, method="lora")
    notes = [{note.id for note in each.notes if "reference" in note.id} for each in (full, plain, lora)]
    assert notes == [{"finetune_reference_generated"}, set(), {"finetune_reference_adapters"}]
    given = plan(full.source, full.tune, find_gpu("RTX 3060"))
    assert not [each for each in advise_plan(given, "fit").advised if "precomputed" in each.rules]


def test_vllm_takes_its_share_of_the_card() -> None:
    alone = planned(method="lora", vllm="server")
    share = round(0.3 * (alone.gpu.memory_bytes or 0))
    beside, sleeping = (planned(method="lora", vllm="colocate", vllm_sleep=sleeps) for sleeps in (False, True))
    for phase in ("generate", "steady_step"):
        assert bytes_of(beside, phase) - bytes_of(alone, phase) == pytest.approx(share, rel=1e-3)
    assert bytes_of(sleeping, "steady_step") == bytes_of(alone, "steady_step")
    assert bytes_of(sleeping, "generate") - bytes_of(alone, "generate") == pytest.approx(share, rel=1e-3)
    assert "vllm" in {row.id for row in beside.needs.worst.components}
    assert "estimate" in FineTuneRequest(beside.source, beside.tune, beside.gpu).why_not()
    written = planned(method="lora")
    assert (alone.timing.generation_s or 0) < (written.timing.generation_s or 0)


@pytest.mark.parametrize(("options", "said"), [
    ({"completion_len": 1024}, "--seq-len"), ({"grad_accum": 6}, "6 that are generated together"),
    ({"vllm": "colocate", "vllm_memory": 0.05}, "--vllm-memory"), ({"gpu": "cpu", "vllm": "colocate"}, "--vllm=server"),
    ({"unsloth": True}, "--unsloth"), ({"world": 8, "strategy": "fsdp"}, "training = grpo"),
])  # fmt: skip
def test_what_is_not_planned_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(**options)


@pytest.mark.parametrize(("words", "said"), [
    (["--training=dpo", "--num-generations=4"], "generates nothing"),
    (["--training=grpo", "--vllm-memory=0.4"], "--vllm=colocate"), (["--training=grpo", "--packing"], "packs nothing"),
])  # fmt: skip
def test_what_does_nothing_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_finetune("llama-3.2-1b", ["--method=lora", *words])


def test_a_model_that_is_asked_about_gets_one_prompt_a_step() -> None:
    _, tune, _ = read_finetune("llama-3.2-1b", ["--method=lora", "--training=grpo", "--num-generations=6"])
    assert (tune.batch_size, tune.grad_accum, tune.seq_len, tune.loop) == (1, 6, 1024, "trl")
    _, tune, _ = read_finetune("llama-3.2-1b", ["--method=lora", "--training=grpo", "--completion-len=4096"])
    assert (tune.seq_len, tune.generated) == (512 + 4096, 8)
    _, tune, _ = read_finetune("llama-3.2-1b", ["--method=lora", "--training=rloo"])
    assert (tune.bound, tune.generated, tune.beta, tune.scores_again) == ("exact", 2, 0.05, True)


@pytest.mark.parametrize(("more", "values", "unplanned"), [
    ("", {"completion_len": 256, "seq_len": 768, "beta": 0.0, "vllm": "no"}, {}),
    (", max_prompt_length=128, beta=0.04, num_iterations=2, loss_type='dr_grpo', epsilon_high=0.28",
     {"seq_len": 384, "beta": 0.04, "num_iterations": 2}, {}),
    (", use_vllm=True, vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode=True, generation_batch_size=32",
     {"vllm": "colocate", "vllm_memory": 0.4, "vllm_sleep": True, "steps_per_generation": 8}, {}),
    (", use_vllm=True, vllm_mode='server', steps_per_generation=2", {"vllm": "server", "steps_per_generation": 2}, {}),
    (", cache_implementation='static'", {}, {"cache_implementation = static": "unknown"}),
])  # fmt: skip
def test_a_script_is_read(more: str, values: dict[str, Any], unplanned: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(more=more))
    _, tune, reading = read_finetune(str(path))
    assert (tune.bound, tune.method, tune.lora_r, tune.num_generations) == ("exact", "lora", 8, 4)
    assert {name: getattr(tune, name) for name in values} == values
    assert (reading.unplanned, reading.unknown) == (unplanned, ())


@pytest.mark.parametrize(("more", "unplanned"), [("", {}), (", rloo_k=4", {"rloo_k = 4": "at_least"})])
def test_a_script_of_rloo_is_read(more: str, unplanned: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(more=more).replace("GRPO", "RLOO").replace("num_generations=4, ", ""))
    _, tune, reading = read_finetune(str(path))
    assert (tune.bound, tune.num_generations, tune.beta) == ("exact", 2, 0.05)
    assert (reading.unplanned, reading.unknown) == (unplanned, ())


def test_a_file_of_trls_command_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "model_name_or_path: qwen2.5-0.5b\nuse_peft: true\nlora_r: 16\nnum_generations: 8\nreward_funcs: [accuracy]\n"
        "max_completion_length: 1024\nper_device_train_batch_size: 8\nbf16: true\nbeta: 0.001\nuse_vllm: true\n"
    )
    source, tune, reading = read_finetune(str(path))
    assert (tune.training, tune.completion_len, tune.seq_len, tune.vllm) == ("grpo", 1024, 1536, "colocate")
    assert (reading.unplanned, reading.unknown) == ({}, ())
    found = plan(source, tune, find_gpu("RTX 4090"))
    assert (found.bound, found.verdict) == ("exact", "fits")


def test_advice_keeps_what_is_generated_together() -> None:
    options: dict[str, Any] = {"batch_size": 16, "steps_per_generation": 2, "gradient_checkpointing": False}
    found = advise_plan(planned("qwen2.5-0.5b", "RTX 3060", method="lora", **options), "fit")
    changes = [each.options for each in (*found.advised, *found.partial)]
    batches = [each for each in changes if "batch_size" in each]
    assert batches
    assert all(each["batch_size"] * each["steps_per_generation"] == 32 for each in batches)
    assert all("completion_len" in each for each in changes if "seq_len" in each)
    assert not [each for each in changes if each.keys() & {"loop", "unsloth", "precompute_reference", "packing"}]

"""Files that people have: the kind of training, whose file it is, keys that decide, and published weights.

`data/field/` holds small inputs with what is right of each; the others are of the same kinds.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import BOUNDS, FineTune
from foretrain.config.finetune.read import read_file, read_finetune
from tests.kit.command import REPO, foretrain

FIELD = REPO / "tests" / "data" / "field"
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "model")


def planned(*words: str) -> dict[str, Any]:
    return json.loads(foretrain("plan", *words, "--json", "--quiet").stdout)


AXOLOTL = "base_model: {model}\nmicro_batch_size: 1\nsequence_len: 256\n"
LLAMA_FACTORY = "model_name_or_path: {model}\nfinetuning_type: lora\ncutoff_len: 256\n"
TRL = "model_name_or_path: {model}\nper_device_train_batch_size: 1\nmax_length: 256\nuse_peft: true\n"
TORCHTUNE = """
model: {{_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj]}}
tokenizer: {{max_seq_len: 128}}
batch_size: 1
"""
UNSLOTH = """
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("{model}", max_seq_length=256)
"""

KINDS = [
    ("a.yaml", f"{AXOLOTL}rl: dpo\n", "dpo"),
    ("a.yaml", f"{AXOLOTL}rl: ipo\n", "dpo"),
    ("a.yaml", f"{AXOLOTL}rl: orpo\n", "orpo"),
    ("a.yaml", f"{AXOLOTL}rl: grpo\ntrl: {{{{num_generations: 4}}}}\n", "grpo"),
    ("a.yaml", f"{AXOLOTL}rl: something_new\n", "unknown"),
    ("a.yaml", f"{AXOLOTL}reward_model: true\n", "reward"),
    ("a.yaml", f"{AXOLOTL}reward_model: true\nnum_labels: 1\n", "reward"),
    ("a.yaml", f"{AXOLOTL}num_labels: 3\n", "classification"),
    ("a.yaml", f"{AXOLOTL}process_reward_model: true\n", "reward"),
    ("a.yaml", f"{AXOLOTL}plugins: [axolotl.integrations.kd.KDPlugin]\n", "distillation"),
    ("a.yaml", f"{AXOLOTL}pretraining_dataset: [x]\n", "pretraining"),
    ("a.yaml", f"{LLAMA_FACTORY}stage: dpo\npref_loss: simpo\n", "simpo"),
    ("a.yaml", f"{LLAMA_FACTORY}stage: rm\n", "reward"),
    ("a.yaml", f"{LLAMA_FACTORY}stage: kto\n", "kto"),
    ("a.yaml", f"{LLAMA_FACTORY}stage: pt\n", "pretraining"),
    ("a.yaml", f"{TRL}beta: 0.1\nloss_type: sigmoid\n", "dpo"),
    ("a.yaml", f"{TRL}beta: 0.1\nmax_prompt_length: 64\n", "preference"),
    ("a.yaml", f"{TRL}desirable_weight: 1.0\nbeta: 0.1\n", "kto"),
    ("a.yaml", f"{TRL}num_generations: 8\nreward_funcs: [accuracy]\nbeta: 0.04\n", "grpo"),
    ("a.yaml", f"{TRL}teacher_model_name_or_path: x\nlmbda: 0.5\n", "distillation"),
    ("a.yaml", "model_name_or_path: {model}\nper_device_train_batch_size: 1\nbeta: 0.1\n", "preference"),
    ("a.yaml", f"{TORCHTUNE}loss: {{{{_component_: torchtune.rlhf.loss.DPOLoss}}}}\n", "dpo"),
    ("a.yaml", f"# tune run lora_dpo_single_device --config x\n{TORCHTUNE}", "dpo"),
    ("a.yaml", f"# tune run ppo_full_finetune_single_device --config x\n{TORCHTUNE}", "ppo"),
    ("a.yaml", f"# tune run knowledge_distillation_single_device --config x\n{TORCHTUNE}", "distillation"),
    ("a.yaml", f"# tune run lora_finetune_single_device --config x\n{TORCHTUNE}", "sft"),
    ("t.py", f"{UNSLOTH}from trl import DPOTrainer, DPOConfig\nDPOTrainer(model=model, args=DPOConfig(beta=0.1))\n", "dpo"),
    ("t.py", f"{UNSLOTH}from trl import GRPOTrainer, GRPOConfig\nargs = GRPOConfig(num_generations=4)\n", "grpo"),
    ("t.py", "from trl import RewardConfig, RewardTrainer\nRewardTrainer(model='{model}', args=RewardConfig())\n", "reward"),
    ("t.py", "import trl\ntrl.KTOTrainer(model='{model}', args=trl.KTOConfig(beta=0.1))\n", "kto"),
    ("t.py", "from trl import NewConfig, NewTrainer\nNewTrainer(model='{model}', args=NewConfig())\n", "unknown"),
    ("t.py", "from trl.experimental.ppo import PPOConfig\nfrom transformers import AutoModelForCausalLM as A\n"
             "import transformers as t\nt.AutoModelForCausalLM.from_pretrained('{model}')\nPPOConfig()\n", "ppo"),
    ("t.py", "from transformers import *\nAutoModelForTokenClassification.from_pretrained('{model}')\n"
             "TrainingArguments('out')\n", "token_classification"),
    ("t.py", "from transformers import *\nAutoModelForCausalLM.from_pretrained('{model}')\nTrainingArguments('o')\n", "sft"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "kind"), KINDS)
def test_the_kind_of_training_is_read(name: str, text: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text.format(model="qwen3-0.6b"))
    assert FineTune.model_validate(read_file(path).values).training == kind


def test_every_kind_has_a_bound() -> None:
    kinds = FineTune.model_fields["training"].annotation.__args__  # type: ignore[union-attr]
    assert {FineTune(training=kind).bound for kind in kinds} == {"exact", "at_least", "at_most", "unknown"}
    assert BOUNDS.keys() <= {*kinds}


def test_no_verdict_where_a_training_is_not_planned() -> None:
    name = "yaml/lf_ppo.yaml"
    found = foretrain("plan", str(FIELD / name), "--gpu", "4080", "--check", code=2)
    assert "Fits" not in found.stdout
    assert "No verdict. Needs at least" in found.stdout
    assert "tokens/s" not in found.stdout
    assert "no verdict" in found.stderr
    plan = planned(str(FIELD / name), "--gpu", "4080")
    assert (plan["bound"], plan["timing"], plan["advice"]) == ("at_least", None, None)
    assert {phase["verdict"] for phase in plan["memory"]["phases"]} == {None}
    sft = planned(str(FIELD / name), "--gpu", "4080", "--training", "sft")
    assert sft["bound"] == "exact"
    assert plan["memory"]["phases"][-1]["allocated_bytes"] <= sft["memory"]["phases"][-1]["allocated_bytes"]


def test_what_needs_at_least_more_than_the_card_does_not_fit() -> None:
    words = ("--model", "qwen2.5-7b", "--gpu", "3060", "--training", "ppo", "--check")
    found = foretrain("plan", str(FIELD / "scripts/grpo_script.py"), *words, code=3)
    assert "Does not fit. Needs at least" in found.stdout


@pytest.mark.parametrize(
    ("name", "training", "bound", "batch_size", "seq_len", "method"),
    [
        ("dpo_script.py", "dpo", "exact", 4, 1024, "lora"),
        ("orpo_script.py", "orpo", "exact", 2, 2048, "full"),
        ("grpo_script.py", "grpo", "exact", 8, 1536, "full"),
        ("seqcls_script.py", "classification", "exact", 8, 1024, "lora"),
    ],
)
def test_scripts(name: str, training: str, bound: str, batch_size: int, seq_len: int, method: str) -> None:
    _, tune, reading = read_finetune(str(FIELD / "scripts" / name), ["--model", "qwen2.5-0.5b"])
    assert (tune.training, tune.bound, tune.batch_size, tune.seq_len, tune.method) == (
        training, bound, batch_size, seq_len, method,
    )  # fmt: skip
    assert tune.gradient_checkpointing == (training != "classification")
    assert not reading.unplanned
    assert not reading.unknown


def test_a_classifier_needs_at_most_what_sft_does() -> None:
    script = str(FIELD / "scripts" / "seqcls_script.py")
    _, tune, _ = read_finetune(script, ["--model", "qwen2.5-0.5b"])
    assert tune.scores == 5
    words = ("--training", "token_classification", "--gpu", "H100 SXM5 80GB", "--check")
    found = foretrain("plan", script, *words)
    assert (found.returncode, "Fits. Needs at most" in found.stdout) == (0, True)


def test_other_questions_name_the_training_and_the_way_on(tmp_path: Path) -> None:
    path = str(FIELD / "yaml" / "lf_ppo.yaml")
    for words in (["--largest", "batch_size"], ["--within", "12h"], ["--exact"], ["--step-time", "2"]):
        found = foretrain("plan", path, "--gpu", "4080", *words, code=2)
        assert "ppo" in found.stderr
        assert "--training sft" in found.stderr
    assert foretrain("plan", path, "--gpu", "4080", "--largest", "batch_size", "--training", "sft").returncode == 0
    assert foretrain("advise", path, "--gpu", "4080").returncode == 2


# -- whose file it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        (FIELD / "yaml" / "modelname_data.yaml").read_text(),
        (FIELD / "yaml" / "own_generic.yaml").read_text(),
        "model_name: qwen3-0.6b\ntarget_modules: [q_proj]\nr: 16\nlora_alpha: 32\n",
        "model: {name: qwen3-0.6b}\ndata: {path: x}\ntraining: {max_seq_length: 512, lr: 1}\nlora: {target_modules: [q]}\n",
        "model_name: qwen3-0.6b\nmax_seq_length: 2048\nweight_decay: 0.1\nbf16: true\nlogging_steps: 5\n",
    ],
)
def test_a_file_is_a_trainers_only_by_what_it_alone_has(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = foretrain("plan", str(path), "--gpu", "4080", code=2)
    assert "--format trainer" in found.stderr
    assert "unsloth" in found.stderr


@pytest.mark.parametrize("format", ["trainer", "unsloth", "trl"])
def test_format_says_whose_file_it_is(format: str) -> None:
    path = str(FIELD / "yaml" / "modelname_data.yaml")
    found = foretrain("plan", path, "--gpu", "H100 SXM5 80GB", "--format", format, "--seq-len", "128", code=0)
    assert f"modelname_data.yaml as a file of {format}" in found.stdout
    _, tune, reading = read_finetune(path, ["--format", format])
    assert (tune.method, tune.batch_size) == ("full", 8)
    assert not {*reading.origins.values()} & {"load_in_4bit", "use_peft"}


def test_a_format_that_is_none_is_refused_with_all() -> None:
    path = str(FIELD / "yaml" / "modelname_data.yaml")
    assert "axolotl" in foretrain("plan", path, "--format", "foo").stderr
    assert foretrain("plan", "qwen3-0.6b", "--format", "trl", "--method", "lora").returncode == 2


def test_flat_keys_of_nanogpt_are_a_run_of_nanogpt() -> None:
    found = foretrain("plan", str(FIELD / "yaml" / "flat.yaml"), "--gpu", "4090", code=0)
    assert "it has nanoGPT's keys" in " ".join(found.stderr.split())
    assert "--batch_size=8 --gradient_accumulation_steps=64" in found.stdout


NANOTRON = """
model: {model_config: {num_hidden_layers: 2, num_attention_heads: 4, hidden_size: 64, is_llama_config: true}}
tokens: {micro_batch_size: 3, sequence_length: 32, train_steps: 5}
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: qwen3-0.6b}
step_scheduler: {global_batch_size: 32, local_batch_size: 4, num_epochs: 2}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, cp_size: 1}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 4, alpha: 32}
packed_sequence: {packed_sequence_size: 512}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""
FOUNDRY = """
variables: {length: 256}
max_seq_len: ${variables.length}
model: {name: hf_causal_lm, pretrained_model_name_or_path: gpt2, pretrained: true}
optimizer: {name: decoupled_adamw, lr: 1.0e-5}
max_duration: 3ep
global_train_batch_size: 16
device_train_microbatch_size: 4
precision: amp_bf16
"""
INSTRUCT = "model_name_or_path: gpt2\nmax_seq_length: 64\nper_device_train_batch_size: 2\ncheckpointing_steps: epoch\n"
LOOPS = [
    (AUTOMODEL, "nemo-automodel", {"lora_r": 4, "batch_size": 4, "grad_accum": 8, "seq_len": 512, "method": "lora"}),
    (FOUNDRY, "llm-foundry", {"seq_len": 256, "grad_accum": 4, "amp": "bf16", "dtype": "float32", "epochs": 3.0}),
    ("model: gpt2\ntrain: true\nfine_tune_type: full\niters: 9\n", "mlx-lm", {"max_steps": 9, "method": "full"}),
    (INSTRUCT, "open-instruct", {"seq_len": 64, "batch_size": 2, "dtype": "bfloat16", "amp": "bf16"}),
    ((FIELD / "yaml" / "litgpt_lora.yaml").read_text(), "litgpt", {"lora_targets": "q_proj,v_proj", "grad_accum": 4}),
    ((FIELD / "yaml" / "litgpt-known.yaml").read_text(), "litgpt", {"training": "pretraining", "batch_size": 4}),
]


@pytest.mark.parametrize(("text", "trainer", "values"), LOOPS)
def test_own_loops_are_read_and_named(text: str, trainer: str, values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    _, tune, reading = read_finetune(str(path))
    assert {name: getattr(tune, name) for name in values} == values
    assert (reading.format, reading.unplanned, reading.unknown) == (trainer, {f"loop = {trainer}": "unknown"}, ())
    assert not read_finetune(str(path), ["--loop", "own"])[2].unplanned


def test_a_swift_file_needs_at_most_the_trainers_memory() -> None:
    _, tune, reading = read_finetune(str(FIELD / "yaml" / "swift_sft.yaml"))
    assert (tune.method, tune.batch_size, tune.grad_accum, tune.loop) == ("qlora", 1, 16, "trainer")
    assert reading.unplanned == {"use_logits_to_keep = True": "at_most"}


def test_a_swift_file_of_preferences_is_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "swift.yaml"
    path.write_text("model: qwen3-0.6b\nrlhf_type: dpo\ntrain_type: full\nper_device_train_batch_size: 2\n")
    _, tune, _ = read_finetune(str(path))
    assert (tune.training, tune.method, tune.batch_size) == ("dpo", "full", 2)


def test_a_nanotron_file_is_named_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(NANOTRON)
    with pytest.raises(UserError) as refused:
        read_file(path)
    assert "--recipe=llama --n_layer=2 --n_head=4 --n_embd=64" in str(refused.value.values["command"])


@pytest.mark.parametrize(
    ("pattern", "targets", "bounds"),
    [
        (r"model.layers.[\d]+.(self_attn).(q|v)_proj", "self_attn.q_proj,self_attn.v_proj", set()),
        (r".*\.layers\.(0|2)\.mlp\.up_proj", "mlp.up_proj", {"at_most"}),
        (r".*\.nothing", "all-linear", {"unknown"}),
        (r"(.*)+q_proj", "all-linear", {"unknown"}),
    ],
)
def test_a_pattern_of_modules_is_matched(pattern: str, targets: str, bounds: set[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{AXOLOTL}adapter: lora\nlora_target_modules: '{pattern}'\n".format(model="/my/Qwen3-0.6B"))
    model, tune, reading = read_finetune(str(path))
    assert (model.name, tune.lora_targets, {*reading.unplanned.values()}) == ("qwen3-0.6b", targets, bounds)


# -- keys that decide ----------------------------------------------------------------------------------------

DECIDE = [
    (f"{AXOLOTL}plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n", "exact"),
    (f"{AXOLOTL}cut_cross_entropy: true\n", "at_most"),
    (f"{AXOLOTL}activation_offloading: true\n", "at_most"),
    (f"{AXOLOTL}optimizer: adamw_torch_4bit\n", "at_most"),
    (f"{AXOLOTL}lora_mlp_kernel: true\n", "at_most"),
    (f"{AXOLOTL}optimizer: galore_adamw\n", "unknown"),
    (f"{AXOLOTL}attn_implementation: kernels-community/vllm-flash-attn3\n", "unknown"),
    (f"{AXOLOTL}flex_attention: true\n", "unknown"),
    (f"{AXOLOTL}deepspeed: zero3.json\n", "unknown"),
    (f"{AXOLOTL}fsdp_config: {{{{fsdp_version: 2}}}}\n", "unknown"),
    (f"{AXOLOTL}gpu_count: 4\n", "exact"),
    (f"{AXOLOTL}gpu_count: 4\ndeepspeed: zero3.json\n", "exact"),
    (f"{AXOLOTL}node_count: 2\n", "at_least"),
    (f"{AXOLOTL}qat: {{{{weight_dtype: int4}}}}\n", "at_least"),
    (f"{AXOLOTL}processor_type: AutoProcessor\n", "at_least"),
    (f"{AXOLOTL}use_new_optimizer_offload: true\n", "unknown"),
    (f"{LLAMA_FACTORY}use_galore: true\n", "unknown"),
    (f"{LLAMA_FACTORY}finetuning_type_: x\nuse_badam: true\n", "unknown"),
    (f"{TRL}activation_offloading: true\n", "at_most"),
    (f"{TRL}optim: lomo\n", "unknown"),
    (f"{TRL}activation_offloading: true\npad_to_multiple_of: 64\n", "unknown"),
    (f"{TRL}neftune_noise_alpha: 5\nmy_own_name: x\n", "exact"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "bound"), DECIDE)
def test_a_key_that_decides_bounds_the_plan(text: str, bound: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text.format(model=model))
    plan = planned(str(path), "--gpu", "4090")
    assert plan["bound"] == bound
    assert bool(plan["bounded_by"]) == (bound != "exact")
    assert (plan["timing"] is None) == (bound != "exact")
    code = foretrain("plan", str(path), "--gpu", "4090", "--check").returncode
    assert code == (0 if bound in ("exact", "at_most") else 2)


def test_what_is_typed_stands_in_the_place_of_what_decides(model: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{AXOLOTL}optimizer: galore_adamw\n".format(model=model))
    assert planned(str(path), "--gpu", "4090", "--optim", "adamw_8bit")["bound"] == "exact"


def test_at_most_says_no_more_than_it_knows(tmp_path: Path) -> None:
    path = str(tmp_path / "run.yml")
    offloads = f"{(FIELD / 'yaml' / 'ax_qlora_fa2.yml').read_text()}activation_offloading: true\n"
    Path(path).write_text(offloads)
    large, small = (
        foretrain("plan", path, "--gpu", *card, "--check") for card in (("4090",), ("3060", "--used-by-others=2GB"))
    )
    assert (large.returncode, "Fits. Needs at most" in large.stdout) == (0, True)
    assert (small.returncode, "No verdict. Needs at most" in small.stdout) == (2, True)
    assert "activation_offloading" in small.stdout
    assert "not fit" not in small.stdout


def test_several_cards_carry_the_bound() -> None:
    found = foretrain("plan", str(FIELD / "yaml" / "lf_ppo.yaml"), "--gpu", "4080,4090")
    assert "needs are at least these" in " ".join(found.stdout.split())


# -- scripts -------------------------------------------------------------------------------------------------

TRAINER_SCRIPT = """
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
tok = AutoTokenizer.from_pretrained("qwen3-0.6b")
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("qwen3-0.6b", quantization_config=bits, device_map="auto")
model = get_peft_model(model, LoraConfig(r=8))
data = data.map(lambda row: tok(row["text"], truncation=True, max_length=1536))
Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=1, bf16=True)).train()
merged = AutoModelForCausalLM.from_pretrained("out", device_map="cpu")
"""


def test_keys_that_every_qlora_script_has_are_known(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINER_SCRIPT)
    source, tune, reading = read_finetune(str(path))
    assert (source.name, tune.method, tune.seq_len, tune.training) == ("qwen3-0.6b", "qlora", 1536, "sft")
    assert not reading.unknown
    assert not reading.unplanned
    assert [note.id for note in reading.notes] == ["finetune_read_as"]


@pytest.mark.parametrize(
    "more",
    [
        "class Mine(Trainer):\n    def compute_loss(self, model, inputs): pass\n",
        "teacher = AutoModelForCausalLM.from_pretrained('qwen3-8b')\n",
        "args = TrainingArguments('out', optim=choose())\n",
    ],
)
def test_what_a_script_does_by_itself_decides(more: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    before, _, after = TRAINER_SCRIPT.partition("Trainer(model")
    path.write_text(f"{before}{more}Trainer(model{after}")
    assert {*read_finetune(str(path))[2].unplanned.values()} == {"unknown"}


def test_a_model_that_a_script_chooses_is_said_to_be_open(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    chosen = "import sys\nname = 'gpt2'\nif len(sys.argv) > 1:\n    name = 'qwen3-0.6b'\n"
    path.write_text(chosen + TRAINER_SCRIPT.replace('"qwen3-0.6b"', "name"))
    found = foretrain("plan", str(path), "--gpu", "4090")
    assert (found.returncode, "model_name = name" in found.stderr) == (2, True)


@pytest.mark.parametrize(
    ("end", "merges"),
    [
        ("", False), ("model.merge_and_unload()", True), ("model.save_pretrained_merged('merged', tok)", True),
        ("tok = AutoTokenizer.from_pretrained('out')\nmodel.merge_and_unload()", True),
        ("merged = AutoPeftModelForCausalLM.from_pretrained('out').merge_and_unload()", False),
        ("model = AutoPeftModelForCausalLM.from_pretrained('out')\nmodel.merge_and_unload()", False),
    ],
)  # fmt: skip
def test_a_script_merges_what_it_trained(end: str, merges: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{TRAINER_SCRIPT.rpartition('merged =')[0]}{end}\n")
    found = planned(str(path), "--gpu", "4070")
    assert found["tune"]["merge"] is merges
    assert ("merge" in [phase["phase"] for phase in found["memory"]["phases"]]) is merges


# -- models as they are published ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_infinity", "llama_nan"])
def test_infinity_and_nan_are_read_as_python_writes_them(name: str) -> None:
    plan = planned(str(FIELD / "models" / name), "--method", "lora", "--gpu", "4090", "--batch-size", "1")
    assert plan["counts"]["n_params"] > 1.2e9


def test_a_size_that_is_infinite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": float("inf")}))
    found = foretrain("plan", str(tmp_path), "--method", "lora", "--gpu", "4090")
    assert (found.returncode, "hidden_size" in found.stderr) == (2, True)


def test_a_large_config_is_read(tmp_path: Path) -> None:
    labels = {str(number): "x" * 60 for number in range(50_000)}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "id2label": labels}))
    assert (tmp_path / "config.json").stat().st_size > 3 * 2**20
    assert foretrain("plan", str(tmp_path), "--method", "lora", "--gpu", "4090", "--seq-len", "64").returncode == 0


def test_qlora_of_a_model_in_4_bits_is_that_of_the_model() -> None:
    words = ("--method", "qlora", "--gpu", "4090", "--batch-size", "1", "--seq-len", "256")
    plain, published = (planned(str(FIELD / "models" / name), *words) for name in ("llama_infinity", "llama_bnb4"))
    assert published["memory"] == plain["memory"]
    lora = foretrain("plan", str(FIELD / "models" / "llama_bnb4"), "--method", "lora", "--gpu", "4090")
    assert (lora.returncode, "--method qlora" in lora.stderr) == (2, True)


def test_layers_that_a_copy_keeps_in_16_bits_are_planned(tmp_path: Path) -> None:
    words = ("--method", "qlora", "--gpu", "4090", "--batch-size", "1", "--seq-len", "256")
    needs = {}
    for name, kept in {
        "none": [],
        "head": ["lm_head"],
        "mlp": ["model.layers.1.mlp"],
        "all": ["mlp", "self_attn"],
    }.items():
        quantization = {"load_in_4bit": True, "llm_int8_skip_modules": kept, "bnb_4bit_use_double_quant": True}
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
        needs[name] = max(
            phase["needed_expected_bytes"] for phase in planned(str(tmp_path), *words)["memory"]["phases"]
        )
    mlp = 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]
    assert needs["head"] == needs["none"]
    assert needs["mlp"] - needs["none"] == pytest.approx(mlp * (2 - 0.5), rel=0.02)
    assert needs["all"] - needs["none"] > 2 * (needs["mlp"] - needs["none"])


@pytest.mark.parametrize(
    ("words", "wider"),
    [
        (("hf:unsloth/Qwen3-4B-unsloth-bnb-4bit", "--loop", "trl"), True),
        (("hf:unsloth/Qwen3-4B", "--loop", "unsloth"), True),
        (("hf:unsloth/Qwen3-4B-bnb-4bit", "--loop", "trl"), False),
        (("hf:unsloth/llama-3-8b", "--loop", "unsloth"), False),
    ],
)
def test_a_copy_that_keeps_layers_in_16_bits_has_a_wider_range(words: tuple[str, ...], wider: bool) -> None:
    found = planned(*words, "--method", "qlora", "--gpu", "4090", "--seq-len", "256")
    assert ("four_bits_unnamed" in {note["id"] for note in found["notes"]}) is wider


def test_a_copy_in_4_bits_is_no_model_in_16(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TRL.format(model="unsloth/Qwen3-4B-bnb-4bit"))
    found = foretrain("plan", str(path), "--gpu", "4090")
    assert (found.returncode, "--method qlora" in found.stderr) == (2, True)
    path.write_text(TRL.format(model="unsloth/Qwen3-4B-bnb-4bit") + "load_in_4bit: true\n")
    assert read_finetune(str(path))[1].double_quant


@pytest.mark.parametrize(
    ("name", "text", "key", "bound"),
    [
        ("a.yaml", f"{LLAMA_FACTORY}image_max_pixels: 262144\n", "image_max_pixels = 262144", "at_least"),
        (
            "a.yaml",
            "model: {model}\ntrain_type: lora\nfreeze_vit: true\nuse_logits_to_keep: false\n",
            "freeze_vit",
            "at_least",
        ),
        ("a.py", f"{UNSLOTH}loss.backward()\n", "loop = own", "unknown"),
    ],
)
def test_what_is_not_planned_is_no_verdict(
    name: str, text: str, key: str, bound: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text.format(model=model))
    assert read_file(tmp_path / name).unplanned.get(key) == bound


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "w4_g128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "w4_g64"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "w8"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": False}, "nf4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "w8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            "nvfp4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "w8"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, "w4_g128"),
    ],
)
def test_inference_is_of_the_weights_as_they_are_published(
    quantization: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    assert planned(str(tmp_path), "--inference", "--gpu", "4090")["asked"]["weights"] == weights


def test_modules_left_in_16_bits_are_counted_so(tmp_path: Path) -> None:
    """Names, parts of names and patterns: an attention of two matrices of 16 bits, instead of 4.5."""
    sizes = {}
    for name, kept in {"all": [], "names": ["model.layers.0.self_attn.q_proj"], "part": ["self_attn.q_proj"],
                       "pattern": ["re:model\\.layers\\.0\\..*q_proj", "re:("], "glob": ["*.0.self_attn.q*"]}.items():  # fmt: skip
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": kept}
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
        phase = planned(str(tmp_path), "--inference", "--gpu", "4090")["memory"]["phases"][0]
        sizes[name] = phase["components"][0]["size_bytes"]
    more = {name: size - sizes["all"] for name, size in sizes.items() if name != "all"}
    assert more["names"] == more["pattern"] == more["glob"] > 0
    assert more["part"] == pytest.approx(CONFIG["num_hidden_layers"] * more["names"], abs=4)


@pytest.mark.parametrize("name", ["hf:unsloth/Qwen3-8B-bnb-4bit", "unsloth/Qwen3-8B-unsloth-bnb-4bit"])
def test_inference_of_a_copy_in_4_bits_is_in_4_bits(name: str) -> None:
    found = planned(name, "--inference", "--gpu", "4090")
    assert (found["asked"]["weights"], found["name"]) == ("nf4_dq", "qwen3-8b")


def test_inference_of_weights_that_nobody_here_knows_asks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "aqlm"}}))
    found = foretrain("plan", str(tmp_path), "--inference", "--gpu", "4090")
    assert (found.returncode, "--weights" in found.stderr) == (2, True)
    assert foretrain("plan", str(tmp_path), "--inference", "--gpu", "4090", "--weights", "int4").returncode == 0


def test_training_on_gptq_names_the_way_on() -> None:
    path = str(FIELD / "models" / "llama_gptq")
    found = foretrain("plan", path, "--method", "qlora", "--gpu", "4090")
    assert (found.returncode, "--inference" in found.stderr) == (2, True)
    assert foretrain("plan", path, "--inference", "--gpu", "4090").returncode == 0


LOADED_TWICE = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("{model}", max_seq_length=256, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16)
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=1))
{train}
if False:
    model, tokenizer = FastLanguageModel.from_pretrained("saved", max_seq_length=2048, load_in_4bit=True)
"""


@pytest.mark.parametrize("train", ["trainer.train()", "unsloth_train(trainer)"])
def test_what_is_loaded_after_training_is_not_trained(train: str, tmp_path: Path, model: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADED_TWICE.format(model=model, train=train))
    _, tune, reading = read_finetune(str(script))
    assert (tune.method, tune.seq_len, dict(reading.unplanned)) == ("lora", 256, {})


@pytest.mark.parametrize(("before", "after"), [
    ("FastLanguageModel", "FastVisionModel"),
    ("trainer =", "processor = AutoProcessor.from_pretrained('x')\ntrainer ="),
])  # fmt: skip
def test_training_on_images_is_more_than_is_planned(before: str, after: str, tmp_path: Path, model: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADED_TWICE.format(model=model, train="trainer.train()").replace(before, after))
    assert set(read_finetune(str(script))[2].unplanned.values()) == {"at_least"}


def test_two_models_or_no_adapters_have_no_verdict(tmp_path: Path, model: str) -> None:
    whole = LOADED_TWICE.format(model=model, train="trainer.train()")
    adapters = "model = FastLanguageModel.get_peft_model(model, r=16)\n"
    other = f"other, _ = FastLanguageModel.from_pretrained(model_name='{model}/..')\n"
    for number, text in enumerate((whole.replace(adapters, ""), whole.replace(adapters, other + adapters))):
        script = tmp_path / f"{number}.py"
        script.write_text(text)
        assert set(read_finetune(str(script))[2].unplanned.values()) == {"unknown"}
    generates = tmp_path / "generates.py"
    generates.write_text("".join(whole.partition("trainer =")[0].split(adapters)) + "model.generate(x)\n")
    with pytest.raises(UserError, match="no call that decides a fine-tuning run"):
        read_finetune(str(generates))


HEAD = "from trl import DPOTrainer, SFTConfig, SFTTrainer\nfrom peft import LoraConfig, PrefixTuningConfig, get_peft_model\n"
LOADS = "from transformers import AutoModelForCausalLM, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('{model}')\n"
LONG = "per_device_train_batch_size=64, max_length=8192"
TRAINS = "SFTTrainer(model=m, args=args).train()\n"

TAKEN = [
    (f"cfg = dict({LONG})\nargs = SFTConfig(**cfg)\n", {"batch_size": 64, "seq_len": 8192}),
    ("args = SFTConfig(**{{'per_device_train_batch_size': 64, 'max_length': 8192}})\n", {"batch_size": 64, "seq_len": 8192}),
    ("args = SFTConfig(per_device_train_batch_size=1, max_length=512)\nargs.max_length = 8192\n", {"seq_len": 8192}),
    ("class My(DPOTrainer):\n    pass\nargs = TrainingArguments()\nMy(model=m, args=args)\n", {"training": "dpo"}),
    ("T = DPOTrainer\nargs = TrainingArguments()\nT(model=m, args=args)\n", {"training": "dpo"}),
    ("from trl import GRPOTrainer as T\nargs = SFTConfig()\nT(model=m, args=args)\n", {"training": "grpo"}),
    ("if False:\n    LoraConfig(r=8)\n    SFTConfig(max_length=128)\nargs = SFTConfig(max_length=512)\n",
     {"method": "full", "seq_len": 512}),
    ("m.gradient_checkpointing_enable()\nargs = SFTConfig()\n", {"gradient_checkpointing": True}),
    ("args = TrainingArguments(per_device_train_batch_size=2)\nfor x in data:\n    m(x).loss.backward()\n", {"loop": "own"}),
]  # fmt: skip
WITHHELD = [
    "n = 128\nn = 8192\nargs = SFTConfig(max_length=n)\n", "n = 1\nn *= 64\nargs = SFTConfig(per_device_train_batch_size=n)\n",
    "for n in (32, 64):\n    args = SFTConfig(per_device_train_batch_size=n)\n",
    "n = 1\ndef go(n):\n    return SFTConfig(per_device_train_batch_size=n)\nargs = go(64)\n",
    "args = SFTConfig(**load())\n", "m = get_peft_model(m, PrefixTuningConfig())\nargs = SFTConfig()\n",
    "LoraConfig(r=8)\nargs = SFTConfig()\n", "m = m.half()\nargs = SFTConfig()\n",
    f"first = SFTConfig({LONG})\nargs = SFTConfig(per_device_train_batch_size=1, max_length=512)\n",
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), TAKEN)
def test_what_a_script_says_in_its_own_way_is_read(
    text: str, wanted: dict[str, Any], tmp_path: Path, model: str
) -> None:
    script = tmp_path / "script.py"
    trains = "" if "loop" in wanted or "T(" in text or "My(" in text else TRAINS
    script.write_text((HEAD + LOADS + text).format(model=model) + trains)
    found = read_finetune(str(script))[1].model_dump()
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("text", WITHHELD)
def test_what_would_have_to_be_run_leaves_no_verdict(text: str, tmp_path: Path, model: str) -> None:
    script = tmp_path / "script.py"
    script.write_text((HEAD + LOADS).format(model=model) + text + TRAINS)
    assert "unknown" in read_finetune(str(script))[2].unplanned.values()

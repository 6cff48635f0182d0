"""Configs of other trainers, read as data: each format, the command line on top, and bad input.

What is read is compared with transformers' and TRL's own classes where they take the same keys.
"""

import dataclasses
import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from foretrain.base import messages
from foretrain.base.errors import ExitCode, UserError
from foretrain.config.finetune import table
from foretrain.config.finetune.formats import FORMATS
from foretrain.config.finetune.options import OPTION_OF, PEFT_TARGETS, FineTune
from foretrain.config.finetune.read import format_of, is_finetune_file, read_file, read_finetune
from foretrain.config.finetune.table import FileSettings, Table, known_keys
from foretrain.config.finetune.words import parse_words
from foretrain.config.finetune.yaml_file import MAX_BYTES
from tests.kit.command import refused
from tests.kit.finetune_files import AXOLOTL, LLAMA_FACTORY

KEYS = Path(table.__file__).with_name("keys.toml")

LLAMA_FACTORY_V1 = """
model: Qwen/Qwen3-0.6B
model_class: llm
peft_config: {name: lora, r: 16, target_modules: all, lora_dropout: 0.05}
quant_config: {name: bnb, quantization_bit: 4}
dist_config: {name: fsdp2}
train_dataset: data.yaml
output_dir: out
micro_batch_size: 2
global_batch_size: 16
max_steps: 10
"""

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: mine/data
use_peft: true
lora_r: 8
max_length: 4096
packing: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs: {use_reentrant: true}
optim: paged_adamw_8bit
eval_strategy: "no"
learning_rate: 2.0e-05
"""

TORCHTUNE = """
# To launch on two devices:
#   tune run --nproc_per_node 2 lora_finetune_distributed --config mine
output_dir: out
length: 8192
model:
  _component_: torchtune.models.llama3_2.qlora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: tokenizer.model
  max_seq_len: ${length}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, model_type: LLAMA3_2}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: True}
batch_size: 4
epochs: 1
optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4}
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: True
"""

UNSLOTH = """
model: unsloth/Llama-3.2-1B-Instruct
data: {dataset: mine/data}
training:
  training_type: lora
  max_seq_length: 4096
  load_in_4bit: false
  gradient_checkpointing: unsloth
  batch_size: 1
  packing: true
lora: {lora_r: 32, use_dora: true}
logging: {enable_wandb: true}
"""

SCRIPT = """
import os
from unsloth import FastLanguageModel, is_bfloat16_supported
from trl import SFTTrainer, SFTConfig
max_seq_length = 2048
os.system("touch ran")
model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/Llama-3.2-3B-Instruct", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model, r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0, use_gradient_checkpointing="unsloth",
    random_state=3407)
trainer = SFTTrainer(model=model, train_dataset=load(), args=SFTConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=8 // 2, optim="adamw_8bit",
    bf16=is_bfloat16_supported(), fp16=not is_bfloat16_supported(), learning_rate=float(os.environ["LR"]),
    max_grad_norm=0.3))
"""

TRANSFORMERS_SCRIPT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16, quantization_config=quantized)
model = get_peft_model(model, LoraConfig(r=64, target_modules="all-linear"))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=16, bf16=True, gradient_checkpointing=True)
"""

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config: {fsdp_version: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def read(text: str, file: Any, name: str = "mine.yaml") -> FileSettings:
    return read_file(file(text, name))


def finetune(found: FileSettings) -> FineTune:
    return FineTune.model_validate(found.values)


# -- each format ---------------------------------------------------------------------------------------------


def test_axolotl(file: Any) -> None:
    found = read(AXOLOTL, file)
    f = finetune(found)
    assert (found.format, found.model, f.loop) == ("axolotl", "NousResearch/Llama-3.2-1B", "axolotl")
    assert (f.method, f.lora_r, f.lora_targets, f.lora_dropout) == ("qlora", 32, "all-linear", 0.05)
    assert f.lora_saved == "embed_tokens,lm_head"
    assert (f.seq_len, f.batch_size, f.grad_accum, f.epochs) == (2048, 2, 4, 1.0)
    assert (f.optim, f.packing, f.attn, f.liger) == ("adamw_8bit", True, "flash_attention_2", True)
    assert (f.gradient_checkpointing, f.reentrant, f.cut_cross_entropy) == (True, True, True)
    assert (f.amp, f.dtype, f.evaluate, f.eval_batch_size) == ("bf16", "bfloat16", True, 2)
    assert found.unknown == ["context_paralel_size"]
    assert found.unplanned == {
        "deepspeed": "unknown",
        "liger_rms_norm = False": "at_least",
        "liger_glu_activation = False": "at_least",
    }
    assert found.sharding == "deepspeed"
    assert {"wandb_project", "lora_alpha", "learning_rate", "datasets"} <= {*found.harmless}
    assert found.origins["lora_targets"] == "lora_target_linear"


def test_axolotl_defaults_are_axolotls(file: Any) -> None:
    f = finetune(read("base_model: gpt2\nmicro_batch_size: 3\nbatch_size: 12\ndatasets: []\n", file))
    assert (f.method, f.seq_len, f.batch_size, f.grad_accum, f.epochs) == ("full", 512, 3, 4, 1.0)
    assert (f.amp, f.gradient_checkpointing, f.evaluate, f.packing) == ("bf16", False, False, False)


def test_an_adapter_that_is_no_lora_is_said_to_be_planned_as_one(file: Any) -> None:
    found = read("base_model: gpt2\nmicro_batch_size: 1\nadapter: ia3\n", file)
    assert (finetune(found).method, [*found.unplanned]) == ("lora", ["adapter = ia3 (planned as lora)"])
    found = read(LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), file)
    assert "finetuning_type = oft (planned as lora)" in found.unplanned


@pytest.mark.parametrize(
    ("keys", "amp", "dtype"),
    [
        ("bf16: true", "bf16", "bfloat16"),
        ("bf16: false\nfp16: true", "fp16", "float16"),
        ("fp16: true", "fp16", "float16"),
        ("bfloat16: true", "no", "bfloat16"),
        ("bf16: false", "no", "float32"),
    ],
)
def test_axolotl_precision(keys: str, amp: str, dtype: str, file: Any) -> None:
    f = finetune(read(f"base_model: gpt2\nmicro_batch_size: 1\n{keys}\n", file))
    assert (f.amp, f.dtype) == (amp, dtype)


def test_llama_factory(file: Any) -> None:
    found = read(LLAMA_FACTORY, file)
    f = finetune(found)
    assert (found.format, found.model, f.loop) == ("llama-factory", "Qwen/Qwen3-4B", "llama-factory")
    assert (f.method, f.lora_r, f.lora_targets, f.seq_len) == ("qlora", 8, "all-linear", 1024)
    assert (f.batch_size, f.grad_accum, f.epochs, f.amp, f.dtype) == (1, 8, 3.0, "bf16", "bfloat16")
    assert (f.gradient_checkpointing, f.reentrant, f.packing, f.double_quant) == (True, True, False, True)
    assert not found.unknown
    assert not found.unplanned


def test_llama_factory_trains_full_weights_in_float32(file: Any) -> None:
    text = "model_name_or_path: gpt2\nstage: pt\nfinetuning_type: full\nlearning_rate: 1e-5\nbf16: true\n"
    f = finetune(read(text, file))
    assert (f.method, f.dtype, f.amp, f.packing, f.seq_len) == ("full", "float32", "bf16", True, 2048)
    pure = finetune(read(f"{text}pure_bf16: true\ndisable_gradient_checkpointing: true\n", file))
    assert (pure.dtype, pure.gradient_checkpointing) == ("bfloat16", False)


def test_llama_factory_names_what_is_not_planned(file: Any) -> None:
    found = read(f"{LLAMA_FACTORY}\nuse_apollo: true\nref_model: other\n".replace("stage: sft", "stage: dpo"), file)
    assert (finetune(found).training, found.unplanned) == ("dpo", {"use_apollo = True": "unknown"})
    assert "ref_model" in found.harmless
    eight = read(LLAMA_FACTORY.replace("quantization_bit: 4", "quantization_bit: 8"), file)
    assert (finetune(eight).method, finetune(eight).load_in_8bit, eight.unplanned) == ("lora", True, {})
    other = read(LLAMA_FACTORY.replace("quantization_bit: 4", "quantization_bit: 3"), file)
    assert other.unplanned == {"quantization_bit = 3": "unknown"}


def test_llama_factory_version_1(file: Any) -> None:
    found = read(LLAMA_FACTORY_V1, file)
    f = finetune(found)
    assert (found.format, found.model, found.sharding) == ("llama-factory-v1", "Qwen/Qwen3-0.6B", "fsdp")
    assert (f.method, f.lora_r, f.lora_targets, f.lora_dropout) == ("qlora", 16, "all-linear", 0.05)
    assert (f.batch_size, f.grad_accum, f.seq_len, f.max_steps) == (2, 8, 2048, 10)
    assert f.gradient_checkpointing
    assert not found.unknown


def test_trl(file: Any) -> None:
    found = read(TRL, file)
    f = finetune(found)
    assert (found.format, found.model, f.loop) == ("trl", "Qwen/Qwen2.5-0.5B", "trl")
    assert (f.method, f.lora_r, f.lora_dropout, f.seq_len, f.packing) == ("lora", 8, 0.05, 4096, True)
    assert (f.dtype, f.amp, f.attn, f.optim) == ("bfloat16", "bf16", "flash_attention_2", "paged_adamw_8bit")
    assert (f.gradient_checkpointing, f.reentrant, f.evaluate) == (True, True, False)
    assert found.peft_targets
    assert not found.unknown


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_trl_as_trl_reads_it(file: Any) -> None:
    trl = pytest.importorskip("trl")
    path = file(TRL.replace("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"))
    parser = trl.TrlParser((trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments))
    config, model, _ = parser.parse_args_and_config(["--config", str(path), "--use_cpu", "--bf16", "false"])
    f = finetune(read_file(path))
    assert f.batch_size == config.per_device_train_batch_size
    assert (f.grad_accum, f.seq_len, f.packing) == (
        config.gradient_accumulation_steps, config.max_length, config.packing,
    )  # fmt: skip
    assert (f.gradient_checkpointing, f.optim) == (bool(config.activation_checkpointing), config.optim.value)
    assert (f.lora_r, f.lora_dropout, f.dtype) == (model.lora_r, model.lora_dropout, model.dtype)
    assert (f.attn, f.max_grad_norm, f.epochs) == (
        model.attn_implementation, config.max_grad_norm, config.num_train_epochs,
    )  # fmt: skip


def test_torchtune(file: Any) -> None:
    found = read(TORCHTUNE, file)
    f = finetune(found)
    assert (found.format, found.model, f.loop) == ("torchtune", "llama-3.2-1b", "torchtune")
    assert (f.method, f.lora_r) == ("qlora", 64)
    assert f.lora_targets == "q_proj,v_proj,o_proj,gate_proj,down_proj,up_proj"
    assert (f.batch_size, f.grad_accum, f.epochs, f.seq_len, f.packing) == (4, 8, 1, 8192, True)
    assert (f.optim, f.dtype, f.amp, f.max_grad_norm) == ("adamw_torch_fused", "bfloat16", "no", 0.0)
    assert f.gradient_checkpointing
    assert (found.cards, found.sharding) == (2, "fsdp")
    recipe = "recipe = lora_finetune_distributed"
    assert found.unplanned == {"enable_activation_offloading = True": "at_most", recipe: "unknown"}
    assert found.unknown == ["length"]


def test_unsloth_sections(file: Any) -> None:
    found = read(UNSLOTH, file)
    f = finetune(found)
    assert (found.format, found.model, f.loop) == ("unsloth", "unsloth/Llama-3.2-1B-Instruct", "unsloth")
    assert (f.method, f.lora_r, f.seq_len, f.batch_size, f.grad_accum) == ("dora", 32, 4096, 1, 4)
    assert (f.gradient_checkpointing, f.packing, f.amp) == (True, True, "auto")
    assert (f.unsloth, f.offload_checkpoints) == (True, True)
    assert not found.unknown
    assert not found.unplanned


def test_unsloth_checkpoints_to_the_host_by_default(file: Any) -> None:
    kept = {
        value: finetune(read(UNSLOTH.replace("gradient_checkpointing: unsloth", value), file)).offload_checkpoints
        for value in ("", "gradient_checkpointing: true", "gradient_checkpointing: unsloth")
    }
    assert list(kept.values()) == [True, False, True]


def test_another_loop_runs_no_functions_of_unsloth(file: Any) -> None:
    path = str(file(UNSLOTH))
    assert read_finetune(path)[1].unsloth
    assert not read_finetune(path, ["--loop", "trl"])[1].unsloth


def test_llama_factory_loads_by_unsloth(file: Any) -> None:
    f = finetune(read(LLAMA_FACTORY + "use_unsloth: true\n", file))
    assert (f.loop, f.unsloth, f.offload_checkpoints) == ("llama-factory", True, True)
    assert not finetune(read(LLAMA_FACTORY, file)).unsloth


def test_a_script_of_unsloth_is_read_and_never_run(file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read(SCRIPT, file, "train.py")
    f = finetune(found)
    assert (found.format, found.model) == ("unsloth", "unsloth/Llama-3.2-3B-Instruct")
    assert (f.method, f.lora_r, f.lora_targets, f.seq_len) == ("qlora", 16, "q_proj,v_proj", 2048)
    assert (f.batch_size, f.grad_accum, f.optim, f.amp, f.max_grad_norm) == (2, 4, "adamw_8bit", "bf16", 0.3)
    assert not found.unplanned
    assert not found.unknown
    assert not (tmp_path / "ran").exists()


def test_a_notebook_is_read_as_its_code_cells(file: Any) -> None:
    def cell(kind: str, code: str) -> dict[str, Any]:
        return {"cell_type": kind, "metadata": {}, "source": code.splitlines(keepends=True)}

    shell = "%%capture\nimport os\nif True:\n    !pip install unsloth \\\n      trl==0.22\n%env A=1"
    first, rest = SCRIPT.split("model, tokenizer", 1)
    cells = [
        cell("markdown", "# FastLanguageModel.from_pretrained('another/model')"), cell("code", shell),
        cell("code", "%%bash\nfor a in b; do echo $a; done"), cell("code", first),
        cell("code", f"model, tokenizer{rest}"),
    ]  # fmt: skip
    path = file(json.dumps({"cells": cells, "nbformat": 4, "metadata": {"outputs": "x" * 2**19}}), "train.ipynb")
    assert is_finetune_file(str(path))
    noted, script = read_file(path), read(SCRIPT, file, "train.py")
    assert (noted.model, noted.values, noted.unplanned) == (script.model, script.values, script.unplanned)
    with pytest.raises(UserError, match="no notebook"):
        read_file(file(json.dumps({"cells": [3]}), "broken.ipynb"))


def test_a_script_of_transformers_and_peft(file: Any) -> None:
    found = read(TRANSFORMERS_SCRIPT, file, "train.py")
    f = finetune(found)
    assert (found.format, found.model, f.method, f.lora_r) == ("trainer", "Qwen/Qwen3-8B", "qlora", 64)
    assert (f.lora_targets, f.batch_size, f.amp, f.dtype) == ("all-linear", 16, "bf16", "bfloat16")
    assert f.double_quant
    assert f.gradient_checkpointing


def test_a_script_of_trl(file: Any) -> None:
    text = """
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
args = SFTConfig(max_length=None, per_device_train_batch_size=1, activation_checkpointing=False)
SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, peft_config=LoraConfig(use_dora=True), compute_metrics=mine).train()
"""
    model, f, reading = read_finetune(str(file(text, "train.py")))
    assert (model.name, reading.format, f.loop) == ("qwen3-0.6b", "trl", "trl")
    assert (f.method, f.lora_r, f.lora_dropout, f.lora_targets) == ("dora", 8, 0.0, "q_proj,v_proj")
    assert (f.batch_size, f.gradient_checkpointing, f.keeps_logits, f.dtype) == (1, False, True, "float32")
    assert not reading.unknown


@pytest.mark.parametrize("call", ['SFTTrainer("a/b", args=args)', "SFTTrainer(model=NAME, args=args)"])
def test_a_trainer_of_trl_takes_a_name_as_its_model(call: str, file: Any) -> None:
    loads = 'model_init_kwargs={"torch_dtype": "bfloat16", "attn_implementation": "flash_attention_2"}'
    text = f'from trl import SFTConfig, SFTTrainer\nNAME = "a/b"\nargs = SFTConfig(output_dir="o", {loads})\n{call}\n'
    found = read(text, file, "train.py")
    f = finetune(found)
    assert (found.model, f.dtype, f.attn, found.unplanned) == ("a/b", "bfloat16", "flash_attention_2", {})


def test_accelerate_is_a_part(file: Any) -> None:
    found = read(ACCELERATE, file, "accelerate.yaml")
    assert (found.format, found.cards, found.sharding, found.values) == ("accelerate", 4, "fsdp", {"amp": "bf16"})
    _, f, reading = read_finetune("qwen3-0.6b", ["--accelerate", str(found.source)])
    assert (f.amp, reading.cards, reading.sharding) == ("bf16", 4, "fsdp")
    assert {note.id for note in reading.notes} >= {"finetune_cards", "finetune_sharding"}
    assert (f.world, dict(reading.unplanned)["num_processes = 4"]) == (1, "at_least")


def test_cards_of_a_file_train_with_ddp_where_no_key_shards(file: Any) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n"
    path = str(file(text, "accelerate.yaml"))
    _, f, reading = read_finetune("qwen3-0.6b", ["--accelerate", path])
    assert (f.world, f.amp, reading.origins["world"]) == (2, "bf16", "num_processes")
    assert not reading.unplanned
    assert read_finetune("qwen3-0.6b", ["--accelerate", path, "--world", "4"])[1].world == 4


def test_training_arguments_as_transformers_saves_them(file: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=0.5,
        activation_checkpointing=True, optim="adafactor", num_train_epochs=2, max_steps=-1, use_cpu=True,
        per_device_eval_batch_size=7, eval_strategy="steps", eval_steps=10, eval_accumulation_steps=4,
    )  # fmt: skip
    found = read(json.dumps(args.to_dict()), file, "training_args.json")
    f = finetune(found)
    assert found.format == "trainer"
    assert not found.unknown
    assert found.unplanned == {"use_cpu = True": "unknown"}
    assert (f.batch_size, f.grad_accum, f.max_grad_norm) == (3, 5, args.max_grad_norm)
    assert (f.gradient_checkpointing, f.optim, f.epochs, f.max_steps) == (True, "adafactor", 2, 0)
    assert (f.eval_batch_size, f.evaluate, f.eval_accumulation_steps) == (7, True, 4)


def test_defaults_are_those_of_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {each.name: each.default for each in dataclasses.fields(transformers.TrainingArguments)}
    f = FineTune()
    assert f.batch_size == theirs["per_device_train_batch_size"]
    assert (f.grad_accum, f.epochs) == (theirs["gradient_accumulation_steps"], theirs["num_train_epochs"])
    assert (f.max_grad_norm, f.gradient_checkpointing) == (
        theirs["max_grad_norm"],
        bool(theirs.get("activation_checkpointing", theirs["gradient_checkpointing"])),
    )
    assert f.eval_batch_size == theirs["per_device_eval_batch_size"]


@pytest.mark.parametrize("owner", ["TrainingArguments", "SFTConfig", "ModelConfig"])
def test_every_argument_of_theirs_is_known(owner: str) -> None:
    module = pytest.importorskip("transformers" if owner == "TrainingArguments" else "trl")
    keys = {each.name: each.default for each in dataclasses.fields(getattr(module, owner)) if each.init}
    plain = {name: value for name, value in keys.items() if isinstance(value, str | int | float | bool | None)}
    found = FileSettings("trl", "theirs")
    FORMATS["trl"].read(Table(plain, found), "")
    assert not found.unknown


def test_peft_chooses_the_modules_where_nobody_does() -> None:
    peft = pytest.importorskip("peft")
    theirs = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for name, modules in PEFT_TARGETS.items():
        assert modules.split(",") == theirs[name], name


def test_formats_are_told_by_their_keys(file: Any) -> None:
    texts = {"axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY, "llama-factory-v1": LLAMA_FACTORY_V1, "trl": TRL,
             "torchtune": TORCHTUNE, "unsloth": UNSLOTH, "accelerate": ACCELERATE}  # fmt: skip
    assert {read(text, file).format: text for text in texts.values()} == texts
    assert format_of({"per_device_train_batch_size": 1, "output_dir": "x", "weight_decay": 0}, "x") == "trainer"
    assert {*FORMATS} == {*texts, "trainer", *tomllib.loads(KEYS.read_text("utf-8"))["own"]}


def test_known_keys_are_in_one_list_each() -> None:
    for group in (
        "training",
        "adapter",
        "trainer",
        "accelerate",
        "axolotl",
        "llama-factory",
        "trl",
        "torchtune",
        "unsloth",
    ):
        lists = tomllib.loads(KEYS.read_text("utf-8"))[group]
        named = [key for keys in lists.values() for key in keys.split()]
        assert len(named) == len({*named})
        assert {*lists} <= {"harmless", "at_least", "at_most", "decisive"}
        assert {*known_keys(group)} == {*named}


# -- a file and the command line together --------------------------------------------------------------------


def test_words_count_over_the_file(file: Any) -> None:
    words = ["--method", "lora", "--lora-r=8", "--seq_len", "4096", "--no-packing", "--gradient-checkpointing", "false"]
    model, f, reading = read_finetune(str(file(AXOLOTL)), words)
    assert model.name == "llama-3.2-1b"
    assert (f.method, f.lora_r, f.seq_len, f.packing, f.gradient_checkpointing) == ("lora", 8, 4096, False, False)
    assert (f.batch_size, f.loop) == (2, "axolotl")
    assert (reading.origins["lora_r"], reading.origins["batch_size"]) == ("--lora-r", "micro_batch_size")
    assert [note.id for note in reading.notes] == [
        "finetune_read_as", "finetune_unknown", "finetune_unplanned", "finetune_sharding",
    ]  # fmt: skip


def test_a_model_and_words_alone() -> None:
    words = [
        "--method",
        "qlora",
        "--batch-size",
        "2",
        "--gradient-checkpointing",
        "--optim=paged_adamw",
        "--attn",
        "eager",
    ]
    model, f, reading = read_finetune(
        "hf:Qwen/Qwen3-0.6B", [*words, "--bf16", "--max_seq_length=512", "--use-liger-kernel"]
    )
    assert (model.name, reading.format, reading.notes) == ("qwen3-0.6b", "", ())
    assert (f.method, f.batch_size, f.optim, f.attn, f.amp) == ("qlora", 2, "paged_adamw_32bit", "eager", "bf16")
    assert (f.seq_len, f.liger, f.gradient_checkpointing) == (512, True, True)


def test_another_model_than_the_files(file: Any) -> None:
    path = file(AXOLOTL.replace("NousResearch/Llama-3.2-1B", "./not-here"))
    assert read_finetune(str(path), ["--model", "qwen3-4b"])[0].name == "qwen3-4b"


def test_a_model_beside_the_file(file: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model, _, _ = read_finetune(str(file(AXOLOTL.replace("NousResearch/Llama-3.2-1B", "./model"))))
    assert model.config == config


def test_peft_targets_of_a_trl_file(file: Any) -> None:
    _, f, reading = read_finetune(str(file(TRL)))
    assert (f.lora_targets, reading.origins["lora_targets"]) == ("q_proj,v_proj", "peft")


def test_a_length_that_nobody_gives_is_said(file: Any) -> None:
    text = "output_dir: x\nper_device_train_batch_size: 2\nmodel_name_or_path: gpt2\n"
    assert [note.id for note in read_finetune(str(file(text)))[2].notes] == ["finetune_read_as", "finetune_seq_len"]


def test_notes_have_texts(file: Any) -> None:
    _, _, reading = read_finetune(str(file(TORCHTUNE)))
    for note in reading.notes:
        assert "mine.yaml" in messages.say(f"note.{note.id}", **note.values)


def test_which_files_may_be_a_trainers_config(file: Any, tmp_path: Path) -> None:
    assert is_finetune_file(str(file(AXOLOTL)))
    assert is_finetune_file(str(file(SCRIPT, "train.py")))
    assert is_finetune_file(str(file('{"optim": "sgd"}', "args.json")))
    assert not is_finetune_file(str(file("batch_size = 12\n", "nanogpt.py")))
    assert not is_finetune_file(str(file('{"model_type": "llama"}', "config.json")))
    assert not is_finetune_file("qwen3-0.6b")
    assert not is_finetune_file(str(tmp_path))


# -- bad input -----------------------------------------------------------------------------------------------

_BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(9))}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
_MERGES = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [*{old}, *{old}], {new}1: 1}}\n"
    for old, new in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)
)
BAD: list[tuple[str, str]] = [
    ("", "holds no keys"),
    ("# nothing\n", "holds no keys"),
    ("{}", "is empty"),
    ("- base_model: x\n- y\n", "holds no keys"),
    ("just words", "holds no keys"),
    (_BOMB, "aliases"),
    (_MERGES, "aliases"),
    ("a: &a [*a]\n", "aliases"),
    ("a: " + "[" * 5000 + "]" * 5000, "nested"),
    ("{" * 100_000, "nested"),
    ('{"a":' * 20_000 + "1" + "}" * 20_000, "nested"),
    ("base_model: !!python/object/apply:os.system ['touch ran']\n", "tag"),
    ("base_model: !mine x\n", "tag"),
    ("base_model: !!binary aGVsbG8=\n", "tag"),
    ("base_model: x\nlora_r: 8\nlora_r: 16\n", "lora_r appears twice"),
    ('{"lora_r": 8, "lora_r": 16}', "lora_r appears twice"),
    ("base_model: [unclosed\n", "not YAML"),
    ("base_model: 2024-99-99\n", "not YAML"),
    ("? [a, b]\n: c\n", "in the place of a name"),
    ("\tbase_model: x\n", "not YAML"),
    ("nothing_known: 1\nat_all: 2\n", "--format trainer"),
    ("per_device_train_batch_sze: 1\n", "did you mean per_device_train_batch_size"),
    (AXOLOTL.replace("lora_r: 32", "lora_r: -4"), "lora_r = -4"),
    (AXOLOTL.replace("lora_r: 32", "lora_r: .nan"), "lora_r = nan"),
    (AXOLOTL.replace("lora_r: 32", "lora_r: many"), "lora_r = 'many'"),
    (AXOLOTL.replace("lora_r: 32", "lora_r: 8.5"), "lora_r = 8.5"),
    (AXOLOTL.replace("lora_dropout: 0.05", "lora_dropout: 1.0"), "lora_dropout = 1.0"),
    (AXOLOTL.replace("sequence_len: 2048", "sequence_len: 1e30"), "sequence_len"),
    (AXOLOTL.replace("sequence_len: 2048", "sequence_len: [1]"), "sequence_len = a list"),
    (AXOLOTL.replace("sample_packing: true", "sample_packing: perhaps"), "sample_packing"),
    (AXOLOTL.replace("load_in_4bit: true", "load_in_4bit: 7"), "load_in_4bit = 7"),
    (f"{AXOLOTL}\nfp8: true\n", "fp8"),
    (f"{AXOLOTL}\nload_in_8bit: true\n", "load_in_8bit"),
    ("model: qwen3-0.6b\nmethod: qlora\nfp8: true\n", "fp8"),
    ("model: qwen3-0.6b\nmethod: lora\nbf16: true\nfp16: true\n", "both true"),
    ("model: qwen3-0.6b\nmethod: lora\nlora_r: NaN\n", "lora_r"),
    ('{"model": "qwen3-0.6b", "method": "lora", "max_grad_norm": NaN}', "max_grad_norm = nan"),
    ('{"model": "qwen3-0.6b", "method": "lora", "epochs": Infinity}', "epochs = inf"),
    (AXOLOTL.replace("base_model: NousResearch/Llama-3.2-1B", "base_model: [a]"), "base_model = a list"),
    (TORCHTUNE.replace("checkpointer: {", "checkpointer: {").replace("optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4}", "optimizer: 5"), "optimizer"),
    ("per_device_train_batch_size: 1\noptim: sgd\n", "names no model"),
    ("model_name_or_path: nothing-here\nper_device_train_batch_size: 1\n", "nothing-here"),
    ("model_name_or_path: x/y\nexport_dir: out\ntemplate: qwen3\nfinetuning_type: lora\n", "does not train"),
    ("model_name_or_path: x/y\nstage: sft\ndo_predict: true\nlearning_rate: 1.0e-4\nfinetuning_type: lora\n", "does not train"),
    ("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n", "give it together with a model"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_files_are_one_sentence(number: int, file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, named = BAD[number]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        read_finetune(str(file(text)))
    said = str(error.value)
    assert error.value.exit_code is ExitCode.USAGE
    assert named in said
    assert "mine.yaml" in said
    assert "\n" not in said
    assert len(said) < 500
    assert not (tmp_path / "ran").exists()


ANYTHING: list[Any] = [
    None, True, False, 0, 1, -1, 8, 10**30, 1.5, float("nan"), float("inf"), "", "auto", "no", "1e-4", "bf16", "x" * 200,
    "\x1b[31m", [], ["q_proj"], [1], {}, {1: 2}, {"_component_": "a.b.lora_x"}, [{"packed": True}], "${a}", [[1]],
    {"name": "lora", "r": 4}, {"use_reentrant": True}, {"use_reentrant": [1]}, "qlora", "lora",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_any_value_of_any_key_is_read_or_refused_with_a_sentence(name: str) -> None:
    draw = random.Random(name)
    texts = {"axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY, "llama-factory-v1": LLAMA_FACTORY_V1, "trl": TRL,
             "torchtune": TORCHTUNE, "unsloth": UNSLOTH, "accelerate": ACCELERATE, "trainer": TRL}  # fmt: skip
    own = tomllib.loads(KEYS.read_text("utf-8"))["own"].get(name, {"options": {}})
    texts[name] = texts.get(name) or " ".join(
        f"{key}:" for key in [*own["options"].values(), own["tells"], own["model"]]
    )
    keys = {*FORMATS[name].keys, *re.findall(r"([\w.]+):", texts[name].replace(" ", ": "))}
    keys = sorted({*keys, *OPTION_OF, "load_in_8bit", "fp16", "fp8"})
    refused = 0
    for _ in range(1500):
        table = {key: draw.choice(ANYTHING) for key in draw.sample(keys, draw.randint(1, 8))}
        found = FileSettings(name, "mine.yaml")
        try:
            FORMATS[name].read(Table(table, found), "")
            FineTune.model_validate(found.values)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(error).isprintable()
        assert all(each.isprintable() for each in (*found.unknown, *found.unplanned, *found.harmless))
    assert 0 < refused < 1500


def test_ten_megabytes_are_refused(file: Any) -> None:
    path = file("a: 1\n" * 2_000_000)
    with refused(code=ExitCode.USAGE, match="larger than"):
        read_file(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00\x01\x02", bytes(range(256))])
def test_binary_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with refused(code=ExitCode.USAGE):
        read_file(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = (", "not Python"),
        ("x = 1\n", "no call"),
        ("FastLanguageModel.from_pretrained(" + "(" * 5000 + ")" * 5000 + ")", ""),
        ("get_peft_model(m, r=-3)\nSFTConfig(bf16=True)\nFastModel.from_pretrained('x/y')\n", "r = -3"),
        ("TrainingArguments(bf16=True, fp16=True)\n", "both true"),
    ],
)
def test_bad_scripts_are_one_sentence(text: str, named: str, file: Any) -> None:
    with refused(code=ExitCode.USAGE) as error:
        read_file(file(text, "train.py"))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--methd", "qlora"], "--method"),
        (["--lora-rnk", "8"], "--lora-rank"),
        (["--zzzzzz"], "No such option"),
        (["lora"], "'lora'"),
        (["--method", "qlra"], "method = 'qlra'"),
        (["--lora-r", "-8"], "lora_r = '-8'"),
        (["--lora-r"], "needs a value"),
        (["--lora-r", "--packing"], "needs a value"),
        (["--packing=maybe"], "packing"),
        (["--seq-len", "1e99"], "seq_len"),
        (["--dtype", "fp8"], "dtype"),
        (["--optim", "lion_8bit"], "optim"),
        (["--lora-dropout", "nan"], "lora_dropout"),
        (["--no-lora-r"], "No such option"),
    ],
)
def test_bad_words_are_one_sentence(words: list[str], named: str) -> None:
    with refused(code=ExitCode.USAGE) as error:
        read_finetune("qwen3-0.6b", words)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_word_of_every_option_is_taken() -> None:
    f = FineTune()
    words = [f"--{name}={value if value != '' else 'lm_head'}" for name, value in f.model_dump().items()]
    values = parse_words(words).values
    empty = {name: "" for name, value in f.model_dump().items() if value == ""}
    assert FineTune.model_validate({**values, **empty}) == f


def test_hostile_names_do_not_reach_the_screen(file: Any) -> None:
    found = read(AXOLOTL + '"\\e[31mred": 1\n"' + "k" * 200 + '": 2\n', file)
    assert all(name.isprintable() and len(name) <= 60 for name in found.unknown)


def test_a_large_file_within_the_limit_is_read(file: Any) -> None:
    text = AXOLOTL + "chat_template: |\n" + "  some words of a template\n" * 9000
    assert len(text) < MAX_BYTES
    assert read(text, file).model

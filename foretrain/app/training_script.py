"""The script that runs what was planned: transformers' Trainer or a trainer of TRL, with the settings of the plan, and
`ForetrainCallback`, which measures it beside the forecast. No torch."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.app.finetune import FineTuneQuestion
from foretrain.base.errors import UserError
from foretrain.base.installation import installed
from foretrain.base.messages import format_value
from foretrain.config.finetune.arguments import adapter_arguments, four_bit_arguments, trainer_arguments
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.config.presets import models
from foretrain.config.writer import write_text
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.finetune.program import widens

# What plans were compared with; what is installed is written in its place. A test holds them to constraints.txt.
VERSIONS = {
    "torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "datasets": "5.2.0", "peft": "0.21.2",
    "trl": "1.16.0", "bitsandbytes": "0.50.2",
}  # fmt: skip
# Learning rates of the examples of transformers and TRL. Adapters take about ten times more (trl, peft integration).
LEARNING_RATES = {"adapters": 2e-4, "full": 2e-5}
PREFERENCE_RATES = {"adapters": 1e-5, "full": 1e-6}  # DPOConfig's default


class Kind(NamedTuple):
    """A trainer with its arguments, and the columns of its data. `module`: it is imported from there."""

    columns: str
    trainer: str = "Trainer"
    arguments: str = "TrainingArguments"
    module: str = "transformers"


TRL = "trl"
COLUMNS = {  # of the data of TRL's trainers
    "sft": '"text", "messages", or "prompt" and "completion"',
    "pretraining": '"text"',
    "kto": '"prompt", "completion" and "label"',
    **dict.fromkeys(("reward", "dpo", "orpo", "cpo", "simpo"), '"chosen" and "rejected", with or without "prompt"'),
    **dict.fromkeys(("grpo", "rloo"), '"prompt", and what the reward reads'),
}
PLAIN = Kind('"text" or "messages"')
CLASSES = Kind('"text" and "label"')

ROWS = '''
def rows_of(samples):
    """Return full rows of tokens: samples one after the other, as the plan has them."""
    texts = samples.get("text") or [tokenizer.apply_chat_template(each, tokenize=False) for each in samples["messages"]]
    tokens = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    starts = range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)
    return {"input_ids": [tokens[start : start + SEQ_LEN] for start in starts]}
'''
PADDED_ROWS = '''
def rows_of(samples):
    """Return a row of each sample, padded to the length that was planned."""
    texts = samples.get("text") or [tokenizer.apply_chat_template(each, tokenize=False) for each in samples["messages"]]
    return tokenizer(texts, truncation=True, max_length=SEQ_LEN, padding="max_length")
'''
REWARD = """
def rewards(path):
    \"""Return the functions named reward… of a Python file: of prompts and completions they make a list of numbers.\"""
    return [found for name, found in runpy.run_path(path).items() if name.startswith("reward") and callable(found)]


def is_short(sample):
    \"""Return whether a prompt has the length that was planned, at most.\"""
    prompt, made = sample["prompt"], {"add_generation_prompt": True, "tokenize": False}
    text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, **made)
    return len(tokenizer(text)["input_ids"]) <= SEQ_LEN - COMPLETION_LEN


data = data.filter(is_short)
if not len(data):
    raise SystemExit(f"{given.data} has no prompt of at most {SEQ_LEN - COMPLETION_LEN} tokens.")
"""
CLASS_ROWS = '''
def rows_of(samples):
    """Return a row of each sample with its label."""
    found = tokenizer(samples["text"], truncation=True, max_length=SEQ_LEN)
    return {**found, "labels": samples["label"]}
'''


def write_script(path: Path, plan: FineTunePlan, asked: FineTuneQuestion, words: Sequence[str], command: str) -> None:
    """Write the script of a plan. Raises UserError for a run that does not fit, for one whose trainer has a file of its
    own, and for one that no script is written for."""
    check(path, plan, asked, words)
    write_text(text_of(plan, asked.source, command, path.name), path)


def check(path: Path, plan: FineTunePlan, asked: FineTuneQuestion, words: Sequence[str]) -> None:
    tune = plan.tune
    if path.suffix != ".py" or path.stem in VERSIONS:  # a file of such a name hides the package
        raise UserError("usage.script_name", path=str(path))
    if any(note.id == "finetune_read_as" for note in asked.notes):
        raise UserError("usage.script_file", path=words[0])
    if plan.verdict in ("does_not_fit", "does_not_run"):
        command = shlex.join(["foretrain", "advise", *words, "--gpu", plan.gpu.name, "--apply", "1"])
        raise UserError("usage.script_does_not_fit", gpu=plan.place, command=command)
    lacks = {
        f"--loop {tune.loop}": tune.loop not in ("trainer", TRL),
        "--unsloth": tune.unsloth,
        f"--strategy {tune.strategy}": tune.zero_stage,
        f"--training {tune.training}": kind_of(tune) is None,
        f"--evaluate and --training {tune.training}": tune.generates and tune.evaluate,
        f"model_type {asked.source.config.get('model_type')}": not auto_class(tune, asked.source),
    }
    if what := next((name for name, lacking in lacks.items() if lacking), None):
        raise UserError("usage.script_without", what=what[:100])


def kind_of(tune: FineTune) -> Kind | None:
    if tune.bound != "exact":
        return None
    if tune.loop == TRL:
        columns, found = COLUMNS.get(tune.training), tune.preferences
        name, module = (found.trainer, found.module) if found else ("SFT", TRL)
        return Kind(columns, f"{name}Trainer", f"{name}Config", module) if columns else None
    return {"sft": PLAIN, "pretraining": PLAIN, "classification": CLASSES}.get(tune.training)


def model_of(plan: FineTunePlan) -> str:
    """Return what from_pretrained takes: a repository, or a folder."""
    if plan.where.startswith("hf:"):
        return plan.where.removeprefix("hf:")
    path, known = Path(plan.where), models().get(plan.where)
    if known and not path.exists():
        return known.repository
    return str(path.parent if path.suffix == ".json" else path)


def text_of(plan: FineTunePlan, source: ModelSource, command: str, name: str) -> str:
    model, auto = model_of(plan), auto_class(plan.tune, source)
    tune, kind = plan.tune, kind_of(plan.tune)
    assert kind is not None
    needed = [f"{package}=={(installed(package) or VERSIONS[package]).partition('+')[0]}" for package in packages(tune)]
    needed += ["vllm"] if tune.generates and tune.vllm != "no" else []
    reward = " REWARD.py" if tune.generates else ""
    start = f"torchrun --nproc-per-node {tune.world}" if tune.world > 1 else "python"
    needs = format_value(plan.needs.needed_bytes, "bytes")
    took = f", {plan.timing.step_s.expected_s:.3g} s per step" if plan.timing else ""
    lines = [
        f'"""Train {escaped(plan.name)} as it was planned on {plan.place}: {needs}{took}.',
        "",
        f"    pip install foretrain {' '.join(needed)}",
        f"    {start} {escaped(shlex.quote(name))} DATA{reward} [--output FOLDER] [--max-steps STEPS]",
        "",
        "DATA is a file (.jsonl, .json, .csv, .parquet, .txt) or the name of a dataset at Hugging Face, with the",
        f"columns {kind.columns}. The same command resumes a run that stopped, from its",
        "last checkpoint. The learning rate is a usual one; memory and time do not depend on it.",
        *(["REWARD.py has a function whose name begins with reward, as TRL's GRPOTrainer takes it."] if reward else []),
        *([f"Start vLLM first: trl vllm-serve --model {escaped(model)}"] if reward and tune.vllm == "server" else []),
        "",
        f"Written by foretrain {installed('foretrain')}: {escaped(command)}",
        '"""',
        "",
        "import argparse",
        *(["import os"] if tune.quantized and tune.world > 1 else []),
        *(["import runpy"] if reward else []),
        "from pathlib import Path",
        "",
        "from datasets import load_dataset",
        *imports(tune, kind, auto),
        "from transformers.trainer_utils import get_last_checkpoint",
        "",
        *([] if reward else ["from foretrain import ForetrainCallback", ""]),
        f"MODEL, SEQ_LEN = {literal(model)}, {tune.seq_len}",
        *([f"COMPLETION_LEN = {tune.completion_tokens}"] if reward else []),
        "",
        "parser = argparse.ArgumentParser()",
        'parser.add_argument("data")',
        *(['parser.add_argument("reward")'] if reward else []),
        f'parser.add_argument("--output", default={literal(f"{Path(name).stem}-output")})',
        f'parser.add_argument("--max-steps", type=int, default={tune.max_steps or -1})',
        "given = parser.parse_args()",
        'formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}',
        "form = formats.get(Path(given.data).suffix)",
        'source = {"path": form, "data_files": given.data} if form else {"path": given.data}',
        'data = load_dataset(**source, split="train")',
        "",
        "tokenizer = AutoTokenizer.from_pretrained(MODEL)",
        "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        *loading(tune, auto),
        *adapting(tune),
        *preparing(tune),
        *training(tune, kind),
    ]
    return "\n".join(lines) + "\n"


def packages(tune: FineTune) -> list[str]:
    found = ["torch", "transformers", "accelerate", "datasets"]
    found += ["peft"] if tune.adapters else []
    found += ["trl"] if tune.loop == TRL else []
    quantized = tune.quantized or "8bit" in tune.optim or "paged" in tune.optim
    return found + (["bitsandbytes"] if quantized else [])


def imports(tune: FineTune, kind: Kind, auto: str) -> list[str]:
    adapted = ["LoraConfig"] if tune.adapters else []
    if tune.adapters and tune.loop != TRL:
        adapted += ["get_peft_model", *(["prepare_model_for_kbit_training"] if widens(tune) else [])]
    names = [auto, "AutoTokenizer", *(["BitsAndBytesConfig"] if tune.quantized else [])]
    if kind.module == "transformers":
        collator = "DataCollatorWithPadding" if tune.scores else "DataCollatorForLanguageModeling"
        names += [collator, kind.trainer, kind.arguments]
    own = [] if kind.module == "transformers" else [f"from {kind.module} import {kind.arguments}, {kind.trainer}"]
    found = [f"from peft import {', '.join(adapted)}"] if adapted else []
    own_code = f"from transformers import {', '.join(sorted(names))}"
    if len(own_code) > 120:
        own_code = "\n".join(["from transformers import (", *(f"    {name}," for name in sorted(names)), ")"])
    return [*found, own_code, *own]


def auto_class(tune: FineTune, source: ModelSource) -> str:
    """Return transformers' class that loads the model that was planned; "" where that is another one."""
    if tune.scores:
        return "AutoModelForSequenceClassification"
    if isinstance(source.config.get("vision_config"), Mapping):  # planned whole, and trained on text
        return "AutoModelForImageTextToText"
    named: Any = source.config.get("architectures")
    if not isinstance(named, list):  # of a decoder with an estimate it is clear
        return "AutoModelForCausalLM" if source.facts else ""
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in named)
    return "AutoModelForCausalLM" if causal else ""


def call(start: str, values: Mapping[str, Any]) -> list[str]:
    """Return a call with a line for each argument. `values` of the type `Name` stand as they are."""
    lines = (f"    {name}={value if isinstance(value, Name) else literal(value)}," for name, value in values.items())
    return [start, *lines, ")"]


def literal(value: Any) -> str:
    """Return a value as Python that ruff leaves as it is."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(each)}' for key, each in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | list) else repr(value)


def escaped(text: str) -> str:
    """Return a text as it stands within a docstring."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


class Name(str):
    """What is a name in the script, not a text."""


def loading(tune: FineTune, auto: str) -> list[str]:
    given: dict[str, Any] = {"dtype": tune.dtype, "attn_implementation": tune.attn}
    found = []
    if tune.quantized:
        bits = four_bit_arguments(tune) if tune.method == "qlora" else {"load_in_8bit": True}
        found = call("bits = BitsAndBytesConfig(", bits)
        given["quantization_config"] = Name("bits")
        if tune.world > 1:  # else all processes load it on the first card
            given["device_map"] = Name('{"": int(os.environ["LOCAL_RANK"])}')
    if tune.scores:
        given["num_labels"] = tune.scores
    lines = [*found, *call(f"model = {auto}.from_pretrained(\n    MODEL,", given)]
    return [*lines, "model.config.pad_token_id = tokenizer.pad_token_id"] if tune.scores else lines


def adapting(tune: FineTune) -> list[str]:
    if not tune.adapters:
        return []
    found = call("adapters = LoraConfig(", adapter_arguments(tune))
    if tune.loop == TRL:
        return found
    if widens(tune):
        given = {"use_gradient_checkpointing": tune.gradient_checkpointing}
        given |= {"gradient_checkpointing_kwargs": {"use_reentrant": tune.reentrant}}
        found = [*call("model = prepare_model_for_kbit_training(\n    model,", given), *found]
    if tune.gradient_checkpointing and tune.reentrant:
        found.append("model.enable_input_require_grads()")
    return [*found, "model = get_peft_model(model, adapters)"]


def preparing(tune: FineTune) -> list[str]:
    """Return the lines that make samples to train on, and those to evaluate."""
    found = []
    if tune.loop != TRL:
        rows = CLASS_ROWS if tune.scores else PADDED_ROWS if tune.padded else ROWS
        found = ["", *rows.splitlines(), "", ""]
        found += ["data = data.map(rows_of, batched=True, remove_columns=data.column_names)"]
        found += ["if not len(data):", '    raise SystemExit(f"{given.data} has no row of {SEQ_LEN} tokens.")']
    if tune.generates:
        found = ["", *REWARD.splitlines()]
    if tune.evaluate:
        count = tune.eval_batches * tune.eval_batch_size * tune.world
        found.append(f"parts = data.train_test_split(test_size=min({count}, len(data) // 10 or 1), seed=0)")
    return found


def training(tune: FineTune, kind: Kind) -> list[str]:
    rates = PREFERENCE_RATES if tune.preferences and not tune.rewards else LEARNING_RATES
    given = {"output_dir": Name("given.output"), "max_steps": Name("given.max_steps")}
    given |= {"num_train_epochs": tune.epochs, "learning_rate": rates["adapters" if tune.adapters else "full"]}
    given |= {**trainer_arguments(tune), "logging_steps": 10, "save_total_limit": 2, "report_to": "none"}
    if tune.generates:
        given |= generating(tune)
    elif tune.loop == TRL:
        given["max_length"] = Name("SEQ_LEN")
        given |= {"packing": True} if tune.packing and kind.trainer == "SFTTrainer" else {}
        given |= {"precompute_ref_log_probs": True} if tune.precompute_reference and tune.references else {}
        given |= {"loss_type": "simpo", "cpo_alpha": 0.0} if tune.training == "simpo" else {}
        given |= {"disable_dropout": True} if tune.preferences else {}
    parts: dict[str, Any] = {"model": Name("model"), "args": Name("args")}
    parts |= {"train_dataset": Name('parts["train"]' if tune.evaluate else "data")}
    parts |= {"eval_dataset": Name('parts["test"]')} if tune.evaluate else {}
    parts["processing_class"] = Name("tokenizer")
    if tune.loop != TRL:
        collator = "WithPadding(tokenizer)" if tune.scores else "ForLanguageModeling(tokenizer, mlm=False)"
        parts["data_collator"] = Name(f"DataCollator{collator}")
    elif tune.adapters:
        parts["peft_config"] = Name("adapters")
    if tune.generates:
        parts["reward_funcs"] = Name("rewards(given.reward)")
    else:
        parts["callbacks"] = Name("[ForetrainCallback(seq_len=SEQ_LEN)]")
    return [
        "",
        *call(f"args = {kind.arguments}(", given),
        *call(f"trainer = {kind.trainer}(", parts),
        "last = get_last_checkpoint(given.output) if Path(given.output).is_dir() else None",
        "trainer.train(resume_from_checkpoint=last)",
        "trainer.save_model()",
        *(['trainer.model.merge_and_unload().save_pretrained(f"{given.output}/merged")'] if tune.merge else []),
    ]


def generating(tune: FineTune) -> dict[str, Any]:
    on_card = {"vllm_gpu_memory_utilization": tune.vllm_memory, "vllm_enable_sleep_mode": tune.vllm_sleep}
    return {
        "num_generations": tune.num_generations,
        "max_completion_length": Name("COMPLETION_LEN"),
        "steps_per_generation": tune.micro_batches_generated,
        "num_iterations": tune.num_iterations,
        "beta": tune.beta,
        **({"use_vllm": True, "vllm_mode": tune.vllm} if tune.vllm != "no" else {}),
        **(on_card if tune.vllm == "colocate" else {}),
    }

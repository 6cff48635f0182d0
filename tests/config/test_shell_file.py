"""Shell scripts that start a trainer: the options of the command are read, and nothing is run."""

from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import is_finetune_file, read_file, read_finetune
from foretrain.config.finetune.table import FileSettings


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "train.sh"
        path.write_text(text)
        return path

    return write


def tune_of(found: FileSettings) -> FineTune:
    return FineTune.model_validate(found.values)


SWIFT = """#!/bin/bash
# swift sft --model another/model
export CUDA_VISIBLE_DEVICES=0,1
MODEL=Qwen/Qwen3-0.6B
per_step=16
NPROC_PER_NODE=2 \\
swift sft \\
    --model ${MODEL} --tuner_type lora --lora_rank 4 \\
    --target_modules q_proj v_proj \\
    --per_device_train_batch_size=2 \\
    --gradient_accumulation_steps $(expr $per_step / 2) \\
    --max_length $((512 * 2)) --packing true --use_logits_to_keep false \\
    --gradient_checkpointing_kwargs '{"use_reentrant": false}'
"""


def test_the_options_of_swift_are_its_config(file: Any) -> None:
    found = read_file(file(SWIFT))
    f = tune_of(found)
    assert (found.format, found.model, found.cards, found.unplanned) == ("ms-swift", "Qwen/Qwen3-0.6B", 2, {})
    assert (f.method, f.lora_r, f.lora_targets, f.seq_len) == ("lora", 4, "q_proj,v_proj", 1024)
    assert (f.batch_size, f.grad_accum, f.packing) == (2, 8, True)


@pytest.mark.parametrize(
    ("command", "format", "training"),
    [
        ("trl dpo --model_name_or_path a/b --use_peft", "trl", "dpo"),
        ("accelerate launch examples/scripts/kto.py --model_name_or_path a/b", "trl", "kto"),
        ("llamafactory-cli train --stage dpo --model_name_or_path a/b --lora_rank 8", "llama-factory", "dpo"),
        ("torchrun src/train.py --stage sft --finetuning_type full --model_name_or_path a/b", "llama-factory", "sft"),
        ("swift rlhf --rlhf_type kto --model a/b", "ms-swift", "kto"),
    ],
)
def test_each_trainer_is_told_by_its_command(command: str, format: str, training: str, file: Any) -> None:
    found = read_file(file(command))
    assert (found.format, tune_of(found).training, found.model) == (format, training, "a/b")


def test_a_script_of_ones_own_has_no_verdict(file: Any) -> None:
    path = file("python3 mine.py --model_name_or_path a/b --per_device_train_batch_size 2 --num_train_epochs 1")
    assert read_file(path).unplanned == {"mine.py": "unknown"}
    launched = "accelerate launch --config_file zero3.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-0.6B"
    assert read_finetune(str(file(launched)))[2].unplanned == {"config_file = zero3.yaml": "unknown"}


@pytest.mark.parametrize(
    "text",
    [
        "swift infer --model a/b --stream true",
        "echo swift sft",
        "swift sft '--model a/b",
        "A=$A$A\n" * 100 + "swift sft $A --model",
        "swift sft --model " + "$A" * 10**5,
    ],
)
def test_what_does_not_train_is_refused(text: str, file: Any, tmp_path: Path) -> None:
    path = file(text + "\ntouch " + str(tmp_path / "ran"))
    assert is_finetune_file(str(path))
    with pytest.raises(UserError, match="`swift sft`, `llamafactory-cli train` or `trl sft`"):
        read_file(path)
    assert not (tmp_path / "ran").exists()

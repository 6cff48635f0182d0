"""The estimate of fine-tuning against what PyTorch's CUDA build allocated in transformers' own Trainer (recorded runs)."""

import json
import statistics
from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import settings_of
from foretrain.config.hub.source import facts_of, find_source
from foretrain.config.presets import models
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import estimated
from foretrain.predict.finetune.outside import WRITTEN
from foretrain.predict.finetune.plan import plan
from tests.cuda_build.finetuning.__main__ import RESULT, estimated_again
from tests.cuda_build.finetuning.cases import cases

ROWS = [row for row in json.loads(RESULT.read_text("utf-8"))["rows"] if "error" not in row]
CASES = {case.name: case for case in cases()}


def errors(rows: list[dict[str, Any]]) -> list[float]:
    again = [estimated_again(row, CASES[row["name"]]) for row in rows]
    return [row["allocated_bytes"]["estimate_error"] for row in again]


@pytest.mark.parametrize("text", ["collected logits", "full size: qwen3-0.6b, full", "qlora: qwen3-0.6b"])
def test_an_estimate_is_what_the_allocator_counted(text: str) -> None:
    rows = [row for row in ROWS if text in row["name"]][:2]
    assert rows
    assert max(map(abs, errors(rows))) < 1e-3


def test_qlora_autocast_defaults_to_the_cards_half_precision() -> None:
    source = find_source("smollm2-135m")

    def amp(card: str, **options: Any) -> str:
        return plan(source, FineTune(seq_len=64, batch_size=1, **options), find_gpu(card)).tune.amp

    assert amp("RTX 4070", method="qlora") == "bf16"
    assert amp("T4", method="qlora") == "fp16"
    assert amp("RTX 4070", method="qlora", amp="no") == "no"
    assert amp("RTX 4070", method="lora") == "no"
    said = settings_of("output_dir: out\nper_device_train_batch_size: 1\n", "arguments.yaml", script=False)
    assert said.values["amp"] == "no"


@pytest.mark.slow
def test_every_estimate_is_what_the_allocator_counted() -> None:
    found = [abs(error) for error in errors(ROWS)]
    assert len(found) >= 100
    assert max(found) < 0.01
    assert statistics.median(found) < 1e-3


@pytest.mark.parametrize(("batches", "every"), [(2, 0), (9, 0), (WRITTEN + 40, 0), (9, 4), (9, 1)])
def test_collected_logits_are_joined_batch_by_batch(batches: int, every: int) -> None:
    """n batches are collected before all goes to the host. When the last one is joined there are n - 1, the newest, and
    all n in a new tensor; while it is computed there are n - 1 and the one before it."""
    n, item_bytes = min(batches, every or batches), 2 * 256 * 49152
    held = n - 1 + (n > 2)  # what was collected of one batch is that batch
    assert logits_bytes(batches, every) == max(2 * n * item_bytes, held * item_bytes + logits_bytes(1, 0))


def logits_bytes(batches: int, every: int) -> int:
    facts = facts_of(dict(models()["smollm2-135m"].config), "smollm2-135m")
    assert facts is not None
    tune = FineTune(
        dtype="bfloat16", seq_len=256, batch_size=1, evaluate=True, eval_batch_size=1, eval_batches=batches,
        eval_accumulation_steps=every, keeps_logits=True,
    )  # fmt: skip
    memory = estimated(facts, tune, find_gpu("A100 SXM4 80GB")).memory
    evaluation = next(phase for phase in memory.phases if phase.phase == "evaluate")
    return sum(part.size_bytes for part in evaluation.components if part.id == "logits")

"""Small and real runs of transformers' Trainer on a CPU: a Llama of four layers, evaluation and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foretrain import explain
from foretrain.analysis.run import TrainerRunExplanation
from foretrain.config.hub.facts import ModelFacts

SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip
STEPS, LENGTH, BATCH = 5, 64, 4


class Runnable:
    """Facts that the model runs on real tensors."""

    def __init__(self, facts: ModelFacts, scores: int = 0) -> None:
        self._facts, self.written_attention, self.padded, self.groups = facts, False, False, facts.groups
        self.scores = scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


class Samples(torch.utils.data.Dataset[Any]):
    """Rows of random tokens, the same in each run."""

    def __init__(self, count: int, length: int = LENGTH) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(SIZES["vocab_size"], (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))


def trainer_of(
    model: Any, folder: Path, *callbacks: Any, kind: Any = None, length: int = LENGTH, **changes: Any
) -> Any:
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH,
        "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder), **{**given, **changes})
    found = (kind or transformers.Trainer)(
        model=model, args=args, train_dataset=Samples(64, length), eval_dataset=Samples(8, length),
        callbacks=list(callbacks),
    )  # fmt: skip
    found.remove_callback(transformers.trainer_callback.PrinterCallback)
    return found


def explained(folder: Path) -> TrainerRunExplanation:
    found = explain(folder)
    assert isinstance(found, TrainerRunExplanation)
    return found


def assert_forecast_of(found: TrainerRunExplanation, *phases: str) -> None:
    pieces = {piece.id: piece for piece in found.phases}
    for name in phases:
        assert pieces[name].predicted_bytes == pytest.approx(pieces[name].measured_bytes, rel=0.003), name


def learned(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(1, 1024, (2, 48), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :7] = -100
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

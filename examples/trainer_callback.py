"""A small Llama, trained for eight steps on a CPU by transformers' Trainer with ForetrainCallback.

    python examples/trainer_callback.py out-trainer

needs `pip install 'foretrain[train,hf]'`. The tables in docs/fine-tuning.md are what it prints.
"""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from foretrain import ForetrainCallback

LENGTH, VOCABULARY = 128, 1024


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of random tokens, the same in each run."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main(folder: str) -> None:
    """Train, and leave the run in folder/foretrain."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=512,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=4, save_steps=4, logging_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(64), eval_dataset=Rows(16), callbacks=[ForetrainCallback()]
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out-trainer")

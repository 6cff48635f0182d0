"""TRL's SFTTrainer as a script makes it: it tokenizes nothing, as samples are tokens, and collates by itself."""

from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


def sft_trainer(model: Any, options: dict[str, Any], adapters: Any, train: Tensor, evaluate: Tensor) -> Trainer:
    """The trainer with its data. `adapters`: peft's config, or None."""
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>", unk_token="<end>")
    return SFTTrainer(
        model=model, args=SFTConfig(**options, max_length=train.shape[1]), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": train.tolist()}),
        eval_dataset=Dataset.from_dict({"input_ids": evaluate.tolist()}), peft_config=adapters,
    )  # fmt: skip

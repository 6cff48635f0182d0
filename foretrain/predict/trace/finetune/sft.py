"""TRL's trainers as the loop of a traced run: their preparation of the model, their loss and their metrics.

Triton's kernels compute its loss in tiles and allocate nothing: the tensors of trl/kernels/chunked_logprob.py are all.
Only the kernels are left out.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.finetune.drive import Marking, Run, adapter_config

try:
    from trl.kernels import chunked_logprob
except ImportError:  # trl before 1.13
    chunked_logprob = None


class MarkingTrl(Marking):
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: it takes no memory."""


class MarkedSft(MarkingTrl, SFTTrainer):
    pass


class MarkedReward(MarkingTrl, RewardTrainer):
    pass


class _Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class _Triton:
    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


def on_a_card() -> AbstractContextManager[Any]:
    patches = Patches()
    if chunked_logprob is not None:
        for name, value in (("_forward_kernel", _Kernel()), ("_backward_kernel", _Kernel()), ("triton", _Triton)):
            patches.set(chunked_logprob, name, value)
        places = (chunked_logprob, trl.trainer.utils)
        patches.set_everywhere(places, "_use_triton", lambda device: device.type == "cuda")
    return patches


def trainer(run: Run, model: Any, folder: str) -> Trainer:
    """Return SFTTrainer or RewardTrainer with the model as it was loaded: the trainer makes the adapters."""
    rewards, joined = run.tune.rewards, run.tune.joined
    columns = ("chosen_ids", "rejected_ids") if rewards else ("input_ids",)
    train, evaluate = (Dataset.from_dict({name: [[0]] * count for name in columns}) for count in run.samples)
    own = {} if rewards else {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": joined}
    given = run.common(folder, RewardConfig if rewards else SFTConfig, max_length=None, **own)
    found = (MarkedReward if rewards else MarkedSft)(
        model=model, train_dataset=train, eval_dataset=evaluate, processing_class=_tokenizer(),
        peft_config=adapter_config(run.tune) if run.tune.adapters else None,
        **{**given, "data_collator": None if joined else run.batch},
    )  # fmt: skip
    if joined:  # which takes no other collator
        found.data_collator = partial(_packed, run)
    found.run = run
    return found


def _packed(run: Run, samples: list[Any]) -> dict[str, Any]:
    """Return a batch of full rows as DataCollatorForLanguageModeling does without padding: one after the other, with
    the start of each part.
    """
    tokens = len(samples) * run.tune.seq_len
    found = {name: torch.zeros((1, tokens), dtype=torch.int64) for name in ("input_ids", "labels", "position_ids")}
    starts = torch.zeros((len(samples) + 1,), dtype=torch.int32)
    found |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "seq_idx": torch.zeros((1, tokens), dtype=torch.int32)}
    for name, tensor in found.items():
        run.tracer.tag(tensor, "batch", name)
    return {**found, "max_length_q": run.tune.seq_len, "max_length_k": run.tune.seq_len}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a single word: samples are tokens already."""
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>", unk_token="<end>")

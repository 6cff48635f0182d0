"""TRL's trainers as the loop of a traced run: their preparation of the model, their loss and their metrics.

Triton's kernels compute its loss in tiles and allocate nothing: the tensors of trl/kernels/chunked_logprob.py are all.
Only the kernels are left out.
"""

import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.finetune.drive import Marking, Run, adapter_config
from foretrain.predict.trace.finetune.standins import loaded

try:
    from trl.kernels import chunked_logprob
except ImportError:  # trl before 1.13
    chunked_logprob = None


class MarkingTrl(Marking):
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: it takes no memory."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return it as it is: its samples stand for tokens."""
        return dataset

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Let the reference see two batches; what it makes of them is in all batches (`Run.batch`)."""
        trainer: Any = self
        for _ in range(2):
            batch = trainer.data_collator([None] * batch_size)
            trainer.compute_ref_log_probs(trainer.model, trainer._prepare_inputs(batch))
        return dataset


class _Kind(NamedTuple):
    trainer: Any
    config: Any
    columns: tuple[str, ...]


def _marked(kind: type[Trainer]) -> Any:
    return type(f"Marked{kind.__name__}", (MarkingTrl, kind), {})


KINDS = {
    "reward": _Kind(_marked(RewardTrainer), RewardConfig, ("chosen_ids", "rejected_ids")),
    "dpo": _Kind(_marked(DPOTrainer), DPOConfig, ("prompt_ids", "chosen_ids", "rejected_ids")),
    "kto": _Kind(_marked(KTOTrainer), KTOConfig, ("prompt_ids", "completion_ids", "KL_completion_ids", "label")),
}


def _experimental(name: str) -> _Kind:
    """Return the trainer of one of TRL's experimental modules."""
    module: Any = importlib.import_module(f"trl.experimental.{name.lower()}")
    trainer, config = (getattr(module, f"{name}{part}") for part in ("Trainer", "Config"))
    return _Kind(_marked(trainer), config, ("prompt", "chosen", "rejected"))


class Samples(Dataset):
    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same samples, which stand for tokens."""
        return self


SFT = _Kind(_marked(SFTTrainer), SFTConfig, ("input_ids",))


class _Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class _Triton:
    language = SimpleNamespace(constexpr=int)
    jit = staticmethod(lambda function: function)

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


@cache
def logprob_entropy() -> Any:
    """Return TRL's module of kernels for whole logits, which cannot be imported without Triton."""
    missing = {name: _Triton for name in ("triton", "triton.language") if importlib.util.find_spec("triton") is None}
    with mock.patch.dict(sys.modules, missing):
        return importlib.import_module("trl.kernels.logprob_entropy")


def on_a_card() -> AbstractContextManager[Any]:
    patches = Patches()
    kernel = logprob_entropy()
    patches.set(trl.trainer.utils, "_fused_logprob_entropy", kernel.selective_log_softmax_and_entropy)
    patches.set(trl.trainer.utils, "is_triton_available", lambda: True)
    for module in filter(None, (kernel, chunked_logprob)):
        for name, value in (("_forward_kernel", _Kernel()), ("_backward_kernel", _Kernel()), ("triton", _Triton)):
            patches.set(module, name, value)
    if chunked_logprob is not None:
        places = (chunked_logprob, trl.trainer.utils)
        patches.set_everywhere(places, "_use_triton", lambda device: device.type == "cuda")
    return patches


def trainer(run: Run, model: Any, folder: str) -> Trainer:
    """Return TRL's trainer with the model as it was loaded: the trainer makes the adapters."""
    tune, joined = run.tune, run.tune.joined
    kind = KINDS.get(tune.training, SFT)
    if tune.whole:
        kind = _experimental("ORPO" if tune.training == "orpo" else "CPO")
    train, evaluate = (Samples.from_dict({name: [[0]] * count for name in kind.columns}) for count in run.samples)
    own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": joined} if kind is SFT else {}
    reference: dict[str, Any] = {}
    if tune.training == "simpo":
        own |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    if tune.references:
        own["precompute_ref_log_probs"] = tune.precompute_reference
    if tune.copies_reference:  # which TRL loads in the same way
        reference["ref_model"] = loaded(run.written, tune, run.device)
        run.names.learn(reference["ref_model"])
    given = run.common(folder, kind.config, max_length=None, **own)
    with Patches() as patches:
        code = sys.modules[kind.trainer.__bases__[1].__module__]
        patches.set_everywhere((code,), "hash_module", lambda module: "")  # a name for a file, by values
        found = kind.trainer(
            model=model, train_dataset=train, eval_dataset=evaluate, processing_class=_tokenizer(),
            peft_config=adapter_config(tune) if tune.adapters else None, **reference,
            **{**given, "data_collator": None if joined else run.batch},
        )  # fmt: skip
    if joined:  # which takes no other collator
        found.data_collator = partial(_packed, run)
    for name, weight in reference["ref_model"].named_parameters() if reference else ():
        run.tracer.tag(weight, "reference", name)
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

"""TRL's trainers as the loop of a traced run. Triton's kernels, which allocate nothing, are left out: the tensors of
trl/kernels/chunked_logprob.py are all."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerFast, Trainer

from foretrain.config.finetune.options import Preferences
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


MOST_STEPS = 16  # of generation that are run: of more tokens each step stands for several


class MarkingGrpo(MarkingTrl):
    """GRPO or RLOO, whose completions all have their full length. Each step of the optimizer begins with generation."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tune = self.run.tune
        return [[0] * (tune.seq_len - tune.completion_tokens) for _ in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        tune = self.run.tune
        completions = [[0] * tune.completion_tokens for _ in prompt_ids]
        parent: Any = super()
        self._enter("generate")
        if not trainer.use_vllm:  # whose memory is beside PyTorch's
            with _leaping(trainer, tune.completion_tokens):
                parent._generate_single_turn(prompt_ids, *args, **kwargs)
        if tune.references or tune.num_iterations > 1 or tune.training == "rloo":
            self._enter("score")
        if tune.training == "rloo":
            return completions
        return completions, [[0.0] * tune.completion_tokens for _ in prompt_ids] if trainer.use_vllm else None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the inputs with masks whose values the trace knows: no order of rows is drawn."""
        parent: Any = super()
        with Patches() as patches:
            code = sys.modules[type(self).__bases__[1].__module__]
            patches.set(code, "pad", self._pad)
            patches.set(code, "shuffle_sequence_dict", partial(tree_map_only, Tensor, torch.clone))
            return parent._prepare_inputs(inputs)

    def _pad(self, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensors of a batch as one: a mask has zeros where the run is padded, as that of other batches."""
        made = torch.zeros if self.run.tune.padded else torch.ones
        return made((len(tensors), max(map(len, tensors))), dtype=tensors[0].dtype)

    def _enter(self, phase: str) -> None:
        trainer: Any = self
        if trainer.model.training:
            self.run.tracer.enter(phase)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Mark what runs. Old log-probabilities are made where the whole run makes them, whose step has more."""
        parent: Any = super()
        trainer: Any = self
        args, accumulation = trainer.args, trainer.args.gradient_accumulation_steps
        args.gradient_accumulation_steps = args.steps_per_generation + (self.run.tune.num_iterations > 1)
        tracer, ranges = self.run.tracer, {*self.run.tracer.ranges}
        with tracer.values.unnoted():  # lengths are the run's
            found = parent._generate_and_score_completions(inputs)
        tracer.ranges.intersection_update(ranges)
        args.gradient_accumulation_steps = accumulation
        self._enter("steady_step" if trainer.state.global_step else "first_step")
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().training_step(*args, **kwargs)
        trainer: Any = self
        trainer._step %= trainer.args.gradient_accumulation_steps
        return found


def _more_of(cached: Tensor, tokens: int) -> Tensor:
    rows, heads, _, width = cached.shape
    return cached.new_empty((rows, heads, 1, width)).expand(-1, -1, tokens, -1)


@contextmanager
def _leaping(trainer: Any, tokens: int) -> Iterator[None]:
    """Within it generation takes at most MOST_STEPS steps, between which the cache grows by what is left out."""
    steps = tokens if tokens <= MOST_STEPS else MOST_STEPS // 2 + 1
    left, model = tokens - steps, trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    leaps = [left // (steps - 1) + (i < left % (steps - 1)) for i in range(steps - 1)] if left else []
    own = model._update_model_kwargs_for_generation

    def update(outputs: Any, kwargs: dict[str, Any], *args: Any, **more: Any) -> dict[str, Any]:
        found = own(outputs, kwargs, *args, **more)
        count = leaps.pop(0) if leaps else 0
        for layer in found["past_key_values"].layers if count else ():
            if getattr(layer, "keys", None) is not None:
                layer.update(*(_more_of(each, count) for each in (layer.keys, layer.values)))
        mask = found.get("attention_mask")
        if count and mask is not None:  # which there is where prompts are padded
            found["attention_mask"] = torch.cat([mask, mask.new_ones((mask.shape[0], count))], dim=-1)
        return found

    with Patches() as patches:
        if leaps:
            patches.set(model, "_update_model_kwargs_for_generation", update)
        patches.set(trainer.generation_config, "max_new_tokens", steps)
        yield


class _Kind(NamedTuple):
    trainer: Any
    config: Any
    columns: tuple[str, ...]


COLUMNS = {  # of samples that are tokens
    "SFT": ("input_ids",),
    "Reward": ("chosen_ids", "rejected_ids"),
    "DPO": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "KTO": ("prompt_ids", "completion_ids", "KL_completion_ids", "label"),
}


@cache
def _kind(found: Preferences | None) -> _Kind:
    name = found.trainer if found else "SFT"
    module = importlib.import_module(found.module if found else "trl")
    trainer, config = (getattr(module, f"{name}{part}") for part in ("Trainer", "Config"))
    generates = bool(found and found.generates)
    columns = ("prompt",) if generates else COLUMNS.get(name, ("prompt", "chosen", "rejected"))
    marked = type(f"Marked{name}Trainer", (MarkingGrpo if generates else MarkingTrl, trainer), {})
    return _Kind(marked, config, columns)


class Samples(Dataset):
    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same samples, which stand for tokens."""
        return self


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
    kind = _kind(tune.preferences)
    least = tune.generated if tune.generates else 0
    train, evaluate = (
        Samples.from_dict({name: [[0]] * max(count, least) for name in kind.columns}) for count in run.samples
    )
    own: dict[str, Any] = {}
    if not tune.preferences:
        own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": joined}
    reference: dict[str, Any] = {}
    if tune.training == "simpo":
        own |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    if tune.generates:
        return _generating(run, kind, model, folder, train, evaluate)
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


def _generating(run: Run, kind: _Kind, model: Any, folder: str, train: Dataset, evaluate: Dataset) -> Trainer:
    tune, length = run.tune, run.tune.seq_len - 1
    for rows in (tune.batch_size, tune.eval_batch_size):  # tokens whose log-probabilities are made
        run.tracer.choices.selected[rows * length] = rows * tune.completion_tokens
    given = run.common(
        folder, kind.config, num_generations=tune.generated, num_generations_eval=tune.eval_batch_size, beta=tune.beta,
        max_completion_length=tune.completion_tokens, steps_per_generation=tune.micro_batches_generated,
    )  # fmt: skip
    reference = None
    if tune.copies_reference:
        reference = loaded(run.written, tune, run.device)
        run.names.learn(reference)
        for name, weight in reference.named_parameters():
            run.tracer.tag(weight, "reference", name)
    with Patches() as patches:
        code = sys.modules[kind.trainer.__bases__[1].__module__]
        patches.set(code, "create_model_from_path", lambda *args, **kwargs: reference)
        found = kind.trainer(
            model=model, train_dataset=train, eval_dataset=evaluate, processing_class=_tokenizer(),
            reward_funcs=_reward, peft_config=adapter_config(tune) if tune.adapters else None,
            args=given["args"], callbacks=given["callbacks"],
        )  # fmt: skip
    found.use_vllm = tune.vllm != "no"
    found.run = run
    return found


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _packed(run: Run, samples: list[Any]) -> dict[str, Any]:
    """Return full rows as DataCollatorForLanguageModeling without padding: in a row, with each part's start."""
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

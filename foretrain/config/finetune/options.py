"""`FineTune`: how a model of Hugging Face is trained, in the words of its trainers. Each option once, with its help.

Defaults are those of TrainingArguments, where it has the option; the rank is the one that most recipes use. Of a model
that is asked about without a trainer's file they are what people run on one card (`asked`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field

from foretrain.base.records import Record
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.option import Group, Stops

Bound = Literal["exact", "at_least", "at_most", "unknown"]
Training = Literal[
    "sft",
    "pretraining",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "cpo",
    "preference",
    "grpo",
    "ppo",
    "rloo",
    "reward",
    "classification",
    "embedding",
    "distillation",
    "unknown",
]
Method = Literal["full", "lora", "qlora", "dora"]
Optim = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adafactor",
    "muon",
    "sgd",
]
Attn = Literal["sdpa", "eager", "flash_attention_2"]
Loop = Literal["trainer", "trl", "axolotl", "llama-factory", "unsloth", "torchtune", "own"]
# What the figures of a step of SFT are of another training's. Training on preferences, by reinforcement or from a
# teacher runs the same blocks, and more beside them. A classifier's head has no logits of the vocabulary, so its step
# is below; a reward model takes two such sequences of each sample, so nothing is known.
BOUNDS: dict[str, Bound] = {
    "sft": "exact", "pretraining": "exact", "classification": "at_most",
    **dict.fromkeys(("reward", "embedding", "unknown"), "unknown"),
}  # fmt: skip
NAMES_OF_TRAINING: dict[str, Training] = {
    "pt": "pretraining", "rm": "reward", "prm": "reward", "reward_model": "reward", "ipo": "dpo", "online_dpo": "dpo",
    "bco": "kto", "gspo": "grpo", "gdpo": "grpo", "dapo": "grpo", "gkd": "distillation", "kd": "distillation",
    "seq_cls": "classification", "reranker": "classification",
}  # fmt: skip
NAMES_OF_OPTIM: dict[str, Optim] = {
    "adamw_hf": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit",
    "adamw_apex_fused": "adamw_torch_fused", "adamw": "adamw_torch",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """What is known of an option beside its name, type, default, limits and help, as of RunConfig's (config/option.py).

    `aliases`: other spellings; `basic`: it stands first in a form; `slider`: its ends and how its stops are apart.
    """

    group: Group
    aliases: tuple[str, ...] = ()
    basic: bool = False
    unit: str = ""
    slider: tuple[int, int, Stops] | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add to a JSON schema what a reader of it wants to know."""
        schema["aliases"] = list(self.aliases)


def _option(default: Any, help: str, *aliases: str, group: Group, **more: Any) -> Any:
    """A field. `more`: other attributes, and pydantic's limits."""
    attributes = {name: more.pop(name) for name in ("basic", "unit", "slider") if name in more}
    known = Attributes(group=group, aliases=aliases, **attributes)
    return Field(default, description=help, json_schema_extra=known, **more)


class FineTune(Record):
    """All that decides what a fine-tuning run takes, beside the model and the card."""

    # fmt: off
    training: Training = _option(
        "sft", "what is trained for; kinds beside the first two are named and bounded, not planned", "stage",
        "rlhf_type", group="model",
    )
    method: Method = _option(
        "full", "full: all weights; lora, dora: adapters; qlora: adapters over 4-bit weights", "finetuning_type",
        group="model", basic=True,
    )
    lora_r: int = _option(
        16, "rank of the adapters", "lora_rank", "r", group="model", basic=True, slider=(1, 1024, "doubling"), ge=1,
        le=4096,
    )
    lora_targets: str = _option(
        "all-linear", "modules that get an adapter: all-linear, or names parted by commas, such as q_proj,v_proj",
        "target_modules", "lora_target", "lora_target_modules", group="model", basic=True,
    )
    lora_dropout: float = _option(0.0, "dropout before an adapter", group="model", ge=0, lt=1)
    lora_saved: str = _option(
        "", "modules that are trained whole beside the adapters, such as embed_tokens,lm_head", "modules_to_save",
        "lora_modules_to_save", "additional_target", group="model",
    )
    load_in_8bit: bool = _option(False, "lora, dora: over weights in 8 bits (LLM.int8)", group="model")
    double_quant: bool = _option(True, "qlora: also quantize the scales", "bnb_4bit_use_double_quant", group="model")
    seq_len: int = _option(
        1024, "tokens of a sequence", "max_seq_length", "max_length", "sequence_len", "cutoff_len", "max_seq_len",
        "model_max_length", group="batch", basic=True, unit="tokens", slider=(128, 131_072, "halves"), ge=1,
        le=16_777_216,
    )
    batch_size: int = _option(
        8, "micro-batch: sequences in one forward pass", "per_device_train_batch_size", "micro_batch_size",
        group="batch", basic=True, unit="sequences", slider=(1, 256, "halves"), ge=1, le=1_000_000,
    )
    grad_accum: int = _option(
        1, "micro-batches of a step", "gradient_accumulation_steps", group="batch", basic=True, unit="micro-batches",
        slider=(1, 256, "halves"), ge=1, le=1_000_000,
    )
    gradient_checkpointing: bool = _option(
        False, "recompute each block's activations in backward", "enable_activation_checkpointing", group="batch",
        basic=True,
    )
    reentrant: bool = _option(False, "the older way to checkpoint", "use_reentrant", group="batch")
    optim: Optim = _option(
        "adamw_torch_fused", "the optimizer, as TrainingArguments names it", "optimizer", group="optimizer",
        basic=True,
    )
    max_grad_norm: float = _option(1.0, "clip gradients to this norm; 0: not", group="optimizer", ge=0)
    attn: Attn = _option("sdpa", "the attention implementation", "attn_implementation", group="batch", basic=True)
    packing: bool = _option(
        False, "join samples, so that each sequence is full and none is padded", "sample_packing", group="batch",
        basic=True,
    )
    padded: bool = _option(
        False, "plan for batches with padding, whose mask rules out flash attention in sdpa", group="batch",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "of the weights; auto: as they are published", "torch_dtype", group="batch", basic=True,
    )
    amp: Literal["auto", "no", "bf16", "fp16"] = _option(
        "auto", "autocast: TrainingArguments' bf16 or fp16; auto: for QLoRA in 16 bits, else none", group="batch",
    )
    compile: bool = _option(False, "torch.compile the model", "torch_compile", group="system")
    liger: bool = _option(False, "Liger's kernels", "use_liger_kernel", "liger_plugin", group="system")
    cut_cross_entropy: bool = _option(False, "axolotl's CutCrossEntropy plugin", group="system")
    unsloth: bool = _option(False, "unsloth's functions, and how it loads a model", "use_unsloth", group="system")
    offload_checkpoints: bool = _option(
        False, "with unsloth: checkpoints go to the computer's memory (gradient_checkpointing: unsloth)", group="batch",
    )
    evaluate: bool = _option(False, "evaluate between steps", "do_eval", group="evaluation")
    eval_batch_size: int = _option(
        8, "sequences of an evaluation batch", "per_device_eval_batch_size", group="evaluation", unit="sequences",
        slider=(1, 256, "halves"), ge=1,
    )
    eval_batches: int = _option(8, "batches of an evaluation", group="evaluation", ge=1, le=1_000_000)
    eval_accumulation_steps: int = _option(
        0, "evaluation batches whose logits stay on the card; 0: all of them", group="evaluation", ge=0,
    )
    keeps_logits: bool = _option(
        False, "the evaluation collects logits, as with compute_metrics", "compute_metrics", group="evaluation",
    )
    dataset_tokens: int = _option(
        0, "tokens of the training data; 0: not known", group="data", unit="tokens", ge=0, le=10**16,
    )
    epochs: float = _option(3.0, "passes over the data", "num_train_epochs", "num_epochs", group="data", ge=0)
    max_steps: int = _option(
        0, "optimizer steps; 0: as many as the epochs need", group="data", unit="steps", ge=0, le=10**9,
    )
    loop: Loop = _option("trainer", "whose training loop: it decides what is cast and kept", group="system")
    # fmt: on

    @property
    def bound_of_training(self) -> Bound:
        return BOUNDS.get(self.training, "at_least")

    @property
    def bound(self) -> Bound:
        """What the figures of SFT's step are of this training's. In 8 bits a layer also keeps the columns of its input
        that have outliers, of which nobody knows how many there are."""
        found = self.bound_of_training
        return found if not self.load_in_8bit else "at_least" if found in ("exact", "at_least") else "unknown"

    @property
    def bounded_by(self) -> tuple[str, ...]:
        """The settings because of which the figures are a bound."""
        kind = () if self.bound_of_training == "exact" else (f"training = {self.training}",)
        return (*kind, "outliers of load_in_8bit") if self.load_in_8bit else kind

    @property
    def adapters(self) -> bool:
        """Whether the weights themselves are frozen."""
        return self.method != "full"

    @property
    def quantized(self) -> bool:
        """Whether the frozen weights are in 4 or 8 bits."""
        return self.method == "qlora" or self.load_in_8bit

    @property
    def joined(self) -> bool:
        """Whether the rows of a batch become a single one, as TRL packs them: it has no padding, and a mask keeps
        samples apart where the attention does not."""
        return self.packing and self.loop == "trl"

    def rows(self, batch: int) -> tuple[int, int]:
        """(rows, tokens of each) of a batch of so many sequences."""
        return (1, batch * self.seq_len) if self.joined else (batch, self.seq_len)

    @property
    def offloads(self) -> bool:
        """Whether checkpoints go to the host: unsloth does so for sequences of 512 tokens or more."""
        return self.unsloth and self.gradient_checkpointing and self.offload_checkpoints and self.seq_len >= 512

    def positions_beyond(self, facts: ModelFacts) -> bool:
        """Whether a sequence has more tokens than the model has learned positions."""
        return facts.positions == "learned" and self.seq_len > facts.max_positions

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, with full sequences."""
        return self.seq_len * self.batch_size * self.grad_accum

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where neither they nor the tokens of the data are known."""
        return self.max_steps or math.ceil(self.dataset_tokens * self.epochs / self.tokens_per_step) or None


# One sequence at a time with checkpointing: what guides for one card begin with, as unsloth's notebooks do.
ASKED: Mapping[str, Any] = {"seq_len": 2048, "batch_size": 1, "gradient_checkpointing": True}


def asked(facts: ModelFacts | None, values: Mapping[str, Any]) -> FineTune:
    """The run of a model that is asked about with these options and no trainer's file."""
    longest = facts.max_positions if facts else ASKED["seq_len"]
    return FineTune.model_validate({**ASKED, "seq_len": min(ASKED["seq_len"], longest), **values})


@dataclass(frozen=True, kw_only=True)
class FineTuneOption(Attributes):
    """An option of `FineTune` with what is known of it."""

    name: str
    default: Any
    help: str
    type: str
    choices: tuple[Any, ...]


def _of(name: str, field: Any) -> FineTuneOption:
    choices = get_args(field.annotation)
    kind = "choice" if choices else field.annotation.__name__
    known = vars(field.json_schema_extra)
    return FineTuneOption(**known, name=name, default=field.default, help=field.description, type=kind, choices=choices)


FINETUNE_OPTIONS: Mapping[str, FineTuneOption] = {
    name: _of(name, field) for name, field in FineTune.model_fields.items()
}
OPTION_OF: Mapping[str, str] = {  # an option's name, or another spelling of it -> its name
    spelling: option.name for option in FINETUNE_OPTIONS.values() for spelling in (option.name, *option.aliases)
}

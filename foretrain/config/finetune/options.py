"""`FineTune`: how a model of Hugging Face is trained, in the words of its trainers. Defaults are those of
TrainingArguments; without a trainer's file they are what people run on one card (`asked`)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from foretrain.base.records import Record
from foretrain.config.hub.facts import ModelFacts, ModelSource, Unsloth, unsloth_of
from foretrain.config.option import COST, DTYPE_NAMES, EVERYTHING, LEARNING, LINK, NETWORK, PER_NODE, option, options_of
from foretrain.config.options import StrategyName
from foretrain.config.sharing import STRATEGIES

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
    "token_classification",
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
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_no_reshard", "hsdp"]
Attn = Literal["sdpa", "eager", "flash_attention_2"]
Loop = Literal["trainer", "trl", "axolotl", "llama-factory", "unsloth", "torchtune", "own"]
# The modules that peft gives an adapter where nobody names them, for families whose facts are known
# (peft 0.21, utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
PEFT_TARGETS = {
    "gpt2": "c_attn", "gpt_bigcode": "c_attn", "gpt_neox": "query_key_value", "falcon": "query_key_value",
    "phi": "q_proj,v_proj,fc1,fc2", "llama": "q_proj,v_proj", "mistral": "q_proj,v_proj", "mixtral": "q_proj,v_proj",
    "stablelm": "q_proj,v_proj", "gemma": "q_proj,v_proj", "gemma2": "q_proj,v_proj", "gemma3_text": "q_proj,v_proj",
    "qwen2": "q_proj,v_proj", "qwen3": "q_proj,v_proj",
}  # fmt: skip
# What the figures of a step of SFT are of another training's, which runs the same blocks and more. A classifier's head
# has no logits, so its step is below; of reward models TRL's alone are planned (PREFERENCES).
BOUNDS: dict[str, Bound] = {
    "sft": "exact", "pretraining": "exact", **dict.fromkeys(("classification", "token_classification"), "at_most"),
    **dict.fromkeys(("reward", "embedding", "unknown"), "unknown"),
}  # fmt: skip


class Preferences(NamedTuple):
    """What one of TRL's trainers (DPOTrainer and DPOConfig of `module`) makes of a sample: so many sequences, whose
    log-probabilities it compares with those of a `reference`, the model as it was before. `drifts`: both run each
    sample with another's answer, too, for the KL divergence, which takes two samples. `whole`: its loss takes whole
    logits. `generates`: the samples are prompts."""

    trainer: str
    sequences: int = 2
    module: str = "trl"
    reference: bool = False
    drifts: bool = False
    whole: bool = False
    generates: bool = False


PREFERENCES = {  # that are planned, of TRL
    "reward": Preferences("Reward"),
    "dpo": Preferences("DPO", reference=True),
    "kto": Preferences("KTO", 1, reference=True, drifts=True),
    "orpo": Preferences("ORPO", module="trl.experimental.orpo", whole=True),
    **dict.fromkeys(("simpo", "cpo"), Preferences("CPO", module="trl.experimental.cpo", whole=True)),
    "grpo": Preferences("GRPO", 1, generates=True),
    "rloo": Preferences("RLOO", 1, generates=True),
}
# What a trainer is for, by the start of the names of its class and its config: DPOTrainer, DPOConfig.
TRAININGS: dict[str, str] = {
    "SFT": "sft", **{kind.trainer: training for training, kind in PREFERENCES.items()},
    **dict.fromkeys(("OnlineDPO", "XPO", "NashMD", "BCO"), "preference"), "PPO": "ppo", "PPOv2": "ppo",
    **dict.fromkeys(("GKD", "MiniLLM", "SDFT", "SDPO", "GOLD", "Distillation"), "distillation"),
    "PRM": "token_classification",
    "SentenceTransformer": "embedding",
}  # fmt: skip
NAMES_OF_TRAINING: dict[str, Training] = {
    "pt": "pretraining", "rm": "reward", "prm": "token_classification", "reward_model": "reward", "ipo": "dpo",
    "online_dpo": "preference", "bco": "preference", "gspo": "grpo", "gdpo": "grpo", "dapo": "grpo",
    "gkd": "distillation", "kd": "distillation", "seq_cls": "classification", "reranker": "unknown",
}  # fmt: skip
NAMES_OF_OPTIM: dict[str, Optim] = {
    "adamw_hf": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit",
    "adamw_apex_fused": "adamw_torch_fused", "adamw": "adamw_torch", "decoupled_adamw": "adamw_torch",
    "optim.adamw": "adamw_torch", "optim.adam": "adamw_torch",
}  # fmt: skip

# Foretrain carries out no such run, so nothing is resumed: an option affects what is forecast.
_option = partial(option, affects=COST, on_resume="free", texts="finetune_knob")


class FineTune(Record):
    """All that decides what a fine-tuning run takes, beside the model and the card."""

    # fmt: off
    training: Training = _option(
        "sft", "what is trained for; other kinds than the first two, classification and TRL's are bounded",
        group="model", aliases=("stage", "rlhf_type"), choice_names=NAMES_OF_TRAINING, affects=EVERYTHING,
    )
    method: Method = _option(
        "full", "full (all weights), or lora, qlora, dora (adapters); qlora: over weights in 4 bits", group="model",
        aliases=("finetuning_type",), basic=1,
        switches=(("load_in_4bit", "qlora", ""), ("qlora", "qlora", ""), ("use_dora", "dora", "")), affects=EVERYTHING,
    )
    lora_r: int = _option(
        16, "rank of the adapters", group="model", aliases=("lora_rank", "r"), least=1, most=4096, basic=2,
        slider=(1, 1024, "doubling"), affects=EVERYTHING,
    )
    lora_targets: str = _option(
        "all-linear", "modules that get an adapter: all-linear, or names parted by commas, such as q_proj,v_proj",
        group="model", aliases=("target_modules", "lora_target", "lora_target_modules"), basic=3, affects=EVERYTHING,
    )
    lora_dropout: float = _option(0.0, "dropout before an adapter", group="model", least=0, below=1, affects=EVERYTHING)
    lora_saved: str = _option(
        "", "modules that are trained whole beside the adapters, such as embed_tokens,lm_head", group="model",
        aliases=("modules_to_save", "lora_modules_to_save", "additional_target"), affects=EVERYTHING,
    )
    merge: bool = _option(
        False, "lora, qlora, dora: merge the adapters into the weights on the card, after the training", group="model",
    )
    load_in_8bit: bool = _option(
        False, "lora, dora: over weights in 8 bits (LLM.int8)", group="model", affects=EVERYTHING,
    )
    double_quant: bool = _option(
        True, "qlora: also quantize the scales", group="model", aliases=("bnb_4bit_use_double_quant",),
        affects=EVERYTHING,
    )
    seq_len: int = _option(
        1024, "tokens of a sequence", group="batch",
        aliases=("max_seq_length", "max_length", "sequence_len", "cutoff_len", "max_seq_len", "model_max_length"),
        least=1, most=16_777_216, unit="tokens", basic=4, slider=(128, 131_072, "halves"), affects=EVERYTHING,
    )
    images: int = _option(
        0, "pictures in each sequence, of whose tokens they are part; 0: text alone", group="batch", least=0, most=1024,
        affects=EVERYTHING,
    )
    image_size: int = _option(
        1024, "with --images: width and height of a picture, before the model's processor resizes it", group="batch",
        least=16, most=16_384, unit="pixels", affects=EVERYTHING,
    )
    batch_size: int = _option(
        8, "micro-batch: sequences in one forward pass", group="batch",
        aliases=("per_device_train_batch_size", "micro_batch_size"), least=1, most=1_000_000, unit="sequences", basic=5,
        slider=(1, 256, "halves"),
    )
    grad_accum: int = _option(
        1, "micro-batches of a step", group="batch", aliases=("gradient_accumulation_steps",), least=1, most=1_000_000,
        unit="micro-batches", basic=6, slider=(1, 256, "halves"),
    )
    gradient_checkpointing: bool = _option(
        False, "recompute each block's activations in backward", group="batch",
        aliases=("enable_activation_checkpointing",), basic=7,
    )
    reentrant: bool = _option(False, "the older way to checkpoint", group="batch", aliases=("use_reentrant",))
    optim: Optim = _option(
        "adamw_torch_fused", "the optimizer, as TrainingArguments names it", group="optimizer", aliases=("optimizer",),
        basic=8, choice_names=NAMES_OF_OPTIM, affects=EVERYTHING,
    )
    max_grad_norm: float = _option(
        1.0, "clip gradients to this norm; 0: not", group="optimizer", least=0, affects=LEARNING,
    )
    attn: Attn = _option(
        "sdpa", "the attention implementation", group="batch", aliases=("attn_implementation",), basic=9,
        switches=(("flash_attention", "flash_attention_2", "sdpa"),),
    )
    labels: int = _option(
        2, "classification: classes that a sequence may be of", group="model", aliases=("num_labels",), least=1,
        most=1_000_000, affects=EVERYTHING,
    )
    completion_len: int = _option(
        512, "grpo, rloo: tokens of a completion, which is the end of a sequence", group="batch",
        aliases=("max_completion_length",), least=1, most=16_777_216, unit="tokens",
    )
    num_generations: int = _option(
        8, "grpo, rloo: completions of each prompt", group="batch", least=2, most=1_000_000, unit="sequences",
    )
    steps_per_generation: int = _option(
        0, "grpo, rloo: micro-batches that are generated together; 0: those of a step", group="batch", least=0,
        most=1_000_000, unit="micro-batches",
    )
    num_iterations: int = _option(
        1, "grpo, rloo: updates that use the same completions", group="batch", least=1, most=1000,
    )
    beta: float = _option(
        0.0, "grpo, rloo: weight of the KL divergence from a reference; 0: no reference", group="batch", least=0,
    )
    vllm: Literal["no", "colocate", "server"] = _option(
        "no", "grpo, rloo: vLLM generates, on the same card or in a server of its own", group="system",
        aliases=("vllm_mode",),
    )
    vllm_memory: float = _option(
        0.3, "with vLLM on the same card: the share of its memory that vLLM takes", group="system",
        aliases=("vllm_gpu_memory_utilization",), least=0, below=1,
    )
    vllm_sleep: bool = _option(
        False, "with vLLM on the same card: it sleeps while the model learns", group="system",
        aliases=("vllm_enable_sleep_mode",),
    )
    precompute_reference: bool = _option(
        False, "dpo, kto: the reference runs before the training, not in each step", group="batch",
        aliases=("precompute_ref_log_probs",),
    )
    packing: bool = _option(
        False, "join samples, so that each sequence is full and none is padded", group="batch",
        aliases=("sample_packing",), basic=10, affects=EVERYTHING,
    )
    row_tokens: int = _option(
        0, "tokens of a usual sequence, padding included, for the time; 0: seq_len, which is of the longest",
        group="batch", least=0, most=16_777_216, unit="tokens",
    )
    padded: bool = _option(
        False, "plan for batches with padding, whose mask rules out flash attention in sdpa", group="batch",
        affects=EVERYTHING,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "of the weights; auto: as they are published", group="batch", aliases=("torch_dtype",), basic=11,
        choice_names=DTYPE_NAMES,
    )
    amp: Literal["auto", "no", "bf16", "fp16"] = _option(
        "auto", "autocast: TrainingArguments' bf16 or fp16; auto: for QLoRA in 16 bits, else none", group="batch",
        switches=(("bf16", "bf16", "no"), ("fp16", "fp16", "no")), affects=EVERYTHING,
    )
    compile: bool = _option(False, "torch.compile the model", group="system", aliases=("torch_compile",))
    liger: bool = _option(False, "Liger's kernels", group="system", aliases=("use_liger_kernel", "liger_plugin"))
    cut_cross_entropy: bool = _option(False, "axolotl's CutCrossEntropy plugin", group="system")
    unsloth: bool = _option(
        False, "unsloth's functions, and how it loads a model", group="system", aliases=("use_unsloth",),
    )
    offload_checkpoints: bool = _option(
        False, "with unsloth: checkpoints go to the computer's memory (gradient_checkpointing: unsloth)", group="batch",
    )
    evaluate: bool = _option(False, "evaluate between steps", group="evaluation", aliases=("do_eval",))
    eval_batch_size: int = _option(
        8, "sequences of an evaluation batch", group="evaluation", aliases=("per_device_eval_batch_size",), least=1,
        unit="sequences", slider=(1, 256, "halves"),
    )
    eval_batches: int = _option(
        8, "batches of an evaluation", group="evaluation", least=1, most=1_000_000, compared=False,
    )
    eval_accumulation_steps: int = _option(
        0, "evaluation batches whose logits stay on the card; 0: all of them", group="evaluation", least=0,
    )
    keeps_logits: bool = _option(
        False, "the evaluation collects logits, as with compute_metrics", group="evaluation",
        aliases=("compute_metrics",),
    )
    dataset_tokens: int = _option(
        0, "tokens of the training data; 0: not known", group="data", least=0, most=10**16, unit="tokens",
        thousand=1000, compared=False,
    )
    epochs: float = _option(
        3.0, "passes over the data", group="data", aliases=("num_train_epochs", "num_epochs"), least=0, compared=False,
    )
    max_steps: int = _option(
        0, "optimizer steps; 0: as many as the epochs need", group="data", least=0, most=10**9, unit="steps",
        compared=False,
    )
    world: int = _option(
        1, "cards that train together, each with micro-batches of its own", group="system",
        aliases=("num_processes",), least=1, most=16_384, unit="cards", compared=False,
    )
    strategy: Strategy = _option(
        "ddp", "ddp: each card has the whole model; fsdp: shards weights, gradients and optimizer states, as FSDP2 "
        "does; fsdp_no_reshard: gathered once a step; zero1, zero2, zero3: DeepSpeed's, which shard optimizer states, "
        "gradients too, and weights too", group="system",
    )
    per_node: int = PER_NODE
    link: str = LINK
    network: str = NETWORK
    loop: Loop = _option("trainer", "whose training loop: it decides what is cast and kept", group="system")
    # fmt: on

    @property
    def preferences(self) -> Preferences | None:
        found = PREFERENCES.get(self.training) if self.loop == "trl" else None
        return None if found and found.whole and self.quantized else found

    @property
    def rewards(self) -> bool:
        """Whether TRL's RewardTrainer trains a reward model."""
        return self.training == "reward" and self.preferences is not None

    @property
    def scores(self) -> int:
        """How many scores a sequence has, of a head in the place of the vocabulary's; 0: no such head."""
        classifies = self.training == "classification" and self.loop == "trainer"
        return 1 if self.rewards else self.labels if classifies else 0

    @property
    def whole(self) -> bool:
        return self.preferences is not None and self.preferences.whole

    @property
    def references(self) -> bool:
        return self.preferences is not None and (self.preferences.reference or (self.generates and self.beta > 0))

    @property
    def generates(self) -> bool:
        return self.preferences is not None and self.preferences.generates

    @property
    def micro_batches_generated(self) -> int:
        return self.steps_per_generation or self.grad_accum

    @property
    def generated(self) -> int:
        """Completions that a card generates together."""
        return self.batch_size * self.micro_batches_generated

    @property
    def completion_tokens(self) -> int:
        """Tokens of a completion: a sequence begins with at least one of a prompt."""
        return min(self.completion_len, self.seq_len - 1)

    @property
    def scores_again(self) -> bool:
        """Whether the model runs over its completions before it learns from them: another one may have written them."""
        each = self.micro_batches_generated * self.num_iterations
        return self.generates and (self.training == "rloo" or self.vllm != "no" or self.grad_accum % each > 0)

    @property
    def drifts(self) -> bool:
        return self.preferences is not None and self.preferences.drifts

    @property
    def least_batch(self) -> int:
        return 2 if self.drifts else 1

    @property
    def forward_passes(self) -> float:
        """Return passes of a step that nothing is learned from. To generate all tokens of a sequence is one."""
        if self.generates:
            return (self.references + self.scores_again + (self.vllm != "server")) / self.num_iterations
        compared = self.references and not self.precompute_reference
        return self.drifts + compared * (1 + self.drifts)

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a model of its own: with adapters it is the model without them."""
        return self.references and not self.adapters and not self.precompute_reference

    @property
    def bound_of_training(self) -> Bound:
        return "exact" if self.preferences or self.scores else BOUNDS.get(self.training, "at_least")

    @property
    def bound(self) -> Bound:
        """What the figures of SFT's step are of this training's. In 8 bits a layer also keeps the columns of its input
        that have outliers, of which nobody knows how many there are."""
        found = self.bound_of_training
        return found if not self.load_in_8bit else "at_least" if found in ("exact", "at_least") else "unknown"

    @property
    def bounded_by(self) -> tuple[str, ...]:
        kind = () if self.bound_of_training == "exact" else (f"training = {self.training}",)
        return (*kind, "outliers of load_in_8bit") if self.load_in_8bit else kind

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's, of several cards; 0: none."""
        return int(self.strategy[-1]) if self.world > 1 and self.strategy in ("zero1", "zero2", "zero3") else 0

    @property
    def way(self) -> StrategyName:
        """The strategy of PyTorch that shares weights as this one does."""
        ways: dict[str, StrategyName] = {"zero1": "ddp", "zero2": "ddp", "zero3": "fsdp"}
        return ways.get(self.strategy) or cast(StrategyName, self.strategy)

    @property
    def sharded(self) -> bool:
        return self.world > 1 and STRATEGIES[self.way].shards_weights

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP looks for parameters that a step does not use: LLaMA-Factory forbids it with adapters."""
        return self.loop != "llama-factory" if self.adapters else not self.gradient_checkpointing

    @property
    def adapters(self) -> bool:
        return self.method != "full"

    @property
    def merges(self) -> bool:
        return self.merge and self.adapters and not self.sharded

    @property
    def quantized(self) -> bool:
        return self.method == "qlora" or self.load_in_8bit

    @property
    def joined(self) -> bool:
        """Whether the rows of a batch become a single one, as TRL packs them: it has no padding, and a mask keeps
        samples apart where the attention does not."""
        return self.packing and self.loop == "trl" and not self.preferences

    @property
    def sequences(self) -> int:
        return self.batch_size * (self.preferences.sequences if self.preferences else 1)

    def rows(self, batch: int) -> tuple[int, int]:
        """(rows, tokens of each) of a batch of so many samples."""
        rows = batch * self.preferences.sequences if self.preferences else batch
        return (1, rows * self.seq_len) if self.joined else (rows, self.seq_len)

    @property
    def usual(self) -> "FineTune":
        """The same with sequences of the usual length. Memory depends on the longest ones, time on these."""
        length = min(self.row_tokens, self.seq_len)
        return self.model_copy(update={"seq_len": length, "row_tokens": 0}) if length else self

    @property
    def fills_rows(self) -> bool:
        return self.max_steps > 0 and not (self.packing or self.row_tokens or self.generates)

    @property
    def offloads(self) -> bool:
        """Whether checkpoints go to the host: unsloth does so for sequences of 512 tokens or more."""
        return self.unsloth and self.gradient_checkpointing and self.offload_checkpoints and self.seq_len >= 512

    def unsloth_functions(self, model_type: str) -> Unsloth | None:
        return unsloth_of(model_type, self.dtype, adapters=self.adapters) if self.unsloth else None

    def positions_beyond(self, facts: ModelFacts) -> bool:
        return facts.positions == "learned" and self.seq_len > facts.max_positions

    @property
    def tokens_per_step(self) -> int:
        return math.prod(self.rows(self.batch_size)) * self.grad_accum * self.world

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where neither they nor the tokens of the data are known."""
        tokens = self.dataset_tokens * self.epochs
        return self.max_steps or math.ceil(tokens / self.usual.tokens_per_step) or None


WRAPPED = ("trainer", "trl", "axolotl", "llama-factory")  # loops that wrap the model in DDP on several cards

# One sequence at a time with checkpointing: what guides for one card begin with, as unsloth's notebooks do.
PROMPT_LEN = 512  # tokens of a prompt of unknown length: TRL's max_prompt_length until 0.27
RLOO: dict[str, Any] = {"num_generations": 2, "beta": 0.05}  # its config's defaults
GROUP = {"num_generations": 8, "completion_len": 512, "batch_size": 1}  # unless given
ASKED: Mapping[str, Any] = {"seq_len": 2048, "batch_size": 1, "gradient_checkpointing": True}


def asked(model: ModelSource, values: Mapping[str, Any]) -> FineTune:
    """The run of a model that is asked about with these options and no trainer's file."""
    kind = PREFERENCES.get(values.get("training", ""))
    own: dict[str, Any] = {"loop": "trl", "batch_size": 1 + kind.drifts} if kind else {}
    if kind and kind.generates:  # one prompt a step
        of_kind = RLOO if values["training"] == "rloo" else {}
        group, length, batch = ({**of_kind, **values}.get(*each) for each in GROUP.items())
        own |= of_kind | {"seq_len": PROMPT_LEN + length, "grad_accum": group // math.gcd(group, batch)}
        return FineTune.model_validate({**ASKED, **own, **values})
    return FineTune.model_validate({**ASKED, **own, "seq_len": min(ASKED["seq_len"], model.max_positions), **values})


FINETUNE_OPTIONS = options_of(FineTune)
OF_VLLM = ("vllm_memory", "vllm_sleep")
OF_GENERATION = (
    "completion_len", "num_generations", "steps_per_generation", "num_iterations", "beta", "vllm", *OF_VLLM
)  # fmt: skip
OPTION_OF: Mapping[str, str] = {  # an option's name, or another spelling of it -> its name
    spelling: option.name for option in FINETUNE_OPTIONS.values() for spelling in (option.name, *option.aliases)
}

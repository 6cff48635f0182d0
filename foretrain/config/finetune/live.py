"""A Trainer that is about to train, read as a model and a `FineTune`: from plain values, without torch.

Who asks has the objects; here come what their `to_dict()` gives and what only the objects know (`LiveRun`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.adapter import put_adapter
from foretrain.config.finetune.formats.format import training_arguments
from foretrain.config.finetune.options import Bound, FineTune
from foretrain.config.finetune.table import FileSettings, Table
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.read import facts_of

WHERE = "TrainingArguments"
# Of TrainingArguments, what a plan does not have and a comparison of runs asks for.
LEARNING = ("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "seed")


@dataclass(frozen=True)
class LiveRun:
    """What is known of a run. `adapter`: peft's config, if any; `four_bit`: bitsandbytes' quantization config.

    `other_trainer`: the name of one of TRL's that is no SFTTrainer; `dtype`: of the weights; `seq_len`, `padded`: of
    the batches; `max_steps`: as the Trainer has worked it out; `unsloth`: it loaded the model; `offloads`: its
    checkpoints go to the host; `predicts_tokens`: whether the model's class is one that predicts the next token.
    """

    model_class: str
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    dtype: str
    attention: str
    seq_len: int
    padded: bool = False
    packing: bool = False
    max_steps: int = 0
    batch_size: int = 0
    eval_batches: int = 0
    keeps_logits: bool = False
    checkpointing: bool = False
    unsloth: bool = False
    offloads: bool = False
    adapter: Mapping[str, Any] | None = None
    four_bit: Mapping[str, Any] | None = field(default=None)
    loop: str = "trainer"
    other_trainer: str = ""

    @property
    def predicts_tokens(self) -> bool:
        """Whether the loss is of the next token, as a plan has it."""
        return self.model_class.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def read_live(run: LiveRun) -> tuple[ModelSource, FineTune, dict[str, Bound]]:
    """(the model, how it is trained, what is not planned with what the figures then are). Raises UserError for what
    cannot be planned."""
    if not run.predicts_tokens:
        raise UserError("usage.callback_head", model=run.model_class)
    if run.other_trainer:
        raise UserError("usage.callback_trainer", trainer=run.other_trainer)
    found = FileSettings("trainer", WHERE)
    training_arguments(Table(_arguments(run.arguments), found))
    if found.sharding:
        raise UserError("usage.callback_sharded", sharding=found.sharding)
    _adapter(run, found)
    given = {
        "dtype": run.dtype, "seq_len": run.seq_len, "padded": run.padded, "packing": run.packing,
        "max_steps": max(0, run.max_steps), "keeps_logits": run.keeps_logits, "loop": run.loop,
        "gradient_checkpointing": run.checkpointing or found.values.get("gradient_checkpointing", False),
        "unsloth": run.unsloth, "offload_checkpoints": run.offloads,
    }  # fmt: skip
    if run.eval_batches:
        given["eval_batches"] = run.eval_batches
    if run.batch_size:
        given["batch_size"] = run.batch_size
    table = Table({"attn_implementation": run.attention}, found)
    table.put("attn", "attn_implementation")
    tune = FineTune.model_validate({**found.values, **given})
    return _source(run), tune, found.unplanned


def _arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a plan reads; what is at its default of many keys, such as fsdp_config, says nothing by itself."""
    keys = {key: value for key, value in arguments.items() if value is not None}
    if not keys.get("fsdp"):
        keys.pop("fsdp_config", None)
        keys.pop("fsdp", None)
    return keys


def _adapter(run: LiveRun, found: FileSettings) -> None:
    """Method, rank, modules and dropout of peft's adapter. Raises UserError for an adapter that is no LoRA."""
    adapter = run.adapter
    table = Table(dict(adapter or {}), found)
    if adapter is None:
        if run.four_bit is not None:
            raise UserError("usage.callback_adapter", kind="4-bit weights without an adapter")
        return
    put_adapter(table, _source(run).facts, four_bit=run.four_bit is not None)
    if run.four_bit is not None:
        found.values["double_quant"] = bool(run.four_bit.get("bnb_4bit_use_double_quant"))


def _source(run: LiveRun) -> ModelSource:
    """The model by its config, as if its weights were not quantized: the method says that they are."""
    left_out = {"quantization_config", "auto_map"} if run.four_bit is not None else {"auto_map"}
    if run.loop == "trl":  # which asks each mixture for them, whatever its config said
        left_out.add("output_router_logits")
    config = {key: value for key, value in run.config.items() if key not in left_out}
    name = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2] or str(config.get("model_type") or "")
    return ModelSource(name=name or run.model_class, where=run.model_class, config=config, facts=facts_of(config))

"""Options that do nothing beside others. Typed ones are refused; a file's get a note, as its trainer accepts them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import OF_GENERATION, OF_VLLM, FineTune
from foretrain.config.hub.facts import ModelFacts


class _Idle(NamedTuple):
    """Options, and when they do nothing. `id`: of the sentence; `noted`: whether a file's are worth a note."""

    options: tuple[str, ...]
    id: str
    when: Callable[[FineTune], bool]
    noted: bool = False


_ADAPTER = ("lora_r", "lora_targets", "lora_dropout", "lora_saved", "merge")
_EVALUATION = ("eval_batch_size", "eval_batches", "keeps_logits", "eval_accumulation_steps")
_IDLE = (
    _Idle(_ADAPTER, "adapter", lambda tune: not tune.adapters, noted=True),
    _Idle(("load_in_8bit",), "adapter", lambda tune: not tune.adapters, noted=True),
    _Idle(("load_in_8bit",), "sixteen_bit", lambda tune: tune.method == "qlora"),
    _Idle(("double_quant",), "four_bit", lambda tune: tune.method != "qlora"),
    _Idle(("offload_checkpoints",), "unsloth", lambda tune: not tune.unsloth and tune.loop != "unsloth", noted=True),
    _Idle(("offload_checkpoints", "reentrant"), "checkpointing", lambda tune: not tune.gradient_checkpointing),
    _Idle(("merge",), "sharded", lambda tune: tune.sharded),
    _Idle(("strategy",), "cards", lambda tune: tune.world == 1),
    _Idle(("packing",), "preferences", lambda tune: tune.preferences is not None),
    _Idle(("lora_dropout",), "preferences", lambda tune: tune.preferences is not None and not tune.generates),
    _Idle(OF_GENERATION, "generation", lambda tune: tune.training not in ("grpo", "rloo")),
    _Idle(OF_VLLM, "vllm", lambda tune: tune.vllm != "colocate"),
    _Idle(("packing",), "classification", lambda tune: tune.scores > 0),
    _Idle(("labels",), "labels", lambda tune: tune.training != "classification"),
    _Idle(("precompute_reference",), "reference", lambda tune: not tune.references or tune.generates),
    _Idle(("image_size",), "images", lambda tune: not tune.images),
    _Idle(("padded", "row_tokens"), "packing", lambda tune: tune.packing),
    _Idle(("row_tokens",), "completions", lambda tune: tune.generates),
    _Idle(_EVALUATION, "evaluate", lambda tune: not tune.evaluate),
    _Idle(("eval_accumulation_steps",), "logits", lambda tune: not tune.keeps_logits),
    _Idle(("epochs",), "max_steps", lambda tune: tune.max_steps > 0),
)


def idle(tune: FineTune) -> dict[str, str]:
    """The options that do nothing in this run, each with why: the id of a sentence. What is off does nothing anyway."""
    found: dict[str, str] = {}
    for each in _IDLE:
        if each.when(tune):
            found |= {name: each.id for name in each.options if getattr(tune, name) and name not in found}
    return found


def whole(tune: FineTune, typed: Mapping[str, str], facts: ModelFacts | None) -> FineTune:
    """The options as they are meant: unsloth's loop runs unsloth's functions. `typed`: the word that each option of the
    command line is from. Raises UserError for one that contradicts another, or does nothing."""
    if tune.loop == "unsloth" and not tune.unsloth:
        if "unsloth" in typed:
            word = typed["unsloth"]
            raise UserError("usage.unsloth_loop", option=word if word.startswith("--no") else f"{word}=false")
        tune = tune.model_copy(update={"unsloth": True})
    if tune.loop == "torchtune" and tune.unsloth and {"loop", "unsloth"} & typed.keys():
        raise UserError("usage.unsloth_torchtune")
    if "epochs" in typed and not tune.epochs and not tune.max_steps:
        raise UserError("usage.finetune_no_epochs", option=typed["epochs"])
    for name, why in idle(tune).items():
        if name in typed:
            values = {"method": tune.method, "training": tune.training, "strategy": tune.strategy}
            raise UserError(f"usage.finetune_idle.{why}", option=typed[name], **values)
    if "attn" in typed and tune.attn == "eager" and _own_attention(tune, facts):
        raise UserError("usage.unsloth_eager", option=f"{typed['attn']} {tune.attn}")
    return tune


def _own_attention(tune: FineTune, facts: ModelFacts | None) -> bool:
    """Whether unsloth's own blocks run, whose attention is never written out (unsloth/models/llama.py)."""
    own = tune.unsloth_functions(facts.model_type) if facts else None
    return own is not None and own.blocks


def idle_note(tune: FineTune, origins: Mapping[str, str], where: str) -> tuple[Note, ...]:
    """What to say of a file's keys that do nothing in the run that it describes. `origins`: the key of each option."""
    worth = {name for each in _IDLE if each.noted for name in each.options}
    keys = [origins[name] for name in idle(tune) if name in worth and name in origins]
    return (Note(id="finetune_idle", values={"where": where, "keys": keys}),) if keys else ()

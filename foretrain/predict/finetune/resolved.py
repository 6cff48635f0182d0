"""`resolved`: the options of a fine-tuning run with what is left to the model and the card decided. No torch."""

from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.finetune.attention import has_flash_2
from foretrain.predict.finetune.targets import adapted_roles, check_saved, no_such_layers, redirected


def resolved(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> FineTune:
    """The options with `auto` decided. Raises UserError for what this model cannot have."""
    tune = redirected(tune.model_copy(update={"unsloth": tune.unsloth or tune.loop == "unsloth"}))
    dtype: Any = tune.dtype
    tune = tune.model_copy(update={"amp": _amp(tune, gpu)})
    if dtype == "auto":  # unsloth loads any model in 16 bits
        dtype = facts.dtype if not tune.unsloth else "bfloat16" if gpu.supports_bf16 else "float16"
    if tune.unsloth and not tune.adapters and dtype == "float16":
        dtype = "float32"  # unsloth models/vision.py: "Float16 full finetuning … upcast weights to float32"
    if not tune.adapters and dtype == "float16" and tune.amp == "fp16":
        raise UserError("usage.fp16_weights")
    check_saved(facts, tune)
    if tune.adapters and not adapted_roles(facts, tune):
        raise no_such_layers(facts, tune)
    if tune.attn == "flash_attention_2" and dtype == "float32" and tune.amp == "no":
        raise UserError("usage.flash_needs_half")
    if tune.attn == "flash_attention_2" and not has_flash_2(gpu):
        raise UserError("usage.flash_needs_ampere", gpu=gpu.name, capability=".".join(map(str, gpu.capability)))
    asks = {"torch_compile": tune.compile, "unsloth": tune.unsloth, "use_liger_kernel": tune.liger}
    if (what := next((name for name, on in asks.items() if on), None)) and not gpu.has_triton:
        raise UserError("usage.needs_triton", what=what, gpu=gpu.name, capability=gpu.compute_capability)
    if tune.positions_beyond(facts):
        raise UserError("usage.seq_beyond", seq_len=tune.seq_len, most=facts.max_positions)
    return tune.model_copy(update={"dtype": dtype})


def _amp(tune: FineTune, gpu: Gpu) -> str:
    """Of QLoRA that of peft's and TRL's recipes: without autocast all that is not in 4 bits is fp32, which is slow and
    large; of unsloth its trainer's. Everything else computes in the dtype of its weights."""
    if tune.amp != "auto":
        return tune.amp
    half = "bf16" if gpu.supports_bf16 else "fp16"
    return half if (tune.quantized or tune.unsloth) and gpu.kind == "cuda" else "no"

"""Files of trainers that foretrain does not read: each is named, with the command that plans its run."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any, get_args

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import NAMES_OF_TRAINING, Training
from foretrain.config.hub.source import model_named

_SWIFT = frozenset(("train_type", "tuner_type", "rlhf_type", "quant_method", "quant_bits", "attn_impl", "freeze_vit",
    "freeze_llm", "freeze_aligner", "split_dataset_ratio", "loss_scale", "use_hf", "model_author",
    "truncation_strategy", "custom_register_path", "lora_dtype", "vit_gradient_checkpointing", "swift_version",
    "template_backend", "load_from_cache_file", "add_version"))  # fmt: skip
_LITGPT = frozenset(("checkpoint_dir", "out_dir", "train", "eval", "lora_query", "lora_key", "lora_value",
    "lora_projection", "lora_mlp", "lora_head", "initial_checkpoint_dir", "tokenizer_dir", "logger_name", "quantize",
    "num_nodes", "model_config", "resume"))  # fmt: skip
_NANOGPT = frozenset(("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps",
    "max_iters", "dropout", "bias", "learning_rate", "weight_decay", "beta1", "beta2", "grad_clip", "decay_lr",
    "warmup_iters", "lr_decay_iters", "min_lr", "vocab_size"))  # fmt: skip
_ADAPTED = {"lora_query": "q_proj", "lora_key": "k_proj", "lora_value": "v_proj", "lora_projection": "o_proj",
            "lora_mlp": "gate_proj,up_proj,down_proj"}  # fmt: skip

_OWNERS = {
    "pythia": "EleutherAI", "llama": "meta-llama", "codellama": "codellama", "qwen": "Qwen", "gemma": "google",
    "mistral": "mistralai", "mixtral": "mistralai", "phi": "microsoft", "falcon": "tiiuae", "smollm": "HuggingFaceTB",
    "olmo": "allenai", "tinyllama": "TinyLlama", "tiny-llama": "TinyLlama", "danube": "h2oai", "stable": "stabilityai",
}  # fmt: skip


def refuse(keys: Mapping[str, Any], source: str) -> None:
    """Nothing where the keys are of none of these; else raises UserError with what to run instead."""
    train = keys.get("train")
    tells: dict[str, tuple[bool, Callable[[Mapping[str, Any]], list[str]]]] = {
        "ms-swift": (len(_SWIFT & keys.keys()) >= 2 or "train_type" in keys or "rlhf_type" in keys, _of_swift),
        "litgpt": (
            len(_LITGPT & keys.keys()) >= 2 and isinstance(train, Mapping) and "global_batch_size" in train, _of_litgpt,
        ),
        "nanoGPT": ({"n_layer", "n_head", "n_embd"} <= keys.keys(), _of_nanogpt),
    }  # fmt: skip
    for trainer, (told, words) in tells.items():
        if told:
            raise UserError(
                "config.finetune_foreign",
                path=source,
                trainer=trainer,
                command=shlex.join(["foretrain", "plan", *words(keys)]),
            )


def _words(model: str, options: Mapping[str, Any]) -> list[str]:
    given = {name: value for name, value in options.items() if value not in (None, "", False)}
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in given.items()]
    return [model, *(word for pair in words for word in pair)]


def _model(named: Any) -> str:
    """The model as a command takes it: a preset or a path as it stands, else a repository."""
    text = str(named or "").removeprefix("checkpoints/").strip("/")
    if text and "/" not in text and not model_named(text):  # litgpt's own names, without the owner
        text = f"{next((owner for start, owner in _OWNERS.items() if text.lower().startswith(start)), 'OWNER')}/{text}"
    if model_named(text) or text.count("/") != 1 or text.startswith("."):
        return text or "hf:OWNER/MODEL"
    return f"hf:{text}"


def _of_swift(keys: Mapping[str, Any]) -> list[str]:
    kind = keys.get("train_type", keys.get("tuner_type", "lora"))
    four_bit = str(keys.get("quant_bits", keys.get("quantization_bit"))) == "4"
    word = str(keys.get("rlhf_type") or keys.get("task_type") or "sft").lower()
    training = NAMES_OF_TRAINING.get(word, word)
    known = training in get_args(Training)
    adapters = kind != "full"
    return _words(_model(keys.get("model")), {
        "training": None if word in ("sft", "causal_lm") else training if known else "unknown",
        "method": "full" if not adapters else "qlora" if four_bit else "lora",
        "lora-r": keys.get("lora_rank", 8) if adapters else None,
        "seq-len": keys.get("max_length"), "batch-size": keys.get("per_device_train_batch_size", 1),
        "grad-accum": keys.get("gradient_accumulation_steps"), "dtype": keys.get("torch_dtype"),
        "gradient-checkpointing": keys.get("gradient_checkpointing", True), "optim": keys.get("optim"),
    })  # fmt: skip


def _of_litgpt(keys: Mapping[str, Any]) -> list[str]:
    train = keys["train"]
    adapters = any(key.startswith("lora_") for key in keys)
    four_bit = "bnb" in str(keys.get("quantize") or "")
    micro, total = train.get("micro_batch_size") or 1, train.get("global_batch_size")
    cards = keys.get("devices") if isinstance(keys.get("devices"), int) else 1
    whole = isinstance(total, int) and isinstance(micro, int) and isinstance(cards, int)
    precision = str(keys.get("precision") or "")
    return _words(_model(keys.get("checkpoint_dir") or keys.get("model_name")), {
        "training": None if adapters or keys.get("checkpoint_dir") else "pretraining",
        "method": "qlora" if adapters and four_bit else "lora" if adapters else "full",
        "no-double-quant": adapters and four_bit and "dq" not in str(keys["quantize"]),
        "lora-r": keys.get("lora_r") if adapters else None,
        "lora-targets": ",".join(name for key, name in _ADAPTED.items() if keys.get(key)) if adapters else None,
        "seq-len": train.get("max_seq_length"), "batch-size": micro,
        "grad-accum": max(1, total // (micro * cards)) if whole and micro and cards else None,
        "dtype": "bfloat16" if precision == "bf16-true" else "float32" if "mixed" in precision else None,
        "amp": "bf16" if precision == "bf16-mixed" else "no",
    })  # fmt: skip


def _of_nanogpt(keys: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={keys[key]}" for key in keys if key in _NANOGPT and isinstance(keys[key], int | float | str)]

"""Which fine-tuning runs are tried on the CUDA build: a grid for Llama and Qwen3, what else a run can have, real sizes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.presets import models
from tests.kit.finetune import FAMILIES, small

# Large enough for an error of a MiB to show, and small enough for a CPU to move the weights of.
SIZES = {
    "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "head_dim": 64, "num_attention_heads": 8,
    "max_position_embeddings": 1024, "sliding_window": 128, "n_embd": 512, "n_head": 8, "n_positions": 1024,
    "n_inner": 2048,
}  # fmt: skip
OWN = {"phi-2": {"hidden_size": 640}}  # 0.4 of a head of 80 is rotated
BASE: dict[str, Any] = {
    "seq_len": 512, "batch_size": 2, "dtype": "bfloat16", "amp": "no", "evaluate": True, "eval_batch_size": 2, "eval_batches": 3,
    "merge": True,
}  # fmt: skip
MIXED = {"dtype": "float32", "amp": "bf16"}
LLAMA, QWEN = "llama-3.2-1b", "qwen3-0.6b"


@dataclass(frozen=True)
class Case:
    """A run. `moved`: the script brings the model to the card before adapters are made; else the Trainer does."""

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    full_size: bool = False
    moved: bool = True

    @property
    def tune(self) -> FineTune:
        return FineTune(**{**BASE, **self.options})

    @property
    def config(self) -> dict[str, Any]:
        return (
            dict(models()[self.model].config)
            if self.full_size
            else small(self.model, **{**SIZES, **OWN.get(self.model, {})})
        )

    @property
    def short(self) -> dict[str, Any]:
        """The config of the small run on the CPU, whose sequences are longer than the window, too."""
        return small(self.model, sliding_window=8)

    @property
    def kind(self) -> str:
        """What the results are told by."""
        return self.name.split(":")[0]


def cases() -> list[Case]:
    """All, in the order in which they are run. A name is a case's for good."""
    return [*_grid(), *_other(), *_families(), *_full_size()]


def _grid() -> Iterator[Case]:
    """Every pair of choices: the optimizer follows from the others, so that half of all combinations are run."""
    for choices in itertools.product((0, 1), repeat=5):
        second, lora, checkpointing, mixed, twice = choices
        model, optim = (LLAMA, QWEN)[second], ("adamw_torch_fused", "adamw_torch")[sum(choices) % 2]
        method, weights, accum = ("full", "lora")[lora], ("bf16", "fp32 + autocast")[mixed], 1 + twice
        options = {"method": method, "gradient_checkpointing": bool(checkpointing), "optim": optim, "grad_accum": accum}
        words = [model, method, weights, optim, *(["checkpointing"] if checkpointing else []), f"accumulation {accum}"]
        yield Case("grid: " + ", ".join(words), model, {**options, **(MIXED if mixed else {})})


_OTHER: list[tuple[str, dict[str, Any]]] = [
    ("autocast over bf16", {"amp": "bf16"}),
    ("fp32", {"dtype": "float32"}),
    ("fp16", {"dtype": "float32", "amp": "fp16"}),
    ("padded", {"padded": True}),
    ("reentrant", {"gradient_checkpointing": True, "reentrant": True}),
    ("eager attention", {"attn": "eager"}),
    ("no clipping", {"max_grad_norm": 0.0}),
    ("adafactor", {"optim": "adafactor"}),
    ("sgd", {"optim": "sgd"}),
    ("adamw_8bit", {"optim": "adamw_8bit"}),
    ("paged_adamw_8bit", {"optim": "paged_adamw_8bit"}),
    ("collected logits", {"keeps_logits": True, "eval_batches": 4}),
    ("no evaluation", {"evaluate": False}),
    ("accumulation 5", {"grad_accum": 5}),
    ("long", {"seq_len": 1000, "batch_size": 1}),
]


def _other() -> Iterator[Case]:
    for i, (told, options) in enumerate(_OTHER):
        for method in ("full", "lora"):
            model = (LLAMA, QWEN)[(i + (method == "lora")) % 2]
            yield Case(f"other: {model}, {method}, {told}", model, {**options, "method": method})
    for model in (LLAMA, QWEN):
        for method in ("full", "lora"):
            yield Case(f"other: {model}, {method}, moved by the Trainer", model, {"method": method}, moved=False)
        yield Case(f"other: {model}, dora", model, {"method": "dora", "amp": "bf16"})
        yield Case(f"other: {model}, lora dropout", model, {"method": "lora", "amp": "bf16", "lora_dropout": 0.1})
        for checkpointing, optim, accum in itertools.product(
            (False, True), ("adamw_torch_fused", "paged_adamw_8bit"), (1, 2)
        ):
            options = {"gradient_checkpointing": checkpointing, "optim": optim, "grad_accum": accum}
            words = [model, optim, *(["checkpointing"] if checkpointing else []), f"accumulation {accum}"]
            yield Case("qlora: " + ", ".join(words), model, {**options, "method": "qlora", "amp": "bf16"})


def _families() -> Iterator[Case]:
    for model in FAMILIES[2:]:
        for method in ("full", "lora", "qlora"):
            options = {"method": method, "amp": "bf16", "gradient_checkpointing": method == "qlora"}
            yield Case(f"family: {model}, {method}", model, options)


def _full_size() -> Iterator[Case]:
    long = {"seq_len": 2048, "batch_size": 1, "eval_batch_size": 1, "eval_batches": 2}
    for model in (QWEN, LLAMA):
        for told, options in (
            ("full, bf16", {"method": "full"}),
            ("full, fp32 + autocast, checkpointing", {"method": "full", "gradient_checkpointing": True, **MIXED}),
            ("lora, bf16", {"method": "lora"}),
            ("lora, autocast, checkpointing", {"method": "lora", "amp": "bf16", "gradient_checkpointing": True}),
            ("qlora, checkpointing", {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True}),
        ):
            yield Case(f"full size: {model}, {told}", model, {**long, **options}, full_size=True)

"""The forms of exports, each a module with the functions of `FormModule`, and the result of one. No torch."""

import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.options import RunConfig

Form = Literal["hf", "gguf", "onnx", "nanogpt", "safetensors"]
FORMS: dict[Form, str] = {
    "hf": "foretrain.training.exports.hugging_face",
    "gguf": "foretrain.training.exports.gguf_file",
    "onnx": "foretrain.training.exports.onnx_file",
    "nanogpt": "foretrain.training.exports.nanogpt",
    "safetensors": "foretrain.training.exports.plain",
}
GgufType = Literal["f32", "f16", "bf16", "q8_0"]
# How each stores matrices, by its name in llama.cpp: of the file as a whole, and of a tensor.
GGUF_TYPES: dict[GgufType, tuple[str, str]] = {
    "f32": ("ALL_F32", "F32"), "f16": ("MOSTLY_F16", "F16"), "bf16": ("MOSTLY_BF16", "BF16"),
    "q8_0": ("MOSTLY_Q8_0", "Q8_0"),
}  # fmt: skip


class Exported(Record):
    """The files written; `notes` are ids of texts, `quantize` llama.cpp's command, `pushed` the address."""

    form: Form
    path: str
    checkpoint: str
    step: int
    files: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # newer checkpoints that are damaged, and why
    notes: tuple[str, ...] = ()
    quantize: str = ""
    pushed: str = ""


@dataclass(frozen=True)
class FormOptions:
    gguf_type: GgufType = "f16"
    card: Callable[[Any], str] | None = None


def gguf_name(gguf_type: str) -> str:
    return f"model-{gguf_type}.gguf"


def quantize_command(out: Path, options: FormOptions) -> str:
    """Return llama.cpp's command that makes a 4-bit file beside this one; empty where this has 8 bits already."""
    if options.gguf_type == "q8_0":
        return ""
    small = "Q4_K_M"
    files = (out / gguf_name(options.gguf_type), out / gguf_name(small))
    return shlex.join(["llama-quantize", *map(str, files), small])


class FormModule(Protocol):
    def refusal(self, config: RunConfig) -> UserError | None: ...

    def write(self, source: Any, folder: Path, options: FormOptions) -> None: ...


def module_of(form: Form) -> FormModule:
    return cast(FormModule, importlib.import_module(FORMS[form]))

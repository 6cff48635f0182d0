"""The form `gguf`: one file for llama.cpp, by its own converter (conversion/gpt2.py, llama.py, qwen.py and base.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from foretrain.base.errors import UserError, need_extra
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.data.hf_tokenizer import keys_of
from foretrain.model import foreign
from foretrain.training.exports.forms import GGUF_TYPES, FormOptions, gguf_name
from foretrain.training.exports.source import Source


def refusal(config: RunConfig) -> UserError | None:
    family = family_of(config)
    return None if family.gguf_architecture(config) else UserError("usage.export_gguf_recipe", recipe=family.name)


def write(source: Source, folder: Path, options: FormOptions) -> None:
    """Write model-TYPE.gguf. Raises UserError where the package `gguf` is missing, or f16 cannot hold a weight."""
    gguf = need_extra("gguf", "export")
    architecture = source.shape.family.gguf_architecture(source.config)
    writer = gguf.GGUFWriter(folder / gguf_name(options.gguf_type), architecture)
    try:
        _add_keys(writer, _general(gguf, source, options))
        sizes = source.shape.family.write_gguf(source.config)
        _add_keys(writer, {f"{architecture}.{key}": value for key, value in sizes.items()})
        _add_keys(writer, _tokenizer(source))
        _add_tensors(gguf, writer, source, options, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _general(gguf: Any, source: Source, options: FormOptions) -> dict[str, Any]:
    name = "".join(c for c in source.record.name if c.isprintable())[:100]
    return {
        "general.type": "model",
        "general.name": name or "model",
        "general.file_type": int(gguf.LlamaFileType[GGUF_TYPES[options.gguf_type][0]]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }


def _tokenizer(source: Source) -> dict[str, Any]:
    """Return the tokenizer's keys; without one llama.cpp takes and gives token ids."""
    words = source.tokenizer()
    found = None if words is None else keys_of(words, source.config.vocab_size, source.separator(words))
    if found is not None:
        return found
    source.notes.append("gguf_no_tokenizer" if words is None else "gguf_other_tokenizer")
    return {"tokenizer.ggml.model": "none"}


def _add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    """Add each in the type that llama.cpp reads: whole numbers as uint32, others as float32."""
    adders = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    for key, value in keys.items():
        getattr(writer, adders[type(value)])(key, value)


def _add_tensors(gguf: Any, writer: Any, source: Source, options: FormOptions, architecture: str) -> None:
    config, family = source.config, source.shape.family
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.n_layer)
    rotated, wanted = family.gguf_rotated(config), GGUF_TYPES[options.gguf_type][1]
    for name, tensor in foreign.with_biases(source.weights, source.shape):
        heads = next((heads for end, heads in rotated.items() if name.endswith(end)), 0)
        data = (neighbours(tensor, heads) if heads else tensor).contiguous().numpy()
        kind = "F32" if data.ndim == 1 or name == family.positions else wanted
        if kind == "Q8_0" and data.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]:
            kind = "F16"
            _note(source, "gguf_f16_rows")
        stored = gguf.GGMLQuantizationType[kind]
        with np.errstate(over="ignore"):
            packed = gguf.quantize(data, stored)
        if kind == "F16" and not np.isfinite(packed).all():
            raise UserError("usage.export_f16_range", tensor=name, most=float(np.abs(data).max()))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=stored)
    if family.name == "nanogpt":
        _note(source, "gguf_gelu")
        if not config.bias:
            _note(source, "zero_biases")


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Interleave each head's rows i and i + D/2: llama.cpp's Llama rotates neighbours, ours halves."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, 2, half, -1).transpose(1, 2).reshape(rows.shape)


def _note(source: Source, id: str) -> None:
    if id not in source.notes:
        source.notes.append(id)

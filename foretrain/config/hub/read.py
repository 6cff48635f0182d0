"""A config.json of Hugging Face, read as data: `facts_of` its table, `config_of` a text, `read_config` of a file.

No code that it names is ever run, and nothing but the file is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.safe_read import read_bytes
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.families import FAMILIES
from foretrain.config.hub.keys import Keys, Unknown

MAX_BYTES = 10 * 2**20  # most have some kilobytes, those with many labels some megabytes
FOUR_BITS = "bitsandbytes"
_DTYPES = ("float32", "bfloat16", "float16")


def facts_of(config: Mapping[str, Any], where: str = "config.json") -> ModelFacts | None:
    """What a config.json says of a model's memory and time; None of a family, or a part, that foretrain has no facts
    of.

    Raises UserError 'config.hub_…' for a size that is missing or that no model can have; `where` is named in it.
    """
    if not isinstance(config, Mapping):
        raise UserError("config.hub_not_object", where=where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError("config.hub_no_model_type", where=where)
    keys = Keys(config, where, model_type[:40])
    if model_type not in FAMILIES:
        return None
    try:
        parts = FAMILIES[model_type](keys)
    except Unknown:
        return None
    return ModelFacts(
        model_type=model_type, **parts, dtype=_dtype(keys), quantization=_quantization(keys)
    )  # fmt: skip


def _dtype(keys: Keys) -> Any:
    """That of the published weights; float32 where the config does not say, as torch.save has it."""
    for table in (keys, keys.table("text_config")):
        word = table.config.get("dtype") or table.config.get("torch_dtype")
        if isinstance(word, str) and word.removeprefix("torch.") in _DTYPES:
            return word.removeprefix("torch.")
    return "float32"


def _quantization(keys: Keys) -> str:
    """The method by which the published weights are quantized; none: ''."""
    table = keys.table("quantization_config")
    if not table.config:
        return ""
    method = table.word("quant_method", default=FOUR_BITS)[:40]
    return f"{method}, 8 bits" if method == FOUR_BITS and table.config.get("load_in_8bit") else method


def config_of(text: str, where: str) -> dict[str, Any]:
    """The table of a config.json's text. Raises UserError where it is not JSON, or not an object."""
    try:
        found = json.loads(text)  # with Infinity and NaN, as Python writes them; no size may be one
    except RecursionError:
        raise UserError("config.hub_not_json", where=where, reason="it is nested too deeply") from None
    except ValueError as error:
        raise UserError("config.hub_not_json", where=where, reason=str(error)[:200]) from None
    if not isinstance(found, dict):
        raise UserError("config.hub_not_object", where=where)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The table of a config.json file. Raises UserError where it cannot be read as one."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("config.hub_not_json", where=str(path), reason="it is not UTF-8 text") from None
    except OSError as error:
        raise UserError("config.cannot_read", path=str(path), reason=error.strerror or str(error)) from None
    return config_of(text, str(path))


def names_code(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names Python code of its own, which is never run."""
    return bool(config.get("auto_map"))

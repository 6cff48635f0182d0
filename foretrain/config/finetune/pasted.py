"""A model's config.json or a trainer's config that somebody pasted. No file is read, and nothing is fetched."""

import json
import re
from dataclasses import dataclass
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS
from foretrain.config.finetune.read import SCRIPTS, FineTuneReading, reading_of, settings_of
from foretrain.config.finetune.yaml_file import notebook_code, table_of
from foretrain.config.hub.facts import ModelSource
from foretrain.config.hub.source import describes_model, facts_of, names_code, preset_source, repository_in, text_source

_SCRIPT = re.compile(r"^(?:import|from)\s+\w", re.MULTILINE)


@dataclass(frozen=True)
class Pasted:
    """What was read. `named`: the model as the text names it, '' where it names none or is one itself; `model`: None
    where that is not known here; `is_model`: the text is a model's config.json; `values`: by FineTune's options."""

    named: str
    model: ModelSource | None
    is_model: bool
    values: dict[str, Any]
    reading: FineTuneReading


def read_pasted(text: str, name: str) -> Pasted:
    """What a pasted text says; `name` is that of its file, which decides whether it is a script. Raises UserError."""
    if name.endswith(".ipynb"):
        text = notebook_code(text, name)
    script = name.endswith(SCRIPTS) or (not name.endswith((".yaml", ".yml", ".json")) and bool(_SCRIPT.search(text)))
    keys = table_of(text, name) if not script and text.lstrip().startswith("{") else {}
    if "peft_type" in keys and "model_type" not in keys:
        return _of_adapter(keys, name)
    if describes_model(keys):
        model = text_source(text, name)
        return Pasted("", model, True, {}, FineTuneReading(where=name))
    found = settings_of(text, name, script=script)
    named = found.model or ""
    model = preset_source(repository_in(named) or named)
    unsaid = {option: FINETUNE_OPTIONS[option].default for option in ASKED}  # its trainer's, not a form's
    return Pasted(named, model, False, {**unsaid, **found.values}, reading_of(found, model))


def _of_adapter(keys: dict[str, Any], name: str) -> Pasted:
    """The model that an adapter of peft is for, as its file read from a path says it."""
    base = keys.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError("config.hub_adapter_without", path=name)
    return Pasted(base, preset_source(base), False, {}, FineTuneReading(where=name))


def shortened(source: ModelSource) -> str:
    """A config.json of the keys alone that decide something here, as short JSON: it fits into a link."""
    config, where = dict(source.config), source.where
    wanted = source.facts, names_code(config)
    for key in source.config:
        without = {name: value for name, value in config.items() if name != key}
        try:
            if (facts_of(without, where), names_code(without)) == wanted:
                config = without
        except UserError:  # it is needed
            continue
    return json.dumps(config, separators=(",", ":"))

"""JSON Schemas of the TOML files that users write: docs/schemas/toml/. Editors complete and check by them.

Made from the definitions that foretrain itself checks by; tests/repository/test_toml_schemas.py holds the two to each other. The
form is what SchemaStore takes: draft 7, an `$id`, a description of every key.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tables import ROOT

from foretrain.config.microbatches import AUTO, BATCH
from foretrain.config.option import GROUPS
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import PRESET_ALIASES, PRESETS
from foretrain.config.resolve import ALIASES
from foretrain.hardware.catalogue import Gpu

FOLDER = ROOT / "docs" / "schemas" / "toml"
DIALECT = "http://json-schema.org/draft-07/schema#"
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "default")
# Allowed and required keys of a card file: catalogue.py reads it.
CARD_REQUIRED = ("memory_gib", "compute_capability")
CARD_OWN = ("name", "kind", "calibration")  # the first two come from the name of the block, the last is measured


def _head(name: str, title: str, description: str) -> dict[str, Any]:
    file = f"foretrain-{name}.schema.json"
    return {
        "$schema": DIALECT,
        "$id": f"https://json.schemastore.org/{file}",
        "title": title,
        "description": description,
    }


@cache
def _known() -> dict[str, Any]:
    return RunConfig.model_json_schema()["properties"]


def _option(name: str) -> dict[str, Any]:
    """Return an option's type, limits, default and help, for editors."""
    known = _known()[name]
    found = {key: known[key] for key in KEPT if key in known}
    about, unit = known["description"], f" [{known['unit']}]" if known.get("unit") else ""
    if name == BATCH:
        limits = {key: found.pop(key) for key in tuple(found) if key not in ("default",)}
        found = {"anyOf": [limits, {"const": AUTO}], **found}
    if OPTIONS[name].bare:  # true and false are words for two of its values
        limits = {key: found.pop(key) for key in tuple(found) if key not in ("default",)}
        found = {"anyOf": [limits, {"type": "boolean"}], **found}
    if OPTIONS[name].adds:  # values joined by commas, or a list of them
        one = {"type": found.pop("type")}
        found = {"anyOf": [one, {"type": "array", "items": one}], **found}
    return {"description": f"{about}{unit}", **found}


def run_config() -> dict[str, Any]:
    """Return the schema of a run's config: options at the top or in the tables of their groups, and a preset beneath
    them.
    """
    options = {name: _option(name) for name in OPTIONS}
    others = {alias: {**_option(name), "description": f"the same as {name}"} for alias, name in ALIASES.items()}
    presets = {"description": "what the config is built on", "enum": [*PRESETS, *PRESET_ALIASES]}
    definitions = {f"option-{name}": value for name, value in {**options, **others}.items()}
    refer = {name: {"$ref": f"#/definitions/option-{name}"} for name in {**options, **others}}
    table = {"type": "object", "additionalProperties": False, "properties": refer}
    tables = {group: {"anyOf": [refer[group], table]} if group in refer else table for group in GROUPS}
    return {
        **_head("config", "foretrain config", "A training run of foretrain: `foretrain plan FILE`, `foretrain train FILE`."),
        "type": "object", "additionalProperties": False,
        "properties": {"preset": presets, **refer, **tables}, "definitions": definitions,
    }  # fmt: skip


def cards() -> dict[str, Any]:
    fields = Gpu.model_json_schema()["properties"]
    card: dict[str, Any] = {}
    for name, known in fields.items():
        if name in CARD_OWN:
            continue
        types = [each["type"] for each in known.get("anyOf", [known]) if each["type"] != "null"]
        card[name] = {"type": types[0], "description": name.replace("_", " ")}
        if types[0] in ("number", "integer"):
            card[name] |= {"exclusiveMinimum": 0, "exclusiveMaximum": 1e6}
        if types[0] == "array":
            card[name] |= {"items": {"type": "string"}}
    card["compute_capability"] |= {"pattern": r"^\d{1,2}\.\d$"}
    block = {"type": "object", "additionalProperties": False, "required": [*CARD_REQUIRED], "properties": card}
    about = "Cards that foretrain's catalogue lacks: `--gpu-file FILE`. Each block is a card, by its name."
    return {**_head("cards", "foretrain cards", about), "type": "object", "additionalProperties": block}


def mixture() -> dict[str, Any]:
    weights = {
        "type": "object", "minProperties": 1, "description": "dataset, or its folder, and its weight",
        "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
    }  # fmt: skip
    about = 'A mixture of prepared datasets: `dataset = "mix.toml"`.'
    return {
        **_head("mixture", "foretrain mixture", about),
        "type": "object", "additionalProperties": False, "required": ["weights"], "properties": {"weights": weights},
    }  # fmt: skip


SCHEMAS = {"config": run_config, "cards": cards, "mixture": mixture}
# SchemaStore's entries: which files an editor checks by each.
FILES = {
    "config": ["foretrain.toml", "*.foretrain.toml"], "cards": ["foretrain-cards.toml"],
    "mixture": ["foretrain-mix.toml", "*.mix.toml"],
}  # fmt: skip


def catalogue() -> list[dict[str, Any]]:
    made = {name: make() for name, make in SCHEMAS.items()}
    return [
        {"name": each["title"], "description": each["description"], "fileMatch": FILES[name], "url": each["$id"]}
        for name, each in made.items()
    ]


def path_of(name: str) -> Path:
    """docs/schemas/toml/foretrain-config.schema.json for config."""
    return FOLDER / f"foretrain-{name}.schema.json"


def files() -> dict[Path, str]:
    made: dict[Path, Any] = {path_of(name): make() for name, make in SCHEMAS.items()}
    made[FOLDER / "schemastore-catalog.json"] = catalogue()
    return {path: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for path, value in made.items()}

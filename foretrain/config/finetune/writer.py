"""A trainer's YAML or JSON file with other values, each in its key's place, where it then reads as the same run."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FINETUNE_OPTIONS, FineTune
from foretrain.config.finetune.read import settings_of
from foretrain.config.finetune.table import FileSettings
from foretrain.config.finetune.together import idle
from foretrain.config.finetune.yaml_file import yaml_module

SUFFIXES = (".yaml", ".yml", ".json")
_INSIDE = ("kwargs", "config")  # keys of tables that a flat file has, too
_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")


def _together(format: str, option: str, value: Any) -> dict[str, Any]:
    """Return the keys that say an option together, where one alone cannot."""
    if (format, option, value) == ("axolotl", "liger", True):
        return {"plugins": ["axolotl.integrations.liger.LigerPlugin"], **dict.fromkeys(_LIGER, True)}
    if (format, option) == ("axolotl", "lora_targets") and value != "all-linear":
        return {"lora_target_linear": False, "lora_target_modules": value.split(",")}
    return {}


def changed_text(text: str, source: str, format: str, values: Mapping[str, Any]) -> str | None:
    """Return the text with these options, but for the data's; None where its keys cannot say one of them."""
    kept = {option: value for option, value in values.items() if FINETUNE_OPTIONS[option].compared}
    first = now = settings_of(text, source, format, script=False)
    wanted = FineTune.model_validate({**first.values, **kept})
    for _ in FINETUNE_OPTIONS:  # one key may decide several options, such as the batches of an evaluation
        option = next(iter(_differing(now, wanted)), "")
        if not option:
            return text
        for new in _attempts(text, now, option, getattr(wanted, option)):
            found = _read(new, first)
            if found is not None and option not in _differing(found, wanted):
                text, now = new, found
                break
        else:
            return None
    return None


def _differing(found: FileSettings, wanted: FineTune) -> list[str]:
    """The options that are otherwise, but for those that do nothing in the run."""
    tune, unused = FineTune.model_validate(found.values), idle(wanted)
    return [name for name in FINETUNE_OPTIONS if getattr(tune, name) != getattr(wanted, name) and name not in unused]


def _read(text: str, first: FileSettings) -> FileSettings | None:
    """What the text says; None where it says more or less beside options than at first."""
    try:
        found = settings_of(text, first.source, first.format, script=False)
    except UserError:
        return None
    same = found.unplanned == first.unplanned and found.unknown == first.unknown and found.model == first.model
    return found if same else None


def _attempts(text: str, before: FileSettings, option: str, value: Any) -> Iterator[str]:
    """The text with each key that may have the option, the one that it is from first."""
    known = FINETUNE_OPTIONS[option]
    names = [name for name in (before.origins.get(option, ""), option, *known.aliases) if name.isidentifier()]
    spellings = [value, value.split(",")] if isinstance(value, str) and "," in value else [value]
    pairs = [*product(names, spellings), *((key, True) for key, on, _ in known.switches if on == value)]
    yield from (new for key, spelled in pairs if (new := _with_key(text, key, spelled)))
    for key, spelled in (together := _together(before.format, option, value)).items():
        text = text and _with_key(text, key, spelled)
    if together and text:
        yield text


def _with_key(text: str, key: str, value: Any) -> str:
    """Return the text with a key's value, in place or at the end; "" where neither can be, as in a file of sections."""
    yaml = yaml_module()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    written = json.dumps(value)
    sections = [node for name, node in root.value if isinstance(node, yaml.MappingNode)]
    places = [node for table in (root, *sections) for name, node in table.value if name.value == key]
    if places:
        alone = len(places) == 1 and (isinstance(places[0], yaml.ScalarNode) or places[0].flow_style)
        return text[: places[0].start_mark.index] + written + text[places[0].end_mark.index :] if alone else ""
    if any(isinstance(node, yaml.MappingNode) and not name.value.endswith(_INSIDE) for name, node in root.value):
        return ""
    if root.flow_style:
        end = root.value[-1][1].end_mark.index
        return f"{text[:end]}, {json.dumps(key)}: {written}{text[end:]}"
    return f"{text}{'' if text.endswith(chr(10)) else chr(10)}{key}: {written}\n"

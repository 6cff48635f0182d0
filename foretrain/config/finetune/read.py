"""`read_finetune`: a model or somebody's config file, and words of the command line, as a model and a `FineTune`."""

import difflib
import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.config.finetune.formats import FORMATS, own_loops
from foretrain.config.finetune.formats.script import table_of_script, without_unread
from foretrain.config.finetune.live import IN_A_LAYER, of_all_layers, put_adapter
from foretrain.config.finetune.options import (
    ASKED,
    FINETUNE_OPTIONS,
    OPTION_OF,
    PEFT_TARGETS,
    WRAPPED,
    Bound,
    FineTune,
    asked,
)
from foretrain.config.finetune.shell_file import SHELL, command_of
from foretrain.config.finetune.table import FileSettings, Table
from foretrain.config.finetune.together import idle_note, whole
from foretrain.config.finetune.words import COSTS, parse_words
from foretrain.config.finetune.yaml_file import TABLES, notebook_code, read_text_of, table_of
from foretrain.config.hub.facts import UNNAMED, ModelFacts, ModelSource
from foretrain.config.hub.parameters import parameters_of
from foretrain.config.hub.source import (
    FOUR_BITS,
    MODEL_FILES,
    describes_model,
    facts_of,
    find_source,
    is_repository,
    keeping,
    model_named,
    names_code,
    preset_source,
    repository_in,
    text_source,
    unquantized,
)
from foretrain.config.options import OPTIONS
from foretrain.config.presets import IN_FOUR_BITS, PRESET_ALIASES, PRESETS, keeps_layers
from foretrain.config.resolve import is_nanogpt_table

TELLING = 2  # keys that no other trainer has
SCRIPTS = (".py", ".ipynb")
# A pattern of names that takes no long time: no part that is repeated as a whole, and few repeated characters.
_PATTERN = re.compile(r"(?=.{2,200}$)(?!.*\)[*+{])(?!(?:.*[*+{]){5})[\w.|()\[\]\\?*+^$:-]+")
_SUFFIXES = (*TABLES, *SCRIPTS, SHELL)


class FineTuneReading(Record):
    """What was read of a file and of the command line, and what was not.

    `origins`: the key or word that each option comes from; `unplanned`: what changes memory or time; `harmless`: what
    changes neither; `cards`, `sharding`: what the file wants, unplanned; `costs`: options about prices.
    """

    where: str
    format: str = ""
    origins: dict[str, str] = Field(default_factory=dict)
    unplanned: dict[str, Bound] = Field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    cards: int = 0
    sharding: str = ""
    notes: tuple[Note, ...] = ()
    costs: dict[str, str] = Field(default_factory=dict)


def read_finetune(
    source: str, words: Sequence[str] = (), known: ModelSource | None = None
) -> tuple[ModelSource, FineTune, FineTuneReading]:
    """Return (the model, how it is trained, what was read) of a model's name or path or a trainer's file. `words` count
    over the file. `known`: the model that `source` names. Raises UserError."""
    values, origins, others, word_notes = parse_words(words)
    path = None if known else _path(source)
    given = path is not None and _is_config(path)
    format = others.get("format", "")
    if format and format not in FORMATS:
        raise UserError("config.finetune_format", format=format[:60], formats=list(FORMATS))
    if format and not given:
        raise UserError("config.finetune_format_file", source=source[:200])
    found = read_file(path, format) if path and given else FileSettings("", source, model=source)
    if "accelerate" in others:
        _add_accelerate(found, Path(others["accelerate"]))
    if path is None and known is None and Path(source).suffix in _SUFFIXES:
        raise UserError("config.cannot_read", path=source[:200], reason=os.strerror(errno.ENOENT))
    named = others.get("model", found.model)
    if not named:
        id = "config.finetune_model_read" if found.unread_model else "config.finetune_no_model"
        id = "config.finetune_accelerate_alone" if found.format == "accelerate" else id
        raise UserError(id, path=source, what=found.unread_model)
    # What was typed is a path until it says hf:, so that a mistyped one does not go to Hugging Face.
    model = known or (_model(named, path) if given or "model" in others else find_source(source))
    if model.adapter is not None and not given:
        put_adapter(Table(dict(model.adapter), found), model.facts, four_bit=False)
    costs = {name: others[name] for name in COSTS if name in others}
    # what was typed for an option stands in the place of what the file says of it
    found.unplanned = {text: bound for text, bound in found.unplanned.items() if _option_of(text) not in values}
    reading = reading_of(found, model, origins)
    if found.values.get("loop") == "unsloth" != values.get("loop", "unsloth"):  # which runs none of its functions
        found.values |= {"unsloth": False, "offload_checkpoints": False}
    values = {**found.values, **values}
    tune = FineTune.model_validate(values) if given else asked(model, values)
    tune = whole(tune, origins, model.facts)
    if tune.method == "qlora":
        if model.facts is not None and model.facts.quantization == FOUR_BITS and "double_quant" not in origins:
            double = bool(model.config["quantization_config"].get("bnb_4bit_use_double_quant"))  # type: ignore[attr-defined]
            tune = tune.model_copy(update={"double_quant": double})
        model = unquantized(model)
    model, tune = _as_copied(model, tune, repository_in(model.where) or named, origins)
    read_from = {"unsloth": reading.origins.get("loop", "default")} if tune.unsloth else {}
    update = {"costs": costs, "origins": {**read_from, **reading.origins}, "notes": (*word_notes, *reading.notes)}
    return model, tune, reading.model_copy(update=update)


def _as_copied(
    model: ModelSource, tune: FineTune, named: str, origins: Mapping[str, str]
) -> tuple[ModelSource, FineTune]:
    """The run of a preset that is named by its copy in 4 bits, or that unsloth loads such a copy of, as the copy is.
    Raises UserError for a training that weights in 4 bits cannot have."""
    if model.facts is None or model.facts.kept or model.facts.quantization:
        return model, tune
    copy = bool(IN_FOUR_BITS.search(named))
    if copy and tune.method != "qlora" and not tune.unsloth:  # unsloth then loads the one in 16 bits
        raise UserError("usage.four_bit_source", model=named[:100], quantization=FOUR_BITS, method=tune.method)
    if tune.method == "qlora" and keeps_layers(named, unsloth=tune.unsloth):
        model = keeping(model, UNNAMED)
    if copy and "double_quant" not in origins:
        tune = tune.model_copy(update={"double_quant": True})
    return model, tune


def reading_of(found: FileSettings, model: ModelSource | None, origins: Mapping[str, str] = {}) -> FineTuneReading:
    """What was read; the modules that peft chooses for this model are put into the settings. `origins`: of words over
    the file; `model`: None where the file's is not known here."""
    if model is not None and found.peft_targets and "lora_targets" not in found.values:
        _choose_targets(found, model)
    if model is not None and model.facts is not None and _PATTERN.fullmatch(found.pattern[0]):
        _match_targets(found, model.facts)
    _share(found, origins)
    origins = {**found.origins, **origins}
    return FineTuneReading(
        where=found.source, format=found.format, origins=origins, unplanned=found.unplanned,
        unknown=tuple(found.unknown), harmless=tuple(found.harmless), cards=found.cards, sharding=found.sharding,
        notes=_notes(found, model, origins),
    )  # fmt: skip


def read_file(path: Path, format: str = "") -> FileSettings:
    """What a trainer's config file says, without looking for its model. Raises UserError."""
    return settings_of(read_text_of(path), str(path), format, script=path.suffix in SCRIPTS, folder=path.parent)


def settings_of(text: str, source: str, format: str = "", *, script: bool, folder: Path | None = None) -> FileSettings:
    """What the text of such a file says; `source` names it in sentences, `folder` is where it is. Raises UserError."""
    if script:
        called, keys = table_of_script(text, source)
        found = FileSettings(format or called, source, called=True)
        keys = without_unread(keys, found)
    elif source.endswith(SHELL):
        keys, named, unread, cards = command_of(text, source)
        found = FileSettings(format or named or format_of(keys, source), source, cards=cards)
        found.cards_key, found.unplanned = "nproc_per_node", dict.fromkeys(unread, "unknown")
    else:
        keys = table_of(text, source)
        found = FileSettings(format or format_of(keys, source), source)
    found.folder = folder
    FORMATS[found.format].read(Table(keys, found), text)
    found.values.setdefault("amp", "no")  # the trainers' own default
    return found


def format_of(keys: Mapping[str, Any], source: str) -> str:
    """Return the format by one unmistakable key, or by two that no other trainer has. Raises UserError."""
    own_loops.refuse(keys, source)
    trainer = FORMATS["trainer"]
    others = [each for each in FORMATS.values() if each is not trainer]
    for each in others:
        if each.fits(keys):
            return each.name
    counts = {each.name: len(each.keys & keys.keys()) for each in others}
    best = max(counts, key=lambda name: counts[name])
    if counts[best] >= TELLING:
        return best
    if trainer.fits(keys) or len(trainer.keys & keys.keys()) >= TELLING:
        return trainer.name
    every = sorted({key for each in FORMATS.values() for key in each.keys} | {"per_device_train_batch_size"})
    first = str(next(iter(keys)))
    near = difflib.get_close_matches(first, every, n=3, cutoff=0.9)
    if near and first not in every:
        raise UserError("config.finetune_no_format_near", path=source, key=first[:60], near=near)
    raise UserError("config.finetune_no_format", path=source, formats=list(FORMATS), example="--format trainer")


def is_finetune_file(source: str) -> bool:
    """Return whether a text names a file that a trainer's config may be, for JSON and Python by its content."""
    path = _path(source)
    if path is None or not _is_config(path):
        return False
    if path.suffix != ".py":
        return True
    try:
        table_of_script(read_text_of(path), source)
    except UserError:
        return False
    return True


def _option_of(text: str) -> str | None:
    """The option that a setting's key is a spelling of."""
    return OPTION_OF.get(text.partition(" ")[0].rpartition(".")[2])


def _path(source: str) -> Path | None:
    try:
        path = Path(source).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_config(path: Path) -> bool:
    """Whether a file is a trainer's config, and not a model's config.json."""
    if path.suffix not in _SUFFIXES:
        return False
    if path.suffix != ".json":
        return True
    if path.name in MODEL_FILES:
        return False
    return not describes_model(table_of(read_text_of(path), str(path)))


def _model(named: str, beside: Path | None) -> ModelSource:
    """The model that a file names: a path here or beside the file, a preset, else a repository, as for its trainer."""
    if beside is not None and named.startswith(".") and not Path(named).exists():
        named = str(beside.parent / named)
    if is_repository(named):
        return find_source(f"hf:{named}")
    if beside is not None and model_named(named) is None and not Path(named).expanduser().exists():
        last = re.split(r"[/\\]", named.rstrip("/\\"))[-1]  # a folder of a machine that is not this one
        if last != named and (preset := model_named(last) or model_named(f"unsloth/{last}")):
            return find_source(preset.name)
        raise UserError("config.finetune_model", path=str(beside), name=named[:100])
    return find_source(named)


def _add_accelerate(found: FileSettings, path: Path) -> None:
    part = read_file(path, "accelerate")
    found.values = {**found.values, **part.values}
    found.origins = {**found.origins, **part.origins}
    found.unplanned |= part.unplanned
    found.unknown += part.unknown
    found.cards, found.cards_key = (part.cards, part.cards_key) if part.cards else (found.cards, found.cards_key)
    for name in ("sharding", "sharded_values", "sharded_by", "hosted") if part.sharding else ():
        setattr(found, name, getattr(part, name))


def _share(found: FileSettings, origins: Mapping[str, str]) -> None:
    """Plan the cards that a file wants, which train with DDP where nothing cuts the model; else what one card holds is
    the least of it. `origins`: of words over the file."""
    several, loop = found.cards > 1 or "world" in origins, found.values.get("loop", "trainer")
    known = found.sharded_values and loop in (("trainer", "trl") if found.sharding == "fsdp" else WRAPPED)
    if several and (known or "strategy" in origins):
        found.unplanned = {key: bound for key, bound in found.unplanned.items() if key not in found.sharded_by}
        found.unplanned |= dict.fromkeys(found.hosted, "at_most")
        found.values |= found.sharded_values
        found.origins |= dict.fromkeys(found.sharded_values, found.sharded_by[-1] if found.sharded_by else "")
        found.sharding = ""
    if found.cards < 2 or "world" in origins:
        return
    if found.sharding or loop not in WRAPPED:
        found.unplanned.setdefault(f"{found.cards_key} = {found.cards}", "at_least")
    else:
        found.values["world"], found.origins["world"] = found.cards, found.cards_key


def _choose_targets(found: FileSettings, model: ModelSource) -> None:
    """The modules that peft chooses by itself; of another family it asks for them, so all are planned."""
    model_type = str(model.config.get("model_type"))
    if model_type in PEFT_TARGETS:
        found.values["lora_targets"] = PEFT_TARGETS[model_type]
        found.origins["lora_targets"] = "peft"


def _match_targets(found: FileSettings, facts: ModelFacts) -> None:
    """The modules whose names a pattern matches as a whole, as peft has it; one for some layers is planned for all."""
    pattern, key = found.pattern
    names = {each.module for each in parameters_of(facts) if each.role == "linear"}
    try:
        matched = {name for name in names if re.fullmatch(pattern, name)}
    except re.error:
        return
    modules = of_all_layers(matched, facts.n_layer)
    some = {name: parts[3] for name in modules if (parts := IN_A_LAYER.fullmatch(name))}
    if not matched or any("vision" in name for name in modules):
        return
    found.unplanned = {text: bound for text, bound in found.unplanned.items() if not text.startswith(f"{key} = ")}
    found.unplanned |= {f"{key} of some layers": "at_most"} if some else {}
    found.values["lora_targets"] = ",".join(sorted({some.get(name, name) for name in modules}))
    found.origins["lora_targets"] = key


def _notes(found: FileSettings, model: ModelSource | None, origins: Mapping[str, str]) -> tuple[Note, ...]:
    """What the user should know of the reading."""
    read_as = Note(id="finetune_read_as", values={"where": found.source, "format": found.format})
    notes = [read_as] if found.format else []
    if found.unknown:
        notes.append(Note(id="finetune_unknown", values={"where": found.source, "keys": found.unknown}))
    if found.unplanned:
        notes.append(Note(id="finetune_unplanned", values={"where": found.source, "keys": list(found.unplanned)}))
    if found.sharding:
        notes.append(Note(id="finetune_sharding", values={"where": found.source, "sharding": found.sharding}))
    if found.cards > 1 and "world" not in origins:
        notes.append(Note(id="finetune_cards", values={"where": found.source, "count": found.cards}))
    if found.format and "seq_len" not in origins:
        length = found.values.get("seq_len", FineTune().seq_len)
        notes.append(Note(id="finetune_seq_len", values={"where": found.source, "length": length}))
    if found.origins:
        notes += idle_note(FineTune.model_validate(found.values), found.origins, found.source)
    if model is not None and model.code:
        notes.append(Note(id="finetune_code", values={"model": model.name}))
    return tuple(notes)


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
    script = name.endswith(SCRIPTS) or (not name.endswith(TABLES) and bool(_SCRIPT.search(text)))
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


GPT_SUFFIXES = (".toml", ".py")  # of configs to pretrain with
SPELLINGS = {alias for option in OPTIONS.values() for alias in option.aliases}


def is_asked(words: Sequence[str] | None) -> bool:
    """Whether the first word is a model of Hugging Face's, or how somebody fine-tunes one. A name that is a preset of
    ours too is a fine-tuning run with an option that only such a run has, such as --method."""
    first = words[0] if words else "-"
    if first.startswith("-"):
        return False
    if first in PRESETS or first in PRESET_ALIASES:
        return model_named(first) is not None and bool(_deciding(words or []))
    if first.startswith("hf:") or model_named(first) is not None:
        return True
    path = Path(first)
    if is_nanogpt_table(path):
        return False
    if any((path / name).is_file() for name in MODEL_FILES) or path.name in MODEL_FILES or is_finetune_file(first):
        return True
    if path.suffix == ".json" and path.is_file():  # a model's config.json under another name
        return True
    if is_repository(first) and path.suffix not in GPT_SUFFIXES:
        return True
    return not path.exists() and (path.suffix in TABLES or bool(_deciding(words or [])))


def how_chosen(words: Sequence[str] | None) -> tuple[Note, ...]:
    """A sentence on which of the two was taken of a name that is a preset of ours and a model of Hugging Face's, why,
    and how to get the other; nothing of any other name."""
    first = words[0] if words else ""
    if (first not in PRESETS and first not in PRESET_ALIASES) or model_named(first) is None:
        return ()
    if options := _deciding(words or []):
        return (Note(id="chose_finetuning", values={"name": first, "options": options}),)
    return (Note(id="chose_pretraining", values={"name": first}),)


def _deciding(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(word.partition("=")[0] for word in words if _of_finetuning(word)))


def _of_finetuning(word: str) -> bool:
    """Whether a word is an option of a fine-tuning run, and none of a config."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return word.startswith("--") and name in OPTION_OF and name not in OPTIONS and name not in SPELLINGS

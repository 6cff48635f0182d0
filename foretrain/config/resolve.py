"""From what the user names to a checked `RunConfig`: presets, TOML, nanoGPT files and overrides, in that order."""

import contextlib
import difflib
import errno
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foretrain.base import files as bounded
from foretrain.base.errors import ConfigError, UserError
from foretrain.config import nanogpt_file, weights_file
from foretrain.config.checks import Setting, bad_value, check, odd_schedule, value_as_written
from foretrain.config.families import FAMILIES
from foretrain.config.finetune.yaml_file import TABLES, table_of
from foretrain.config.microbatches import BATCH, SWITCH, TOTAL, accumulation_for_total, last_word, layer_of, says_auto
from foretrain.config.nanogpt_file import Neighbour
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import FORETRAINS_OWN, OPTIONS, RunConfig, named, unread
from foretrain.config.presets import PRESET_ALIASES, PRESETS, preset_named
from foretrain.config.words import Vocabulary, Word

Trainer = Literal["foretrain", "nanogpt"]
STDIN = "stdin"
SIZES = {"n_layer", "n_head", "n_embd"}  # of a model, as nanoGPT names them
NANOGPTS = (".py", *TABLES)  # endings of files with nanoGPT's keys
# What train.py has when it runs a config; device and dtype are decided by the card.
NANOGPT_DEFAULTS = {
    **{name: option.default for name, option in OPTIONS.items() if option.nanogpt == "has"},
    "device": "cuda",
    "__name__": "__main__",
}
# Keys of forks that make another model than GPT-2.
_OTHER_MODEL = re.compile(
    r"(num|n)_(kv_heads?|key_value_heads|kv_groups|query_groups|(routed_|shared_)?experts?)(_per_tok(en)?)?|(use_)?moe"
    r"|(model_|hidden_|ffn_|ff_|inter_)?dim|d_(model|ff|inner|state)|n_inner|(hidden|intermediate|model)_size"
    r"|(use_)?swiglu|block_type|n_sense_vectors?|(llama|model|hf)_config(_path)?"
)
LEFT_OUT = set(named(lambda option: option.inert or option.label))  # what nanoGPT's file computes of these
ALIASES = {alias: name for name, option in OPTIONS.items() for alias in option.aliases}
KNOWN = {*OPTIONS, *ALIASES}
WORDS = Vocabulary(OPTIONS)
_WEIGHTS = (".gguf", ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".onnx")  # files of weights, by their names
# nanochat's dials describe what several versions of its model make of them: they are explained instead of mapped.
NANOCHAT = {
    "depth", "aspect_ratio", "head_dim", "max_seq_len", "device_batch_size", "target_param_data_ratio",
    "window_pattern",
}  # fmt: skip


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked config, the source of each value that is not a default, notes on what was skipped, files read.

    `trainer`: whose step was asked for by name. `piped_nanogpt`: nanoGPT's Python came from stdin. `looked`: where the
    files lie, or may, that nanoGPT's run.
    """

    config: RunConfig
    sources: dict[str, str]
    notes: tuple[UserError, ...] = ()
    name: str = "run"
    files: tuple[Path, ...] = ()
    trainer: Trainer | None = None
    piped_nanogpt: bool = False
    looked: tuple[Path, ...] = ()

    @property
    def has_nanogpt_file(self) -> bool:
        return self.piped_nanogpt or any(path.suffix in NANOGPTS for path in self.files)

    @property
    def step(self) -> Trainer:
        """Return whose training step is meant, in every command: the one that was asked for by name; else nanoGPT's for
        its own files, unless something that nanoGPT refuses was typed beside them; else foretrain's."""
        if self.trainer is not None:
            return self.trainer
        nanogpt = self.has_nanogpt_file and all(path.suffix in NANOGPTS for path in self.files)
        typed = (key for key, source in self.sources.items() if source.startswith("-"))
        return "nanogpt" if nanogpt and FORETRAINS_OWN.isdisjoint(typed) else "foretrain"


@dataclass
class _Collected:
    settings: list[Setting] = field(default_factory=list)
    notes: list[UserError] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    looked: list[Path] = field(default_factory=list)
    piped_nanogpt: bool = False
    own_keys: set[str] = field(default_factory=set)  # those that nanoGPT files set for themselves
    empty_files: list[str] = field(default_factory=list)  # nanoGPT files that set none of the options


def resolve(arguments: Sequence[str]) -> ResolvedConfig:
    """Resolve command-line words: presets, files, - for stdin, then `--key=value` in any form. Raises ConfigError."""
    found = _Collected()
    for word in WORDS.split(arguments):
        if word.key or (word.name.startswith("-") and word.name != "-"):
            _add_override(word, found)
        elif word.name == "-":
            _add_stdin(found)
        else:
            _add_source(word.typed[0], found)
    return _finish(found)


def from_values(values: dict[str, Any], source: str = "call") -> ResolvedConfig:
    """Return the config of a dictionary {option: value}. Raises ConfigError, which names every problem."""
    found = _Collected(settings=[Setting(key, value, source) for key, value in values.items()])
    return _finish(found)


def from_text(text: str, name: str) -> ResolvedConfig:
    """Resolve a text: TOML, else nanoGPT's Python, which is never run. No file is read. Raises ConfigError."""
    found = _Collected()
    if len(text.encode("utf-8", "replace")) > nanogpt_file.MAX_BYTES:
        found.problems.append(UserError("config.file_too_large", path=name, limit=nanogpt_file.MAX_BYTES))
    else:
        (_add_toml if _is_toml(text, name) else _add_nanogpt)(text, name, found)
    for setting in found.settings:
        if setting.key == "init_from" and isinstance(setting.value, str) and weights_file.is_path(setting.value):
            found.problems.append(UserError("config.path_in_text", value=setting.value[:80], source=setting.source))
    if found.problems:
        raise ConfigError(found.problems)
    found.names.append(Path(name).stem[:80] or "run")
    return _finish(found)


def _is_toml(text: str, name: str) -> bool:
    """Judge by the ending of its name; else what TOML can read is TOML."""
    suffix = Path(name).suffix.lower()
    if suffix in (".toml", ".py"):
        return suffix == ".toml"
    try:
        bounded.parse_toml(text)
    except (RecursionError, ValueError):
        return False
    return True


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def key_of(word: str) -> str:
    key = word.lstrip("-").replace("-", "_")
    return ALIASES.get(key, key)


def _add_override(word: Word, found: _Collected) -> None:
    key, value = word.key or key_of(word.name), word.value
    if value is None and key in OPTIONS:
        found.problems.append(UserError("config.no_value", key=key, source=word.written))
        return
    if key not in OPTIONS and not (word.key and value):
        value = ""  # reported as unknown, with the nearest names
    elif isinstance(value, str):
        quoted = value[:1] in ("'", '"')  # nanoGPT evaluates what is typed, so that a quoted text is the text
        is_text = key in OPTIONS and not quoted and (OPTIONS[key].type in ("str", "choice") or "," in value)
        value = value if is_text else nanogpt_file.parse_expression(value)
    found.settings.append(Setting(key, value, word.written))


def _add_source(word: str, found: _Collected) -> None:
    preset, path = preset_named(word), Path(word)
    if preset is not None:
        found.names.append(preset)
        source = f"preset {preset}"
        found.settings += [Setting(key, value, source) for key, value in PRESETS[preset].items()]
    elif path.suffix in (".toml", ".py") or (path.suffix in TABLES and path.is_file()):
        text = _read(path, found, word)
        if text is not None:
            found.names.append(os.fsencode(path.stem).decode("utf-8", "replace"))
            found.files.append(path)
            if path.suffix == ".toml":
                _add_toml(text, word, found)
            elif path.suffix == ".py":
                _add_nanogpt(text, word, found, _neighbours(path, found.looked))
            else:
                _add_table(text, word, found)
    else:
        found.problems.append(_unknown_source(word, path))


def _unknown_source(word: str, path: Path) -> UserError:
    if path.is_dir():
        inside = sorted(each for each in path.glob("*") if each.suffix in (".toml", ".py") and each.is_file())
        id = "config.folder_with" if inside else "config.folder"
        return UserError(id, path=_cut(word), example=str(inside[0]) if inside else "")
    if path.exists():
        return UserError("config.weights" if path.suffix in _WEIGHTS else "config.no_suffix", path=_cut(word))
    return unknown_preset(word)


def unknown_preset(word: str) -> UserError:
    near = difflib.get_close_matches(word.lower(), [*PRESETS, *PRESET_ALIASES], n=3)
    id = "config.unknown_source_near" if near else "config.unknown_source"
    return UserError(id, word=_cut(word), near=near, presets=list(PRESETS))


def _add_stdin(found: _Collected) -> None:
    try:
        stdin = sys.stdin  # None where it was closed
        data = stdin.buffer.read(nanogpt_file.MAX_BYTES + 1) if stdin is not None and not stdin.isatty() else b""
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        found.problems.append(UserError("config.not_text", path=STDIN))
        return
    except (OSError, ValueError) as error:  # closed
        found.problems.append(UserError("config.cannot_read", path=STDIN, reason=str(error)))
        return
    if len(data) > nanogpt_file.MAX_BYTES:
        found.problems.append(UserError("config.file_too_large", path=STDIN, limit=nanogpt_file.MAX_BYTES))
    elif not text.strip():
        found.problems.append(UserError("config.stdin_empty"))
    else:
        found.names.append("run")
        found.piped_nanogpt = not _is_toml(text, STDIN)
        (_add_nanogpt if found.piped_nanogpt else _add_toml)(text, STDIN, found)


def _read(path: Path, found: _Collected, word: str) -> str | None:
    """Return the text of a file, which is named as it was typed; None where it cannot be read."""
    try:
        return bounded.read_bytes(path, nanogpt_file.MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        found.problems.append(UserError("config.not_text", path=word))
    except OSError as error:
        if error.errno == errno.EFBIG:
            found.problems.append(UserError("config.file_too_large", path=word, limit=nanogpt_file.MAX_BYTES))
        else:
            found.problems.append(UserError("config.cannot_read", path=word, reason=error.strerror or str(error)))
    except ValueError as error:  # an embedded NUL in the name
        found.problems.append(UserError("config.cannot_read", path=repr(word), reason=str(error)))
    return None


def _add_nanogpt(text: str, path: str, found: _Collected, neighbour: Neighbour = lambda name: None) -> None:
    parsed = nanogpt_file.parse(text, path, KNOWN, LEFT_OUT, NANOGPT_DEFAULTS, neighbour)
    _add_parsed(parsed, path, found)


def _add_table(text: str, path: str, found: _Collected) -> None:
    """Read YAML or JSON with nanoGPT's keys, such as hydra's files: the names of its tables say nothing."""
    try:
        table = table_of(text, path)
    except UserError as error:
        found.problems.append(error)
        return
    parsed, values = nanogpt_file.ParsedFile(notes=[UserError("config.read_as_nanogpt", path=path)]), {}
    for key, value in _leaves(table):
        if (first := values.setdefault(key, value)) is not value and first != value:  # as nan is from itself
            parsed.problems.append(UserError("config.finetune_twice", path=path, key=key[:60]))
        elif key in KNOWN and not isinstance(value, bool | int | float | str | None):
            parsed.problems.append(UserError("config.not_data", source=path, what=f"{key} = {value}"[:60], key=key))
        elif value is not None or key in SIZES:
            number = nanogpt_file.parse_expression(value) if isinstance(value, str) else value  # YAML's 1e-3 is text
            parsed.settings.append(Setting(key, number if isinstance(number, float) else value, path))
    _add_parsed(parsed, path, found)


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not (key in OPTIONS and OPTIONS[key].type in ("int", "float")):
            yield from _leaves(value)
        else:
            yield str(key), value


def is_nanogpt_table(path: Path) -> bool:
    """Return whether a file is YAML or JSON with the sizes of a model under nanoGPT's names."""
    try:
        text = bounded.read_bytes(path, nanogpt_file.MAX_BYTES).decode("utf-8-sig") if path.suffix in TABLES else ""
        if not all(name in text for name in SIZES):  # of most trainers' files, which then need not be parsed
            return False
        keys = dict(_leaves(table_of(text, str(path)))).keys()
        return keys >= SIZES and "model_type" not in keys  # which transformers' GPT-2 has
    except (OSError, ValueError, UserError):
        return False


# llama2.c's names of a model's sizes, beside nanoGPT's of its run (karpathy/llama2.c, train.py, model.py).
_OF_LLAMA2C = {"dim": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "n_kv_heads": "n_kv_head"}
_OF_LLAMA2C |= {"max_seq_len": "block_size", "hidden_dim": "mlp_width"}
_KEPT_OF_LLAMA2C = ("vocab_size", "batch_size", "gradient_accumulation_steps", "dropout", "max_iters", "learning_rate")


def _of_llama2c(keys: Mapping[str, Any], path: str) -> UserError:
    """The command that plans a file of llama2.c, whose Llama has tied embeddings."""
    names = {**_OF_LLAMA2C, **{key: key for key in _KEPT_OF_LLAMA2C}}
    values = {"vocab_size": 32_000} | {name: keys[key] for key, name in names.items() if key in keys}
    each, width = keys.get("multiple_of", 32), values["n_embd"]
    if type(each) is int and type(width) is int and each > 0:
        values.setdefault("mlp_width", -(-(8 * width // 3) // each) * each)
    words = [f"--{name}={value}" for name, value in values.items() if value is not None]
    command = shlex.join(["foretrain", "plan", "--recipe=llama", "--tied_embeddings", *words])
    return UserError("config.finetune_foreign", path=path, trainer="llama2.c", command=command)


def _add_parsed(parsed: nanogpt_file.ParsedFile, path: str, found: _Collected) -> None:
    keys = {setting.key: setting.value for setting in parsed.settings}
    if {"dim", "n_layers", "n_heads"} <= keys.keys():
        found.problems.append(_of_llama2c(keys, path))
        return
    found.notes += parsed.notes
    found.problems += parsed.problems
    own: dict[str, Setting] = {}
    for setting in parsed.settings:
        key = setting.key
        if key in OPTIONS or key in ALIASES:
            found.settings.append(setting)
        elif key in NANOCHAT or _misspelt(key):
            found.problems.append(_unknown(key, setting.source))
        else:
            own[key] = setting
    others = [key for key, setting in own.items() if not _changes_model(key, setting.value)]
    found.problems += [
        UserError("config.changes_model", key=key, value=value_as_written(setting.value), source=setting.source)
        for key, setting in own.items()
        if key not in others
    ]
    if others:
        found.notes.append(UserError("config.unread_keys", keys=others, source=path))
    if not parsed.problems and not any(not setting.key.startswith("wandb_") for setting in parsed.settings):
        found.empty_files.append(path)
    found.own_keys |= own.keys()


def _neighbours(path: Path, looked: list[Path]) -> Neighbour:
    def read(name: str) -> tuple[str, str] | None:
        if not name.endswith(".py") or Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        for folder in (Path(), path.parent.parent, path.parent):
            there = folder / name
            looked.append(there)
            with contextlib.suppress(OSError, ValueError):
                if there.is_file():
                    return bounded.read_bytes(there, nanogpt_file.MAX_BYTES).decode("utf-8-sig"), str(there)
        return None

    return read


def _misspelt(key: str) -> bool:
    return bool(difflib.get_close_matches(key.lower(), [*OPTIONS, *ALIASES], n=1, cutoff=0.85))


def _changes_model(key: str, value: Any) -> bool:
    plain = value is not True and value in (None, False, 0, 1, "")
    return _OTHER_MODEL.fullmatch(key.lower()) is not None and not plain


def _add_toml(text: str, path: str, found: _Collected) -> None:
    try:
        data = bounded.parse_toml(text)
    except (RecursionError, ValueError) as error:
        found.problems.append(UserError("config.not_toml", path=path, reason=str(error) or type(error).__name__))
        return
    lines = _toml_lines(text)

    def source_of(key: str) -> str:
        return f"{path}:{lines[key]}" if key in lines else path

    for key, value in data.items():
        if key == "preset" and isinstance(value, str) and preset_named(value):
            _add_source(value, found)
        elif key == "preset":
            word = _cut(value) if isinstance(value, str) else value_as_written(value)
            id, source = "config.unknown_preset", source_of(key)
            found.problems.append(UserError(id, word=word, presets=list(PRESETS), source=source))
        elif isinstance(value, dict) and key in GROUPS:
            found.settings += [Setting(key_of(k), v, source_of(k)) for k, v in value.items()]
        else:
            found.settings.append(Setting(key_of(key), value, source_of(key)))


_TOML_KEY = re.compile(r"""\s*\[?(?:"([^"]*)"|'([^']*)'|([^\s"'=\[\]]+))\s*[=\]]""")


def _toml_lines(text: str) -> dict[str, int]:
    """Return {key or table: its first line}, found by looking, as tomllib keeps no lines."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TOML_KEY.match(line):
            lines.setdefault(next(group for group in match.groups() if group is not None), number)
    return lines


def _finish(found: _Collected) -> ResolvedConfig:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers: dict[str, int] = {}
    number, layer, auto = 0, "", False
    for written in found.settings:
        setting = _joined(written)
        key = ALIASES.get(setting.key, setting.key)
        if layer_of(setting.source) != layer:
            number, layer = number + 1, layer_of(setting.source)
        if says_auto(key, setting.value):
            auto = values[SWITCH] = True
            sources[SWITCH], layers[SWITCH] = setting.source, number
        elif key in found.own_keys:  # over a key of the file's own, as nanoGPT allows
            continue
        elif key not in OPTIONS:
            found.problems.append(_unknown(key, setting.source))
        elif _is_of_another_type(setting, OPTIONS[key]):
            found.problems.append(bad_value(OPTIONS[key], setting.value, repr(setting.value), setting.source))
        else:
            typed_before = sources.get(key, "").startswith("-") and setting.source.startswith("-")
            value = setting.value
            if typed_before and OPTIONS[key].adds:
                value = f"{values[key]},{value}"
            elif typed_before and values[key] != value:
                found.notes.append(UserError("config.typed_twice", key=key, first=sources[key], source=setting.source))
            values[key], sources[key], layers[key] = value, setting.source, number
            if key == BATCH and auto:  # the same option again
                auto = values[SWITCH] = False
    if found.empty_files and all(key.startswith("wandb_") for key in values):
        found.problems.append(UserError("config.sets_nothing", path=found.empty_files[0]))
    # What the command line gives needs no value in the file.
    typed = {key for key, source in sources.items() if source.startswith("-")}
    found.problems = [each for each in found.problems if not _keys_in(each) or not _keys_in(each) <= typed]
    notes, problems = weights_file.apply(values, sources)
    found.notes += notes
    found.problems += problems
    _apply_recipe(values, sources)
    last_word(values, sources, layers)
    config, problems = check(values, sources)
    if config is not None and not found.problems:
        config, problems = _apply_total(config, values, sources, layers)
    if config is None or found.problems:
        raise ConfigError(found.problems + problems)
    found.notes += [*_unused(config, sources), *odd_schedule(config, sources)]
    name = found.names[-1] if found.names else "run"
    read = {"piped_nanogpt": found.piped_nanogpt, "looked": tuple(found.looked)}
    return ResolvedConfig(config, sources, tuple(found.notes), name, tuple(found.files), **read)


def _keys_in(problem: UserError) -> set[str]:
    keys = str(problem.values.get("key", "")) if problem.id == "config.not_data" else ""
    return {ALIASES.get(key, key) for key in keys.split(",") if key}


def _joined(setting: Setting) -> Setting:
    option, value = OPTIONS.get(setting.key), setting.value
    if option and option.adds and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return Setting(setting.key, ",".join(value), setting.source)
    return setting


def _is_of_another_type(setting: Setting, option: Option) -> bool:
    if isinstance(setting.value, bool):
        return not option.is_switch and option.type in ("int", "float", "str", "choice")
    in_file = not setting.source.startswith("-")
    return in_file and isinstance(setting.value, str) and option.type in ("int", "float")


def _apply_total(
    config: RunConfig, values: dict[str, Any], sources: dict[str, str], layers: dict[str, int]
) -> tuple[RunConfig | None, list[UserError]]:
    update, problem = accumulation_for_total(config, sources, layers)
    if problem is not None:
        return None, [problem]
    changed = {key: value for key, value in update.items() if getattr(config, key) != value}
    sources.update({key: f"{TOTAL} ({sources.get(TOTAL, 'default')})" for key in changed})
    return check({**values, **changed}, sources) if changed else (config, [])


def _apply_recipe(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Put the recipe's values beneath the user's. Presets are tuned for nanoGPT's recipe, so theirs give way."""
    family = FAMILIES.get(str(values.get("recipe")))
    if family is None:  # the default, or a word that the checks refuse
        return
    layer = {**family.sets, **family.rates}
    written = {key for key in values if not sources[key].startswith("preset ")}
    if "optimizer" in written and values["optimizer"] != family.sets.get("optimizer"):
        layer = dict(family.sets)
    for key, value in layer.items():
        if key not in written:
            values[key], sources[key] = value, f"recipe {family.name}"


def _unused(config: RunConfig, sources: dict[str, str]) -> list[UserError]:
    """Note each value that nothing reads, but for defaults and those of a preset or recipe."""
    notes = []
    for key, other, now in unread(config.model_dump()):
        source = sources.get(key, "default")
        written = getattr(config, key) != OPTIONS[key].default and not source.startswith(("preset ", "recipe "))
        if written:
            notes.append(UserError("config.unused", key=key, other=other, value=now, source=source))
    return notes


def _unknown(key: str, source: str) -> UserError:
    if key in NANOCHAT:
        return UserError("config.nanochat_key", key=key, source=source)
    near = difflib.get_close_matches(key, [*OPTIONS, *ALIASES], n=3, cutoff=0.6)
    if source.startswith("-") and difflib.get_close_matches(key, ["help"], cutoff=0.7):
        near = ["--help"]
    squeezed = {name.replace("_", ""): name for name in OPTIONS}
    if (exact := squeezed.get(key.replace("_", "").lower())) and exact not in near:
        near.insert(0, exact)
    return UserError(
        "config.unknown_key_near" if near else "config.unknown_key", key=_cut(key), near=near, source=source
    )


def to_toml(config: RunConfig) -> str:
    lines: list[str] = []
    for group in GROUPS:
        lines.append(f"[{group}]")
        members = (name for name, option in OPTIONS.items() if option.group == group)
        lines += [f"{name} = {toml_value(getattr(config, name))}" for name in members]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else c for c in escaped) + '"'
    return repr(value)

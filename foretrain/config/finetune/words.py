"""Words of the command line on top of a file: --method qlora --lora-r 16 --no-packing, dashes or underscores."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FINETUNE_OPTIONS, OPTION_OF
from foretrain.config.finetune.values import NotPlanned, bad_value, converted, flag
from foretrain.config.options import OPTIONS

# What trainers call a choice of these options, as a word of its own.
_SWITCHES = {
    "bf16": ("amp", "bf16"), "fp16": ("amp", "fp16"), "load_in_4bit": ("method", "qlora"),
    "use_dora": ("method", "dora"), "qlora": ("method", "qlora"), "flash_attention": ("attn", "flash_attention_2"),
}  # fmt: skip
COSTS = tuple(name for name, option in OPTIONS.items() if option.group == "cost")  # prices are those of any run
OTHERS = ("model", "accelerate", *COSTS)  # words that are no options of FineTune


def parse_words(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """(values by option, the word that each is from, other words) of the command line. Raises UserError."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    others: dict[str, str] = {}
    for option, value, taken in _each(words):
        name, equals, _ = taken[0].partition("=")
        key = _key(name)
        if option in OTHERS:
            others[option] = value
            continue
        try:
            values[option] = converted(option, value, key, taken[0] if equals else name)
        except NotPlanned:
            raise bad_value(option, value, key, name) from None
        origins[option] = name
    return values, origins, others


def changed_words(words: Sequence[str], changed: Mapping[str, bool | int | str]) -> list[str]:
    """Words of the command line with other values for these options, each option once: its last word counts. Raises
    UserError for words that are none."""
    kept = {option: taken for option, _, taken in _each(words)}
    kept |= {option: option_words(option, value) for option, value in changed.items()}
    return [word for taken in kept.values() for word in taken]


def option_words(option: str, value: bool | int | str) -> list[str]:
    """An option with its value as words of the command line."""
    word = option.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", str(value)]


def _each(words: Sequence[str]) -> Iterator[tuple[str, Any, list[str]]]:
    """(option or one of OTHERS, its value, the words that say so)."""
    rest = list(words)
    while rest:
        before = list(rest)
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            raise UserError("config.finetune_no_word", word=word[:60])
        name, equals, text = word.partition("=")
        key = _key(name)
        if key in OTHERS:
            option, value = key, text if equals else _next(rest, name)
        else:
            option, value = _value(key, name, text if equals else None, rest)
        yield option, value, before[: len(before) - len(rest)]


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _value(key: str, name: str, text: str | None, rest: list[str]) -> tuple[str, Any]:
    """(option, value) of a word: after '=', in the next word, or true of a flag that stands alone."""
    if key in _SWITCHES:
        option, choice = _SWITCHES[key]
        on = flag(text) if text is not None else _taken_flag(rest)
        if on:
            return option, choice
        default = FINETUNE_OPTIONS[option].default
        return option, default if on is not None else text
    option = OPTION_OF.get(key)
    if option is None and key.startswith("no_") and FINETUNE_OPTIONS.get(OPTION_OF.get(key[3:], ""), None):
        option = OPTION_OF[key[3:]]
        if FINETUNE_OPTIONS[option].type == "bool" and text is None:
            return option, False
        option = None
    if option is None:
        raise _unknown(key, name)
    if text is not None:
        return option, text
    if FINETUNE_OPTIONS[option].type == "bool":
        return option, _taken_flag(rest)
    return option, _next(rest, name)


def _taken_flag(rest: list[str]) -> bool:
    """The value of a flag: of the next word where that is true or false, else true."""
    found = flag(rest[0]) if rest else None
    if found is None:
        return True
    rest.pop(0)
    return found


def _next(rest: list[str], name: str) -> str:
    """The next word, which is a value; a negative number is one."""
    if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
        raise UserError("config.no_value", source=name, key=name.lstrip("-"))
    return rest.pop(0)


def _unknown(key: str, name: str) -> UserError:
    near = difflib.get_close_matches(key, [*OPTION_OF, *_SWITCHES, *OTHERS], n=3, cutoff=0.6)
    if near:
        shown = [f"--{each.replace('_', '-')}" for each in near]
        return UserError("config.finetune_no_option_near", option=name[:60], near=shown)
    return UserError("config.finetune_no_option", option=name[:60])

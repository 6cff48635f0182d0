"""Words of the command line on top of a file: --method qlora --lora-r 16 --no-packing, dashes or underscores."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from foretrain.base.errors import UserError
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.finetune.formats.format import known_keys
from foretrain.config.finetune.options import FINETUNE_OPTIONS, OPTION_OF
from foretrain.config.finetune.values import NotPlanned, converted, flag
from foretrain.config.options import OPTIONS

# What trainers call a choice of these options, as a word of its own, and what is chosen where it is off.
_SWITCHES = {
    "bf16": ("amp", "bf16", "no"), "fp16": ("amp", "fp16", "no"), "load_in_4bit": ("method", "qlora", ""),
    "use_dora": ("method", "dora", ""), "qlora": ("method", "qlora", ""),
    "flash_attention": ("attn", "flash_attention_2", "sdpa"),
}  # fmt: skip
_WITH_SWITCH = {("lora", "qlora"), ("lora", "dora")}  # --method lora --load-in-4bit is qlora
COSTS = tuple(name for name, option in OPTIONS.items() if option.group == "cost")  # prices are those of any run
_SURE = 0.85  # what is as much like another word is taken for it
OTHERS = ("model", "accelerate", "format", *COSTS)  # words that are no options of FineTune


def parse_words(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """(values by option, the word that each is from, other words) of the command line. Raises UserError."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    others: dict[str, str] = {}
    off: dict[str, tuple[str, str, str]] = {}
    for said in _each(words):
        option, value = said.option, said.value
        name, equals, _ = said.words[0].partition("=")
        key = _key(name)
        if option in OTHERS:
            others[option] = value
            continue
        if said.off:
            off[name] = said.off
            continue
        try:
            value = converted(FINETUNE_OPTIONS[option], value, key, said.words[0] if equals else name)
        except NotPlanned:
            raise bad_value(FINETUNE_OPTIONS[option], value, value_as_written(value), name, key) from None
        values[option] = _agreed(option, value, name, values, origins)
        origins[option] = name
    _switch_off(off, values, origins)
    return values, origins, others


def _is_off(text: str | None, rest: list[str]) -> bool:
    """Whether a switch is false, by what stands after '=' or by the next word, which is then taken."""
    if text is not None:
        return flag(text) is False
    if not rest or flag(rest[0]) is not False:
        return False
    rest.pop(0)
    return True


def _agreed(option: str, value: Any, name: str, values: dict[str, Any], origins: dict[str, str]) -> Any:
    """The value, of two words that mean one option the one that they agree on; of one word twice the last. Raises
    UserError where they contradict each other."""
    before = values.get(option, value)
    if value == before or _same(name, origins[option]):
        return value
    for pair in ((before, value), (value, before)):
        if option == "method" and pair in _WITH_SWITCH:
            return pair[1]
    raise UserError("config.finetune_two_words", option=option, one=origins[option], other=name)


def _same(one: str, other: str) -> bool:
    """Whether two words are the same option: --lora-r and --lora_r, --packing and --no-packing."""
    return _key(one).removeprefix("no_") == _key(other).removeprefix("no_")


def _switch_off(off: dict[str, tuple[str, str, str]], values: dict[str, Any], origins: dict[str, str]) -> None:
    """What switches that are off choose, where no other word chooses. Raises UserError where that is not known, and
    where another word has switched it on."""
    for name, (option, choice, instead) in off.items():
        if values.get(option) == choice:
            raise UserError("config.finetune_two_words", option=option, one=origins[option], other=name)
        if option not in values and not instead:
            raise UserError("config.finetune_switch_off", word=name, option=f"--{option}")
        if option not in values:
            values[option], origins[option] = instead, name


class _Said(NamedTuple):
    """What a word says: an option of FineTune or one of OTHERS, its value, and the words that say so; `off`: it is a
    switch that is off, as _SWITCHES has it."""

    option: str
    value: Any
    words: list[str]
    off: tuple[str, str, str] | None = None


def changed_words(
    words: Sequence[str], changed: Mapping[str, bool | int | str], without: Collection[str] = ()
) -> list[str]:
    """Words of the command line with other values for these options, each option once. `without`: options that are left
    out. Raises UserError for words that are none."""
    kept: dict[str, list[str]] = {}
    values = parse_words(words)[0]
    for said in _each(words):
        if said.off:
            if said.option not in changed:
                kept[f"{said.option} off"] = said.words
        elif said.option in kept and said.option in values:  # what several words of one option come to
            kept[said.option] = option_words(said.option, values[said.option])
        else:
            kept[said.option] = said.words
    kept |= {option: option_words(option, value) for option, value in changed.items()}
    return [word for option, taken in kept.items() if option not in without for word in taken]


def option_words(option: str, value: bool | int | str) -> list[str]:
    """An option with its value as words of the command line."""
    word = option.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", str(value)]


def _each(words: Sequence[str]) -> Iterator[_Said]:
    """What each word says, in order."""
    rest = list(words)
    while rest:
        before = list(rest)
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            raise UserError("config.finetune_no_word", word=word[:60])
        name, equals, text = word.partition("=")
        key, off, option, value = _key(name), None, "", None
        if key in OTHERS:
            option, value = key, text if equals else _next(rest, name)
        elif key in _SWITCHES and _is_off(text if equals else None, rest):
            off = _SWITCHES[key]
        elif not equals and key.startswith("no_") and key[3:] in _SWITCHES:
            off = _SWITCHES[key[3:]]
        else:
            option, value = _value(key, name, text if equals else None, rest)
        if off:
            option = off[0]
        yield _Said(option, value, before[: len(before) - len(rest)], off)


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _value(key: str, name: str, text: str | None, rest: list[str]) -> tuple[str, Any]:
    """(option, value) of a word: after '=', in the next word, or true of a flag that stands alone."""
    if key in _SWITCHES:
        option, choice, _ = _SWITCHES[key]
        on = flag(text) if text is not None else _taken_flag(rest)
        return option, choice if on else text
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
    keys, own = known_keys("training", "adapter", "trl", "unsloth"), [*OPTION_OF, *_SWITCHES, *OTHERS]
    alike = difflib.get_close_matches(key, [*own, *sorted(keys)], n=1, cutoff=_SURE)
    if alike and alike[0] not in own:
        id = "config.finetune_harmless" if keys[alike[0]] == "harmless" else "config.finetune_not_planned"
        return UserError(id, option=name[:60], near=f"--{alike[0].replace('_', '-')}")
    near = difflib.get_close_matches(key, own, n=3, cutoff=0.6)
    if near:
        shown = [f"--{each.replace('_', '-')}" for each in near]
        return UserError("config.finetune_no_option_near", option=name[:60], near=shown)
    return UserError("config.finetune_no_option", option=name[:60])

"""Words of the command line on top of a file: --method qlora --lora-r 16 --no-packing, dashes or underscores."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.finetune.table import known_keys
from foretrain.config.options import OPTIONS, named
from foretrain.config.words import NotPlanned, Typed, Vocabulary, Word, converted

COSTS = named(lambda option: option.group == "cost")  # prices are those of any run
_SURE = 0.85  # what is as much like another word is taken for it
OTHERS = ("model", "accelerate", "format", *COSTS)  # words that are no options of FineTune
WORDS = Vocabulary({**FINETUNE_OPTIONS, **{name: OPTIONS[name] for name in COSTS}})


class ParsedWords(NamedTuple):
    """Values by option, the word that each is from, other words, and what is to be known of them."""

    values: dict[str, Any]
    origins: dict[str, str]
    others: dict[str, str]
    notes: tuple[Note, ...]


def parse_words(words: Sequence[str]) -> ParsedWords:
    """Read the options of a fine-tuning run. Raises UserError."""
    typed, others = Typed(), Typed()
    weak: dict[str, Word] = {}  # what words that are off choose, where no other word chooses
    for word in WORDS.split(words):
        if not word.key:
            raise UserError("config.finetune_no_word", word=word.name[:60])
        if word.key not in (*FINETUNE_OPTIONS, *OTHERS):
            raise _unknown(word.key, word.name)
        if word.value is None:
            raise UserError("config.no_value", source=word.name, key=word.name[2:])
        if word.key in OTHERS:
            others.put(word.key, word.value, word.name)
        elif not word.off:
            typed.put(word.key, _value(word), word.name)
        elif word.key not in typed.values:
            weak[word.key] = word
        elif typed.values[word.key] == word.off:
            typed.put(word.key, word.value, word.name)
    for key, word in weak.items():
        if key not in typed.values:
            typed.put(key, word.value, word.name)
    if typed.values.get("method") == "":
        raise UserError("config.finetune_switch_off", word=typed.sources["method"], option="--method")
    notes = tuple(Note(id="typed_twice", values=each) for each in (*typed.twice, *others.twice))
    return ParsedWords(typed.values, typed.sources, others.values, notes)


def _value(word: Word) -> Any:
    key, option = word.name[2:].replace("-", "_"), FINETUNE_OPTIONS[word.key]
    try:
        return converted(option, word.value, key, word.typed[0])
    except NotPlanned:
        raise bad_value(option, word.value, value_as_written(word.value), word.name, key) from None


def changed_words(
    words: Sequence[str], changed: Mapping[str, bool | int | str], without: Collection[str] = ()
) -> list[str]:
    """Return words with other values for these options, each once, but for `without`. Raises UserError."""
    kept: dict[str, Sequence[str]] = {}
    values = parse_words(words).values
    for word in WORDS.split(words):
        again = word.key in kept and word.key in values
        kept[word.key] = option_words(word.key, values[word.key]) if again else word.typed
    kept |= {option: option_words(option, value) for option, value in changed.items()}
    return [word for option, taken in kept.items() if option not in without for word in taken]


def option_words(option: str, value: bool | int | str) -> list[str]:
    word = option.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", str(value)]


def _unknown(key: str, name: str) -> UserError:
    keys, own = known_keys("training", "adapter", "trl", "unsloth"), [*WORDS.names, *WORDS.switches, *OTHERS]
    alike = difflib.get_close_matches(key, [*own, *sorted(keys)], n=1, cutoff=_SURE)
    if alike and alike[0] not in own:
        id = "config.finetune_harmless" if keys[alike[0]] == "harmless" else "config.finetune_not_planned"
        return UserError(id, option=name[:60], near=f"--{alike[0].replace('_', '-')}")
    near = difflib.get_close_matches(key, own, n=3, cutoff=0.6)
    if near:
        shown = [f"--{each.replace('_', '-')}" for each in near]
        return UserError("config.finetune_no_option_near", option=name[:60], near=shown)
    return UserError("config.finetune_no_option", option=name[:60])

"""The words of a command line as options of a run; of an option typed twice the last value counts, with a note."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from foretrain.base.quantities import parse_count
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.option import Option

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null")
# torchao's optimizers, whose states have at most as many bytes as those of what is planned instead.
_NEAR = dict.fromkeys(
    (f"{name}_{kind}" for name in ("adamw_torch", "ao_adamw") for kind in ("8bit", "4bit", "fp8")), "adamw_torch"
)
_PLAIN_NAMES = re.compile(r"[\w.-]*")


class NotPlanned(Exception):
    """A value that a trainer knows, and that foretrain does not plan; its text is what is planned instead."""


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def flag(value: Any) -> bool | None:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    word = value.lower() if isinstance(value, str) else ""
    return True if word in TRUE else False if word in FALSE else None


def number(value: Any) -> float | None:
    """A number, or a text that is one; None of anything else, of infinity and of NaN."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -1e300 < value < 1e300 else None


def converted(option: Option, value: Any, key: str, source: str) -> Any:
    """The value of this option. Raises UserError, and NotPlanned for a choice that a trainer may well know."""
    found: Any
    if option.type == "choice":
        found = _choice(option, value)
    elif option.type == "bool":
        found = flag(value)
    elif option.type == "str":
        found = _names(value)
    else:
        found = number(value)
        if found is None and option.thousand and isinstance(value, str):
            found = _count(value, option.thousand)
        whole = option.type == "int"
        if found is None or (whole and found != int(found)) or not option.allows(found):
            found = None
        elif whole:
            found = int(found)
    if found is None:
        raise bad_value(option, value, value_as_written(value), source, key)
    return found


def _count(text: str, thousand: int) -> float | None:
    """A number of tokens, which may be written as 10M or 3.68B; where k stands for 1024, as 8,192 or 32k."""
    if thousand == 1024:
        digits = text.strip().lower().replace(",", "")
        found = number(digits.removesuffix("k"))
        return found and found * (thousand if digits.endswith("k") else 1)
    try:
        return parse_count(text)
    except ValueError:
        return None


def _choice(option: Option, value: Any) -> str | None:
    if not isinstance(value, str):
        return None if value or not isinstance(value, bool) else _choice(option, "no")
    word = value.strip().removeprefix("torch.")
    word = option.choice_names.get(word.lower(), word.lower() if option.choice_names else word)
    if word in option.choices:
        return word
    raise NotPlanned(_NEAR.get(word, ""))


def _names(value: Any) -> str | None:
    """Names parted by commas, of a text or a list. Raises NotPlanned for a pattern."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return None
    found = [word.strip() for word in words if word.strip()]
    if not all(_PLAIN_NAMES.fullmatch(word) for word in found):
        raise NotPlanned  # a pattern of peft's
    return ",".join(found)


class Word(NamedTuple):
    """What a word says, with the next where that is its value. `key`: '' of a file or a preset; `value`: a text, true
    or false of a switch, None where it lacks; `off`: the choice that a word is against."""

    key: str
    value: str | bool | None
    typed: tuple[str, ...]
    off: str = ""

    @property
    def name(self) -> str:
        return self.typed[0].partition("=")[0]

    @property
    def written(self) -> str:
        text = " ".join(self.typed)
        return text if len(text) <= 80 else text[:79] + "…"


class Vocabulary:
    """The options of a kind of run by all their spellings, with dashes or underscores."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self.options = options
        self.names = {spelling: each.name for each in options.values() for spelling in (each.name, *each.aliases)}
        self.switches = {word: (each.name, on, off) for each in options.values() for word, on, off in each.switches}

    def split(self, words: Sequence[str]) -> list[Word]:
        found: list[Word] = []
        at = 0
        while at < len(words):
            found.append(self._word(words[at], words[at + 1] if at + 1 < len(words) else "--"))
            at += len(found[-1].typed)
        return found

    def without(self, words: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
        return tuple(each for word in self.split(words) if word.key not in keys for each in word.typed)

    def _word(self, word: str, following: str) -> Word:
        if not word.startswith("--") or word == "--":
            return Word("", word, (word,))
        name, equals, text = word.partition("=")
        key = name[2:].replace("-", "_")
        key = key if key in self.names else key.lower() if key.lower() in (*self.names, *self.switches) else key
        if equals:
            return self._meant(key, text, (word,))
        if following.startswith("--") or not self._takes(key, following):
            return self._meant(key, None, (word,))
        return self._meant(key, following, (word, following))

    def _switched_off(self, key: str) -> str:
        """Return the switch that a word such as no_packing is against."""
        rest = key.removeprefix("no_")
        option = self.options.get(self.names.get(rest, ""))
        return rest if rest != key and (rest in self.switches or (option and option.is_switch)) else ""

    def _takes(self, key: str, following: str) -> bool:
        """Return whether the next word is the value: `--compile config.py` is a switch and a file."""
        option = self.options.get(self.names.get(key, ""))
        if key in self.switches or (option and option.is_switch):
            return following.lower() in {*TRUE, *FALSE, *(option.choices if option else ())}
        return not self._switched_off(key)

    def _meant(self, key: str, value: str | None, typed: tuple[str, ...]) -> Word:
        if value is None and (switch := self._switched_off(key)):
            if switch in self.names:
                return Word(self.names[switch], False, typed)
            key, value = switch, "false"
        if key in self.switches:
            name, choice, instead = self.switches[key]
            on = True if value is None else flag(value)
            return Word(name, value if on is None else choice if on else instead, typed, choice if on is False else "")
        option = self.options.get(self.names.get(key, ""))
        if option is None:
            return Word(key, value, typed)
        return Word(option.name, option.bare or True if value is None and option.is_switch else value, typed)


class Typed:
    """The options that a command line sets, the word that each is from, and notes on those that are typed twice."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.twice: list[dict[str, str]] = []

    def put(self, key: str, value: Any, source: str) -> None:
        if self.values.get(key, value) != value:
            self.twice.append({"key": key, "first": self.sources[key], "source": source})
        self.values[key], self.sources[key] = value, source


def typed_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_word(name: str, value: object) -> str:
    return f"--{name}={typed_value(value)}"

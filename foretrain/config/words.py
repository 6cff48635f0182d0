"""The words of a command line as options of a run; of an option typed twice the last value counts, with a note."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from foretrain.config.option import Option
from foretrain.config.values import FALSE, TRUE, flag


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
        """Return the words but for those that set one of these options."""
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

"""The languages that foretrain speaks: one file in locales/ each, and nothing else lists them.

Such a file says of itself `[language] name = "…", direction = "ltr" | "rtl"`; its texts have the ids of en.toml. What
it lacks is said in English. A language with letters of its own also lists the Latin words that it keeps on purpose,
`kept = ["loss", …]`: a text with any other English word counts as not translated. The language is chosen once for a
process (`use`), or for as long as something lasts (`speaking`), such as one request to the page. Engines know nothing
of it.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretrain.base import plain_toml

ENGLISH = "en"
_FOLDER = resources.files("foretrain") / "locales"
_ID = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")
# What is typed, printed by a program or filled in: the same in every language. Compiled where translations are counted.
_TYPED = r"""`[^`]*`
    | [“«"][\x20-\x7e…]*[”»"]                                 # a quotation that is all in English: a line of a log
    | \w+://\S+ | [\w.-]+/[\w./*{}-]*[.*{][\w./*{}:!-]* | \w+/(?![\w.])
    | (?:foretrain|pip|python|nvidia-smi)[ ]-?[a-z]+ | '?\w+\[[\w{},]+\]'?   # commands
    | (?<![A-Za-z0-9_-])[A-Za-z_][\w-]+[ ]?=[ ]?(?:\{[^{}]*\}|[\w.:/'-])*     # settings
    | --[A-Za-z][\w-]* | \{[^{}]*\} | (?<![\w)])\.[a-z]+"""
_RUN = re.compile(r"[A-Za-z0-9_.\-]*[A-Za-z][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class Language:
    """A language: its id (as in `lang` of HTML), its own name for itself, and where its lines begin."""

    id: str
    name: str
    direction: str  # ltr or rtl


@dataclass(frozen=True)
class Coverage:
    """How much of English a language has. `missing` are said in English; `unknown` is said by nobody.

    `untranslated`: (id, words) of texts with English words that the language does not keep; they do not count as texts.
    """

    language: Language
    texts: int
    of: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    untranslated: tuple[tuple[str, tuple[str, ...]], ...] = ()


@cache
def ids_of() -> tuple[str, ...]:
    """Of every language, English first."""
    names = (file.name for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    found = {id for name in names if _ID.fullmatch(id := name.removesuffix(".toml"))}
    return (ENGLISH, *sorted(found - {ENGLISH}))


@cache
def file_of(id: str) -> dict[str, Any]:
    """A language's file as {dotted id: text}, read when somebody speaks it. Raises KeyError where there is none."""
    if id not in ids_of():
        raise KeyError(id)
    return plain_toml.read((_FOLDER / f"{id}.toml").read_text("utf-8"))


def texts_of(id: str) -> dict[str, str]:
    """The texts that a language itself has, without those about itself. Raises KeyError where it is not known."""
    return {key: text for key, text in file_of(id).items() if not key.startswith("language.")}


@cache
def table_of(id: str) -> Language:
    """A language by its id. Raises KeyError."""
    return Language(id, file_of(id).get("language.name", id), file_of(id).get("language.direction", "ltr"))


def known() -> dict[str, Language]:
    """Every language by id, English first."""
    return {id: table_of(id) for id in ids_of()}


@cache
def texts(id: str = ENGLISH) -> dict[str, str]:
    """All texts of a language as {dotted id: template}; those it lacks in English."""
    return {**texts_of(ENGLISH), **texts_of(id)}


_process = ENGLISH
_here: ContextVar[str | None] = ContextVar("language", default=None)


def current() -> Language:
    """The language that is spoken here and now."""
    return table_of(_here.get() or _process)


def use(id: str) -> str:
    """Speak this language in the whole process from now on; returns what was spoken. Raises KeyError."""
    global _process  # one process has one source, in every thread of it
    before, _process = _process, table_of(id).id
    return before


@contextmanager
def speaking(id: str) -> Iterator[None]:
    """Speak this language within, in this thread or task only. Raises KeyError."""
    token = _here.set(table_of(id).id)
    try:
        yield
    finally:
        _here.reset(token)


def matching(word: str) -> str | None:
    """The id of the language that a word such as 'ar', 'AR' or 'ar_EG.UTF-8' means; None where none is."""
    tag = re.split(r"[.@]", word.strip(), maxsplit=1)[0].replace("_", "-").lower()
    while tag and tag not in ids_of():
        tag = tag.rpartition("-")[0]
    return tag or None


def preferred(accepted: str) -> str | None:
    """The known language that an Accept-Language header likes best; None where it names none."""
    wishes = []
    for part in accepted[:1000].split(",")[:50]:
        word, _, quality = part.partition(";")
        found = re.fullmatch(r"\s*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", quality)
        weight = 1.0 if not quality else float(found[1]) if found else 0.0
        id = matching(word)
        if id is not None and weight > 0:
            wishes.append((-weight, len(wishes), id))
    return min(wishes)[2] if wishes else None


def coverage(id: str, extra: frozenset[str] = frozenset()) -> Coverage:
    """How much of English this language has. `extra`: ids whose English does not stand in en.toml."""
    wanted = texts_of(ENGLISH).keys() | extra
    own = wanted if id == ENGLISH else texts_of(id).keys()
    missing, unknown = sorted(wanted - own), sorted(own - wanted)
    untranslated = _untranslated(id, wanted)
    count = len(wanted & own) - len(untranslated)
    return Coverage(table_of(id), count, len(wanted), tuple(missing), tuple(unknown), untranslated)


def _untranslated(id: str, wanted: Collection[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(id, English words) of the texts of a language that keeps some words only."""
    kept = file_of(id).get("language.kept")
    if kept is None:
        return ()
    left = ((key, english_words(text, frozenset(kept))) for key, text in sorted(texts_of(id).items()) if key in wanted)
    return tuple((key, words) for key, words in left if words)


def english_words(text: str, kept: frozenset[str]) -> tuple[str, ...]:
    """The Latin words of a text that are not kept, each once.

    What is typed is none, nor are names with a digit, a dot or an underscore inside (block_size, meta.pkl, bf16),
    with a capital inside (GPU, GiB, nanoGPT), or of one letter (units, the sizes of a formula).
    """
    found: dict[str, None] = {}
    for run in _RUN.findall(re.sub(_TYPED, " ", text, flags=re.VERBOSE)):
        word = run.lstrip("0123456789.-_").rstrip(".-_")
        if (
            len(word) > 1
            and re.fullmatch(r"[A-Za-z][a-z]*(-[A-Za-z]?[a-z]*)*", word)
            and not {word, word.lower()} & kept
        ):
            found[word] = None
    return tuple(found)

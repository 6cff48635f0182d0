"""The languages that foretrain speaks: one file in locales/ each, and nothing else lists them.

Such a file says of itself `[language] name = "…", direction = "ltr" | "rtl"`; its texts have the ids of en.toml. What
it lacks is said in English. A language with letters of its own also lists the Latin words that it keeps on purpose,
`kept = ["loss", …]`: a text with any other English word counts as not translated. The language is chosen once for a
process (`use`), or for as long as something lasts (`speaking`), such as one request to the page. Engines know nothing
of it.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

# A line: a table's header, a text, a comment, or nothing.
_PLAIN = r'[^"\\\x00-\x1f\x7f]*'
_LINE = re.compile(
    rf'^(?:\[([A-Za-z0-9_.-]+)\]|(?:"([^"\\\n]+)"|([A-Za-z0-9_-]+)) = "({_PLAIN}(?:\\["\\nt]{_PLAIN})*)"|#.*|[ \t]*)$',
    re.MULTILINE,
)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {dotted id: value}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read(text: str) -> dict[str, Any]:
    """All values of a file as {dotted id: value}; the first table may have values of any kind. Raises
    TOMLDecodeError."""
    first = text.find("\n[", text.find("[") + 1) + 1
    found = _texts(text[first:])
    return flat(tomllib.loads(text)) if found is None else flat(tomllib.loads(text[:first])) | found


def _texts(text: str) -> dict[str, str] | None:
    """Those of tables of texts; None where there is anything else in them."""
    lines = _LINE.findall(text)
    if len(lines) != text.count("\n") + 1:
        return None
    found, prefix = {}, ""
    for header, quoted, bare, value in lines:
        if header:
            prefix = f"{header}."
        elif quoted or bare:
            found[prefix + (quoted or bare)] = json.loads(f'"{value}"') if "\\" in value else value
    return found


ENGLISH = "en"
_FOLDER = resources.files("foretrain") / "locales"
_ID = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")


@dataclass(frozen=True)
class Language:
    """A language: its id (as in `lang` of HTML), its own name for itself, and where its lines begin."""

    id: str
    name: str
    direction: str  # ltr or rtl


@cache
def ids_of() -> tuple[str, ...]:
    names = (file.name for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    found = {id for name in names if _ID.fullmatch(id := name.removesuffix(".toml"))}
    return (ENGLISH, *sorted(found - {ENGLISH}))


@cache
def file_of(id: str) -> dict[str, Any]:
    """A language's file as {dotted id: text}, read when somebody speaks it. Raises KeyError where there is none."""
    if id not in ids_of():
        raise KeyError(id)
    return read((_FOLDER / f"{id}.toml").read_text("utf-8"))


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

"""How much of English a language has: what it lacks, and the English words that are left in its texts."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from foretrain.base import messages

# What is typed, printed by a program or filled in: the same in every language.
_TYPED = r"""`[^`]*`
    | [“«"][\x20-\x7e…]*[”»"]                                 # a quotation that is all in English: a line of a log
    | \w+://\S+ | [\w.-]+/[\w./*{}-]*[.*{][\w./*{}:!-]* | \w+/(?![\w.])
    | (?:foretrain|pip|python|nvidia-smi)[ ]-?[a-z]+ | '?\w+\[[\w{},]+\]'?   # commands
    | (?<![A-Za-z0-9_-])[A-Za-z_][\w-]+[ ]?=[ ]?(?:\{[^{}]*\}|[\w.:/'-])*     # settings
    | --[A-Za-z][\w-]* | \{[^{}]*\} | (?<![\w)])\.[a-z]+"""
_RUN = re.compile(r"[A-Za-z0-9_.\-]*[A-Za-z][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class Coverage:
    """How much of English a language has. `missing` are said in English; `unknown` is said by nobody.

    `untranslated`: (id, words) of texts with English words that the language does not keep; they do not count as texts.
    """

    language: messages.Language
    texts: int
    of: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    untranslated: tuple[tuple[str, tuple[str, ...]], ...] = ()


def coverage(id: str, extra: frozenset[str] = frozenset()) -> Coverage:
    """How much of English this language has. `extra`: ids whose English does not stand in en.toml."""
    wanted = messages.texts_of(messages.ENGLISH).keys() | extra
    own = wanted if id == messages.ENGLISH else messages.texts_of(id).keys()
    missing, unknown = sorted(wanted - own), sorted(own - wanted)
    untranslated = _untranslated(id, wanted)
    count = len(wanted & own) - len(untranslated)
    return Coverage(messages.table_of(id), count, len(wanted), tuple(missing), tuple(unknown), untranslated)


def _untranslated(id: str, wanted: Collection[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(id, English words) of the texts of a language that keeps some words only."""
    kept = messages.file_of(id).get("language.kept")
    if kept is None:
        return ()
    left = (
        (key, english_words(text, frozenset(kept)))
        for key, text in sorted(messages.texts_of(id).items())
        if key in wanted
    )
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

"""Plain English: phrases that were replaced by the field's terms come back in no text, help, document or page."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from foretrain.cli import app
from foretrain.cli.command import Group
from foretrain.config.options import OPTIONS
from tests.kit.command import REPO

# Left: what a reader stopped at. Right: what stands there now.
REPLACED = {
    r"\blives? from\b": "needs at least",
    r"\b(dies|die|died) in\b": "runs out of memory in",
    r"\b(that|what) others hold\b|\bheld by others\b": "used by other programs",
    r"\bledger\b": "estimate",
    r"\bvoice of\b|\bvoices\b": "source",
    r"\bslow and dear\b|\bdearest\b": "worst case",
    r"\bbuys? nothing\b": "does not help",
    r"\bmade again\b|\bcomputed again\b": "recomputed",
    r"\bproducts\b, |\b(int8|INT8|FP8|fp8) products\b": "matmuls",
    r"\bwaits? for backward\b|\bkept for backward\b": "saved for backward",
    r"\blater steps\b": "steady state",
    r"\bevaluation later on\b": "evaluation during training",
    r"\bgone on (with|from)\b|\bgoes on from\b": "resumed",
    r"\bagainst (its|their|the) digests?\b|\bevery digest\b": "checksum",
    r"\bheld against the log\b|\bhold to its word\b": "checked against",
    r"\bwould settle\b": "experiments that would tell",
    r"\bWhat follows\b": "Conclusions",
    r"\bthe stretch that\b": "overlapping time window",
    r"\bheld its clock\b|\bclocks that somebody set\b": "throttled; application clocks",
    r"\bthe loss leapt\b": "loss spike",
    r"\bbirths and deaths\b": "allocations and frees",
    r"\bpower (EUR|\{currency\})": "electricity",
    r"\bsmaller ones\b|\ball else(:| as it is)": "other",
    r"\bdossier\b": "failure report",
    r"\bset (on|back) by\b": "moved forward, moved back",
    r"(?<!there )(?<!There )\bis no (?!longer\b|more\b|worse\b|match\b)[a-zA-Z.]+|\bis none of\b": "is not",
    r"\bverbs?\b": "command",
    r"\bmend(s|ed|ing)?\b|\black of memory\b": "fix; out of memory",
    r"\bknobs?\b": "option",
    r"\bquickest\b|\bmildest\b": "fastest; smallest change",
    r"\bno byte at the peak\b": "does not lower the peak",
    r"\bgives back blocks that it only keeps\b": "frees its cache",
    r"\bTo be sure of it\b": "To be safe",
    r"\bwith the same words\b": "For all options: …",
    r"\bNothing else is assumed\b": "This assumes nothing else uses the GPU",
    r"\bthe largest divisor of the step\b": "the largest micro-batch that fits",
    r"\btokens per step and learning stay\b": "without changing tokens per step or the result",
    r"\bword for word\b": "exact duplicates",
    r"\bare in the form now\b": "Loaded … settings",
    r"\bthe link holds all\b": "Link copied",
    r"\b(Not to be|be) put down to\b": "no single cause",
    r"\bfair race\b": "cannot be compared",
    r"\bpeak cannot be\b": "is impossible",
    r"\bThen run it in exactly that\b": "Then run it within those limits",
}  # fmt: skip

# Where some still stand: file, and what should stand there. This list only shrinks: an entry no longer needed fails.
LEFT: dict[str, tuple[str, ...]] = {
    "languages.md": ("option",),
}  # fmt: skip


def _said_by_commands(command: object, path: str) -> Iterator[tuple[str, str]]:
    """(the command, a text of its --help): its description, examples and each option's help."""
    yield path, f"{getattr(command, 'help', '') or ''}\n{getattr(command, 'epilog', '') or ''}"
    for param in getattr(command, "params", ()):
        if not getattr(param, "hidden", False):
            spellings = set(getattr(param, "opts", ()))
            yield path, f"{' '.join(sorted(spellings))} {getattr(param, 'help', '') or ''}"
    for name, own in (command.members() if isinstance(command, Group) else {}).items():
        yield from _said_by_commands(own, f"{path} {name}")


def _texts() -> Iterator[tuple[str, str]]:
    """(where, text) of all that a user reads in English."""

    def values(table: dict[str, object]) -> Iterator[str]:
        for value in table.values():
            if isinstance(value, dict):
                yield from values(value)
            else:
                yield str(value)

    en = REPO / "foretrain" / "locales" / "en.toml"
    for text in values(tomllib.loads(en.read_text("utf-8"))):
        yield "locales/en.toml", re.sub(r"\{[^{}]*\}", "{}", text) if "{currency}" not in text else text
    for option in OPTIONS.values():
        yield "config.py", option.help
    yield from _said_by_commands(app, "foretrain")
    for path in (
        REPO / "README.md",
        REPO / "CONTRIBUTING.md",
        REPO / "Makefile",
        *sorted((REPO / "docs").glob("*.md")),
    ):
        text = path.read_text("utf-8")
        yield path.name, re.sub(r"\]\([^)\s]*\)", "]", text)  # addresses are not read
    for path in sorted((REPO / "foretrain" / "web" / "static").glob("*.html")):
        yield path.name, path.read_text("utf-8")


def _found() -> dict[tuple[str, str], str]:
    """{(where, what to say): the words there}."""
    found: dict[tuple[str, str], str] = {}
    for where, text in _texts():
        for phrase, better in REPLACED.items():
            if match := re.search(phrase, text):
                found.setdefault((where, better), text[max(0, match.start() - 40) : match.end() + 40])
    return found


def test_replaced_phrases_stand_nowhere() -> None:
    found = _found()
    left = {(where, better) for where, all_left in LEFT.items() for better in all_left}
    new = [f"{where}: {found[where, better]!r}: say {better!r}" for where, better in found.keys() - left]
    assert not new, "\n".join(sorted(new))
    assert not left - found.keys(), f"no longer needed in LEFT: {sorted(left - found.keys())}"


@pytest.mark.parametrize(
    "text",
    [
        "it lives from about 7.79 GiB on", "it dies in first step", "of the 10 GiB beside the 2 GiB that others hold",
        "the slow and dear end", "x.txt: is no text", "an unfinished one is gone on with", "there is no such knob",
        "Hold every block against its digest", "What follows", "in later steps", "births and deaths of tensors",
    ],
)  # fmt: skip
def test_the_phrases_are_found(text: str) -> None:
    assert any(re.search(phrase, text) for phrase in REPLACED), text


@pytest.mark.parametrize(
    "text",
    ["there is no such option", "the run is no longer there", "matmul products of two numbers", "a memory ledge"],
)
def test_plain_english_passes(text: str) -> None:
    assert not any(re.search(phrase, text) for phrase in REPLACED), text

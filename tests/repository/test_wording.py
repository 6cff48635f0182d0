"""Plain English: phrases that were replaced by the field's terms come back in no text, help, document, page or code."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

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
    r"\bfurthest\b": "largest error",
    r"\bThen run it in exactly that\b": "Then run it within those limits",
}  # fmt: skip

# Where some still stand: file, and what should stand there. This list only shrinks: an entry no longer needed fails.
LEFT: dict[str, tuple[str, ...]] = {"languages.md": ("option",)}


# Comments and docstrings also avoid these, and names the words below.
REPLACED_IN_CODE = {
    **REPLACED,
    r"\b(dear|dearer)\b": "expensive",
    r"\banew\b": "again",
    r"\bdone again\b": "repeated",
    r"\bwhat backward keeps\b": "saved for backward",
    r"\bmatrix products\b|\b(the|are) products with\b": "matmuls",
    r"\bof before\b|\bof today\b": "earlier",
    r"\b(is|are|was|were) (said|told)\b|\b[Nn]obody (says?|said|told)\b|\bsays? so\b": "reports, unknown",
    r"\b(birth|death)s?\b|\b(born|dies|died)\b": "freed, ends",
    r"\bspoil(s|t|ed)?\b": "overwritten",
    r"\bgo(es)? on (with|from)\b|\bgone on\b": "resumed",
}  # fmt: skip
REPLACED_IN_NAMES = {
    "estimate": {"ledger"}, "option": {"knob", "knobs"}, "fastest; smallest change": {"quickest", "mildest"},
    "expensive": {"dear", "dearest"}, "again": {"anew"}, "largest error": {"furthest"}, "source": {"voice", "voices"},
    "freed, ends": {"birth", "births", "death", "deaths", "born", "died", "dies"},
    "fix; out of memory": {"mend", "mended"}, "overwritten": {"spoilt"}, "matmuls": {"products"},
    "reports, unknown": {"told", "said"},
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


def _prose_and_names(source: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each docstring and comment ("prose"), and of the words in each name that is defined."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield "prose", " ".join((ast.get_docstring(node) or "").split())
                names |= set() if isinstance(node, ast.Module) else {node.name}
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    yield "prose", "\n".join(re.findall(r"(?:^|  )(# .*)$", source, re.MULTILINE))
    for name in sorted(names):
        yield "name", " ".join(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))


def _found_in_code(path: Path) -> Iterator[str]:
    """Yield each phrase that a file's docstrings, comments or names still have, with what should stand there."""
    texts = list(_prose_and_names(path.read_text("utf-8")))
    prose = "\n".join(text for kind, text in texts if kind == "prose")
    for phrase, better in REPLACED_IN_CODE.items():
        if match := re.search(phrase, prose):
            yield f"{prose[max(0, match.start() - 40) : match.end() + 40]!r}: say {better!r}"
    for better, words in REPLACED_IN_NAMES.items():
        yield from (f"the name {text!r}: say {better!r}" for kind, text in texts
                    if kind == "name" and words & set(text.split()))  # fmt: skip


def test_replaced_phrases_come_back_in_no_code() -> None:
    files = [path for folder in ("foretrain", "benchmarks", "docs") for path in sorted((REPO / folder).rglob("*.py"))]
    found = [f"{path.relative_to(REPO)}: {each}" for path in files for each in _found_in_code(path)]
    assert files
    assert not found, "\n".join(found)


def test_phrases_in_code_are_found() -> None:
    source = 'def dead(ledger, self):\n    """It is told anew."""\n    self.knobsOf = 1  # births of tensors\n'
    texts = list(_prose_and_names(source))
    prose = " ".join(text for kind, text in texts if kind == "prose")
    assert sum(bool(re.search(phrase, prose)) for phrase in REPLACED_IN_CODE) == 3
    assert {text for kind, text in texts if kind == "name"} == {"dead", "ledger", "self", "knobs of"}


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

"""Plain English: phrases that were replaced by the field's terms come back in no text, help, document, page or code."""

import ast
import re
import tomllib
from collections import Counter
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

# Where code still has some: room, what should stand there, how often. These numbers only ever become smaller.
LEFT_IN_CODE: dict[str, dict[str, int]] = {
    "benchmarks": {"again": 2, "estimate": 2, "freed, ends": 3, "largest error": 1, "matmuls": 1, "option": 14,
        "repeated": 2, "reports, unknown": 15, "steady state": 1},
    "docs": {"reports, unknown": 5},
    "foretrain/advice": {"does not help": 2, "estimate": 4, "fastest; smallest change": 10, "option": 4,
        "reports, unknown": 6, "used by other programs": 1},
    "foretrain/analysis": {"matmuls": 1, "reports, unknown": 5},
    "foretrain/app": {"earlier": 5, "option": 1, "reports, unknown": 12, "resumed": 2},
    "foretrain/base": {"freed, ends": 2, "is not": 1},
    "foretrain/cli": {"freed, ends": 5, "is not": 1, "option": 1, "reports, unknown": 17, "resumed": 2},
    "foretrain/comparison": {"is not": 1, "reports, unknown": 3},
    "foretrain/config": {"is not": 6, "matmuls": 3, "option": 6, "reports, unknown": 18},
    "foretrain/data": {"reports, unknown": 3},
    "foretrain/evaluation": {"reports, unknown": 1},
    "foretrain/hardware": {"matmuls": 1, "reports, unknown": 1},
    "foretrain/measure": {"freed, ends": 5, "matmuls": 2, "option": 1, "reports, unknown": 5},
    "foretrain/model": {"freed, ends": 1, "matmuls": 4, "reports, unknown": 2},
    "foretrain/predict": {"allocations and frees": 1, "estimate": 7, "fastest; smallest change": 4, "freed, ends": 13,
        "is not": 1, "matmuls": 4, "option": 3, "reports, unknown": 3},
    "foretrain/predict/abstract": {"freed, ends": 1},
    "foretrain/predict/allocator": {"freed, ends": 3},
    "foretrain/predict/estimate": {"again": 1, "matmuls": 1, "reports, unknown": 1,
        "saved for backward": 1},
    "foretrain/predict/finetune": {"estimate": 4, "is not": 1, "other": 1, "reports, unknown": 1},
    "foretrain/predict/inference": {"matmuls": 2, "reports, unknown": 2},
    "foretrain/predict/speed": {"matmuls": 1},
    "foretrain/predict/trace": {"Conclusions": 1, "estimate": 3, "freed, ends": 6, "is not": 2, "matmuls": 1,
        "option": 1, "reports, unknown": 6},
    "foretrain/reports": {"earlier": 1, "fastest; smallest change": 1, "freed, ends": 1, "is not": 2, "matmuls": 1,
        "no single cause": 1, "option": 3, "reports, unknown": 43},
    "foretrain/runs": {"is not": 1, "reports, unknown": 2},
    "foretrain/training": {"is not": 1, "reports, unknown": 17, "steady state": 1},
    "foretrain/web": {"is not": 1, "overwritten": 1, "reports, unknown": 6},
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


def _room(parts: tuple[str, ...]) -> str:
    """Return the room of a file: foretrain/model, predict/trace …, or benchmarks and docs as a whole."""
    depth = (3 if parts[1] == "predict" else 2) if parts[0] == "foretrain" else 1
    return "/".join(parts[:depth] if len(parts) > depth else parts[: max(1, depth - 1)])


def _found_in_code() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for folder in ("foretrain", "benchmarks", "docs"):
        for path in sorted((REPO / folder).rglob("*.py")):
            counts = found.setdefault(_room(path.relative_to(REPO).parts), Counter())
            texts = list(_prose_and_names(path.read_text("utf-8")))
            prose = "\n".join(text for kind, text in texts if kind == "prose")
            for phrase, better in REPLACED_IN_CODE.items():
                counts[better] += len(re.findall(phrase, prose))
            for better, words in REPLACED_IN_NAMES.items():
                counts[better] += sum(kind == "name" and bool(words & set(text.split())) for kind, text in texts)
    return found


def test_replaced_phrases_come_back_in_no_code() -> None:
    found = _found_in_code()
    keys = {(room, better) for table in (found, LEFT_IN_CODE) for room in table for better in table[room]}
    counts = {key: (found.get(key[0], {}).get(key[1], 0), LEFT_IN_CODE.get(key[0], {}).get(key[1], 0)) for key in keys}
    more = [f"{room}: say {better!r}, {now} times; at most {left}" for (room, better), (now, left) in counts.items()
            if now > left]  # fmt: skip
    fewer = [f"{room}: {better!r} only {now} times: lower {left} in LEFT_IN_CODE" for (room, better), (now, left)
             in counts.items() if now < left * 0.75]  # fmt: skip
    assert not more, "\n".join(sorted(more))
    assert not fewer, "\n".join(sorted(fewer))


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

"""Languages that exist in tests only: English in brackets, which shows what was not said by id, and English written in
Arabic letters, which runs from right to left."""

import re
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from foretrain.base import messages, processes
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.options import OPTIONS
from foretrain.hardware.catalogue import catalogue
from foretrain.hardware.cpu import cpu_device
from foretrain.measure import verify_record as verification
from foretrain.measure.verify_session import FILLING, ON_A_CARD
from foretrain.web import child as web_child

BRACKETS, ARABIC = "ia", "dv"  # tags that browsers know, of languages that nobody has translated yet
_LETTERS = str.maketrans(
    string.ascii_letters, "ابجدهوزحطيكلمنسعفصقرشتثخذضابجدهوزحطيكلمنسعفصقرشتثخذض"
)  # as many letters as there are in English


def _arabic(literal: str) -> str:
    """The words in Arabic letters; what stands in backticks as it is."""
    parts = literal.split("`")
    return "`".join(part.translate(_LETTERS) if i % 2 == 0 else part for i, part in enumerate(parts))


def _bracketed(literal: str) -> str:
    return f"⟦{literal}⟧" if literal.strip() else literal


def _changed(template: str, change: Callable[[str], str]) -> str:
    """A template with what stands between its placeholders changed."""
    made = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        made.append(change(literal).replace("{", "{{").replace("}", "}}"))
        if name is not None:
            made.append("{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}")
    return "".join(made)


def pretended() -> dict[str, dict[str, str]]:
    """The files of the languages of this module."""
    english = messages.texts_of("en") | {f"knob.{knob.name}": knob.help for knob in OPTIONS.values()}
    english |= {f"finetune_knob.{option.name}": option.help for option in FINETUNE_OPTIONS.values()}
    plain = {id: text for id, text in english.items() if text}
    return {
        BRACKETS: {"language.name": "[English]", "language.direction": "ltr"}
        | {id: _changed(text, _bracketed) for id, text in plain.items()},
        ARABIC: {"language.name": "شبه العربية", "language.direction": "rtl"}
        | {id: _changed(text, _arabic) for id, text in plain.items()},
    }


@contextmanager
def pretending(**more: dict[str, str]) -> Iterator[None]:
    """The languages of this module, and `more` of them, are known within."""
    files = {**{id: messages.file_of(id) for id in messages.ids_of()}, **pretended(), **more}
    try:
        with (
            mock.patch.object(messages, "ids_of", return_value=tuple(files)),
            mock.patch.object(messages, "file_of", side_effect=files.__getitem__),
        ):
            forget()
            yield
    finally:
        forget()


def child(work: str) -> processes.Child:
    """What `web.child.start` starts, knowing these languages, too: a patch of `_ids` ends with its process."""
    return processes.Child("tests.kit.language", work)


def main(parent: processes.Parent, work: str) -> None:
    with pretending():
        web_child.main(parent, work)


def forget() -> None:
    for kept in (messages.table_of, messages.texts):
        kept.cache_clear()


def unsaid(text: str) -> str:
    """What of a text in BRACKETS stands in no bracket: what no id has said."""
    left, depth = [], 0
    for sign in text:
        depth += (sign == "⟦") - (sign == "⟧")
        if depth == 0:
            left.append(" " if sign == "⟧" else sign)
    return "".join(left)


ENGLISH = messages.texts_of("en")

# What no language changes: names and values of knobs, cards, dtypes, units, sources, formulas, people's files.
SAME = {
    word for knob in OPTIONS.values() for word in re.findall(r"[A-Za-z]+", f"{knob.name} {knob.default} {knob.unit}")
} | {word for id in ENGLISH if id.startswith("rule.") for word in id.split(".")[1].split("_")} | {
    "bit", "GiB", "MiB", "KiB", "FLOP", "TFLOP", "GFLOP", "PFLOP", "kWh", "EUR", "RTX",
    "min", "cuBLAS", "float", "bfloat", "preset", "Ampere", "Ada", "gpt", "docs", "step", "python", "stdlib", "test",
    "memory", "default", "nanogpt", "modern", "baby", "log", "out", "foretrain", *re.findall(r"[A-Za-z]+", cpu_device().name),
} | {  # the names of cases are typed: foretrain verify --only
    word for case in (*ON_A_CARD, *FILLING) for word in re.findall(r"[A-Za-z]+", case.label)
} | {word for name in catalogue() for word in re.findall(r"[A-Za-z]+", name)} | {"NVIDIA", "GeForce", "json", "case", "cases", *re.findall("[a-z]+", verification.CONTRIBUTED)}  # fmt: skip

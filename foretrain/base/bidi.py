"""Latin words and numbers inside lines that run from right to left.

A line of Arabic takes the direction of its signs from their neighbours: "12.5 GiB" would come out as "GiB 12.5", and
"--lang" as "lang--". So each run of Latin letters, digits and signs is put between Unicode's marks for a part that
keeps its own direction (LRI … PDI, UAX #9). They have no width, and terminals, browsers and canvases obey the same
marks; where a language runs from left to right there are none.
"""

import re

from foretrain.base.languages import current

LRI, RLI, FSI, PDI = "\u2066", "\u2067", "\u2068", "\u2069"
MARKS = LRI + RLI + FSI + PDI

_RTL = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"
_HAS_RTL = re.compile(f"[{_RTL}]")
_HAS_LATIN = re.compile(r"[A-Za-z0-9\u00b5-\u02af\u0370-\u03ff\u0900-\u097f]|\{")
_RUN = re.compile(f"(?:(?! · )[^{_RTL}{MARKS}])+")
_WITHOUT_BLANKS = re.compile(r"\S(?:.*\S)?")
# What stands at the ends of a run belongs to the sentence around it; a "." before a letter begins a name like .toml.
_BEFORE = re.compile(r"(?:[\s,:;!?)\]»”=–—·|]|\.(?!\w))*")
_AFTER = " \t.,:;!?([«“=–—·|"


def runs_rightwards() -> bool:
    """Whether the language that is spoken begins its lines on the right."""
    return current().direction == "rtl"


def bare(text: str) -> str:
    """The text without the marks."""
    return text.translate({ord(mark): None for mark in MARKS})


def isolated(text: str) -> str:
    """The text with its Latin runs isolated, where the language runs from right to left; else as it is.

    `{name}` in it counts as a run whose direction is not known yet. Doing it twice changes nothing.
    """
    if not runs_rightwards():
        return text
    lines = text.split("\n")
    if len(lines) > 1:  # among several, a line without such letters is there to be copied: nothing unseen may be in it
        return "\n".join(_line(line) if _HAS_RTL.search(line) else bare(line) for line in lines)
    return _line(text)


def value(text: str) -> str:
    """What is put into a sentence: apart where it has letters that run leftwards, else for `isolated` to see."""
    if not runs_rightwards():
        return text
    if not _HAS_RTL.search(text):
        return bare(text)
    return text if "\n" in text else FSI + text + PDI


def _line(line: str) -> str:
    if not _HAS_RTL.search(line):
        return _WITHOUT_BLANKS.sub(lambda match: _marked(match[0]), bare(line), count=1)
    return "".join(part if depth else _RUN.sub(_run, part) for part, depth in _parts(line))


def _parts(line: str) -> list[tuple[str, bool]]:
    """The line cut into (text, whether it stands between marks already)."""
    parts, depth, begin = [], 0, 0
    for at, sign in enumerate(line):
        if sign in LRI + RLI + FSI:
            if depth == 0:
                parts.append((line[begin:at], False))
                begin = at
            depth += 1
        elif sign == PDI and depth:
            depth -= 1
            if depth == 0:
                parts.append((line[begin : at + 1], True))
                begin = at + 1
    rest = line[begin:]
    return [*parts, (rest + PDI * depth, depth > 0)]


def _run(match: re.Match[str]) -> str:
    text = match[0]
    begin = _BEFORE.match(text).end()  # type: ignore[union-attr]  # it matches nothing at least
    end = max(begin, len(text.rstrip(_AFTER).removesuffix(" +").rstrip(_AFTER)))
    run = text[begin:end]
    if run.endswith(")") and run.count(")") > run.count("("):  # opened in the other script
        end -= 1
    if run.startswith("(") and run.count("(") > run.count(")"):
        begin += 1
    return text[:begin] + _marked(text[begin:end]) + text[end:]


def _marked(run: str) -> str:
    if not _HAS_LATIN.search(run) or run.isdecimal():
        return run
    return (FSI if "{" in run else LRI) + run + PDI

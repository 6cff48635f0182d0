"""The commands that README and docs show, each with the block it stands in and what is said about running it.

A line of a fenced block without a language, or of `sh`, is a command; of `console` a line that begins with `$ `. Before
the block an HTML comment may stand: `<!-- run: slow -->`, or `<!-- not run: REASON -->`.
"""

import re
import shlex
from dataclasses import dataclass

from tests.kit.command import REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run: slow|not run: [^>]+?) -->\n(?:<!-- generated: [a-z-]+ -->\n)?)?"
    r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_INLINE = re.compile(r"`(foretrain [^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """One line. `mark`: '', 'slow', or why it is not run."""

    page: str
    text: str
    mark: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def runs(self) -> bool:
        return self.mark in ("", "slow")


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for block in _BLOCK.finditer(page.read_text("utf-8")):
            mark = (block["mark"] or "").removeprefix("run: ").removeprefix("not run: ")
            found += [Command(page.name, line, mark) for line in _lines(block["kind"], block["body"])]
    return found


def _lines(kind: str, body: str) -> list[str]:
    if kind not in ("sh", "console", ""):
        return []
    lines = [line.strip() for line in body.splitlines()]
    if kind == "console":
        return [line[2:] for line in lines if line.startswith("$ ")]
    first = re.compile(r"(foretrain|pip|make|python3?|git|cd|docker|\./)\b")
    return [line for line in lines if first.match(line)]


def inline() -> list[Command]:
    """Every `foretrain …` within a sentence or a table."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        found += [Command(page.name, match[1].replace("\\|", "|"), "inline") for match in _INLINE.finditer(text)]
    return found

"""Writes the generated parts of README.md and docs/: captured commands, tables of options and commands, schemas, pictures.

    make docs                        write them, and build the site
    python docs/generate.py --check  list what is out of date, exit with 1
    python docs/generate.py PAGE     only this page

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The part `console` is a block that begins
with `$ foretrain …`: that command is run, and what it prints follows. `console: Memory | Time` keeps of that what stands
under headings that begin so.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import drawings
import json_schemas
import man_page
import memory_tables  # noqa: F401 - each adds its PARTS
import product_tables
import time_tables  # noqa: F401
import toml_schemas
import training_tables  # noqa: F401
from tables import ROOT, made, part

from foretrain.base import messages
from foretrain.cli import app
from foretrain.cli.common import OUT, VARIABLE

WIDTH = 90  # what a page of the site shows without scrolling at 1280 pixels
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+)(?:: (?P<of>[^>]+))? -->)(?P<old>.*?)(<!-- end -->)", re.DOTALL)
_COMMAND = re.compile(r"^\$ (foretrain .+)$", re.MULTILINE)

part("schemas")(json_schemas.table)


def shown(command: str) -> str:
    """Return what a terminal of 90 columns shows of a command, which runs in this process."""
    words = shlex.split(command, comments=True)
    before, out = (OUT.file, OUT.width, sys.argv), io.StringIO()
    OUT.file, OUT.width, sys.argv = out, WIDTH, words
    try:
        app(words[1:], standalone_mode=False)
    finally:
        messages.set_language(messages.ENGLISH)
        OUT.file, OUT.width, sys.argv = before
        os.environ.pop(VARIABLE, None)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def cut(output: str, headings: list[str]) -> str:
    """Return the first section of a document, which is its title, and those under the headings, without the current
    hour.
    """
    first, *sections = re.split(r"\n\n(?=\S)", re.sub(r"\n.*if started now.*", "", output))
    return "\n\n".join([first, *(each for each in sections if each.startswith(tuple(headings)))]) + "\n…"


def console(old: str, of: str | None) -> str:
    command = _COMMAND.findall(old)[0]
    output = shown(command)
    return product_tables.block(f"$ {command}", cut(output, of.split(" | ")) if of else output)


def fill(page: str) -> str:
    """Return the page with each generated part replaced."""

    def replaced(found: re.Match[str]) -> str:
        name = found["name"]
        return f"{found[1]}\n{console(found['old'], found['of']) if name == 'console' else made(name)}\n{found[5]}"

    return _PART.sub(replaced, page)


def wanted(names: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield each page of these names with its text; without names, all pages, pictures, schemas and the manual."""
    if not names:
        yield from {**drawings.files(), **json_schemas.files(), **toml_schemas.files(), **man_page.files()}.items()
    for page in names or ["README.md", *sorted(str(page) for page in Path("docs").glob("*.md"))]:
        yield ROOT / page, fill(Path(page).read_text("utf-8"))


def main() -> int:
    check, names = "--check" in sys.argv, [word for word in sys.argv[1:] if word != "--check"]
    os.chdir(ROOT)  # the commands on the pages name files by their paths here
    stale = 0
    for path, text in wanted(names):
        if not path.is_file() or path.read_text("utf-8") != text:
            stale += 1
            print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}", flush=True)
            if not check:
                path.write_text(text, "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the generated parts of README.md and docs/: captured commands, tables of options and commands, schemas, pictures.

    make docs                        write them, and build the site
    python docs/generate.py --check  say what is out of date, exit with 1

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The part `console` is a block that begins
with `$ foretrain …`: that command is run, and what it prints follows. `console: Memory | Time` keeps of that what stands
under headings that begin so.
"""

import io
import os
import re
import shlex
import sys
from pathlib import Path

import json_schemas
import man_page
import memory_tables  # noqa: F401 - each adds its PARTS
import product_tables
import time_tables  # noqa: F401
import toml_schemas
import training_tables  # noqa: F401
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from tables import PARTS, ROOT, part

import foretrain
from foretrain.base import messages
from foretrain.cli import app
from foretrain.cli.common import OUT, VARIABLE
from foretrain.reports import text
from foretrain.reports.views import plan as plan_view

WIDTH = 90  # what a page of the site shows without scrolling at 1280 pixels
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+)(?:: (?P<of>[^>]+))? -->)(?P<old>.*?)(<!-- end -->)", re.DOTALL)
_COMMAND = re.compile(r"^\$ (foretrain .+)$", re.MULTILINE)

# rich's own without the fonts that it would fetch.
CONSOLE_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, monospace"
)

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

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        return f"{found[1]}\n{console(found['old'], found['of']) if name == 'console' else PARTS[name]()}\n{found[5]}"

    return _PART.sub(made, page)


def picture_of_plan() -> str:
    recorder = Console(
        file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor", highlight=False
    )
    made = foretrain.plan(ROOT / "examples" / "real-cases" / "c.py", gpu="RTX 4070", used_by_others="2.1GB")
    document = plan_view.document(made)
    sections = [section for section in document.sections if section.title.id in ("plan.memory", "plan.bytes")]
    text.render(type(document)(document.title, document.subtitle, sections), recorder)
    title = 'foretrain plan c.py --gpu "RTX 4070" --used-by-others 2.1GB --full'
    return recorder.export_svg(title=title, theme=MONOKAI, code_format=CONSOLE_FORMAT, unique_id="plan")


def wanted() -> dict[Path, str]:
    found = {ROOT / "docs" / "pictures" / "plan.svg": picture_of_plan()}
    found |= {**json_schemas.files(), **toml_schemas.files(), **man_page.files()}
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return found | {page: fill(page.read_text("utf-8")) for page in pages}


def main() -> int:
    os.chdir(ROOT)  # the commands on the pages name files by their paths here
    check = "--check" in sys.argv
    stale = {
        path: content for path, content in wanted().items() if not path.is_file() or path.read_text("utf-8") != content
    }
    for path, content in stale.items():
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(content, "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

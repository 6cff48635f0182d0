"""Markdown tables and sentences of the committed results of benchmarks, by the name of the generated part that shows them."""

import json
import string
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIB, MIB = 2**30, 2**20
PARTS: dict[str, Callable[[], str]] = {}
# A format that ends in one of these: the number is divided by it, and what stands behind it follows.
_UNITS = {
    "p": (0.01, "%"), "ms": (1e-3, " ms"), "MiB": (MIB, " MiB"), "GiB": (GIB, " GiB"),
    "kB": (1e3, ""), "MB": (1e6, ""), "s": (1, " s"),
}  # fmt: skip


READ: dict[str, Any] = {}  # results that the part under way took figures from


@cache
def _loaded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def result(name: str) -> Any:
    """Return benchmarks/results/NAME.json."""
    READ[name] = _loaded(name)
    return READ[name]


def made(name: str) -> str:
    """Return the text of a part; where it has a table, with the date and the commit of each result in it."""
    READ.clear()
    text = PARTS[name]()
    if not READ or "| --" not in text:
        return text
    of = []
    for file, found in READ.items():
        about = found if isinstance(found, dict) else {}
        facts = [about.get("date", ""), f"commit {about['commit']}" if about.get("commit") else ""]
        of.append(", ".join([f"[{file}.json](../benchmarks/results/{file}.json)", *filter(None, facts)]))
    return f"{text}\n\nFrom {'; '.join(of)}."


class _Template(string.Formatter):
    """Fields of nested dictionaries, {machine.cpu}, and formats with a unit, {step_s:,.1ms}."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs[key]

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value: Any = kwargs
        for name in field_name.split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        for unit, (size, shown) in _UNITS.items():
            if format_spec.endswith(unit):
                scaled = value * 100 if unit == "p" else value * 1e3 if unit == "ms" else value / size
                return f"{scaled:{format_spec.removesuffix(unit)}f}{shown}"
        return super().format_field(value, format_spec)


_TEMPLATE = _Template()


def fill(template: str, values: dict[str, Any], **more: Any) -> str:
    return _TEMPLATE.vformat(template, (), {**values, **more})


def table(columns: str, rows: Iterable[Any], template: str = "", *ends: str) -> str:
    """Return a Markdown table, and paragraphs after it.

    `columns`: names with | between; a > behind a name aligns its column to the right. A row is its cells with | between,
    or with a template what fills it.
    """
    names = [name.strip() for name in columns.split("|")]
    head = "".join(f"| {name.removesuffix(' >')} " if name.strip("> ") else "| " for name in names) + "|"
    line = "".join("| ---: " if name.endswith(">") else "| --- " for name in names) + "|"
    cells = [fill(template, row) if template else row for row in rows]
    return "\n\n".join(["\n".join([head, line, *(f"| {each} |" for each in cells)]), *filter(None, ends)])


def part(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Name the generated part that a function makes."""

    def named(make: Callable[[], str]) -> Callable[[], str]:
        PARTS[name] = make
        return make

    return named


def declare(
    name: str, source: str, columns: str, template: str, end: str = "", *,
    only: Callable[[Any], object] = lambda row: True, **cells: Callable[[Any], object],
) -> None:  # fmt: skip
    """Declare a part that is one table: of `source`, a result and the key of its rows; `cells` are computed from a row."""

    def make() -> str:
        file, *keys = source.split(".")
        rows = result(file)
        for key in keys:
            rows = rows[key]
        chosen = [{**row, **{key: of(row) for key, of in cells.items()}} for row in rows if only(row)]
        return table(columns, chosen, template, fill(end, result(file)))

    PARTS[name] = make


def mode(row: dict[str, Any]) -> str:
    return "compiled" if row["compiled"] else "eager"

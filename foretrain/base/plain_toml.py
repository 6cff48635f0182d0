"""TOML of tables and one-line texts, as locales are written, read in a fraction of tomllib's time."""

import json
import re
import tomllib
from typing import Any

# A line: a table's header, a text, a comment, or nothing.
_PLAIN = r'[^"\\\x00-\x1f\x7f]*'
_LINE = re.compile(
    rf'^(?:\[([A-Za-z0-9_.-]+)\]|(?:"([^"\\\n]+)"|([A-Za-z0-9_-]+)) = "({_PLAIN}(?:\\["\\nt]{_PLAIN})*)"|#.*|[ \t]*)$',
    re.MULTILINE,
)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {dotted id: value}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read(text: str) -> dict[str, Any]:
    """All values of a file as {dotted id: value}; the first table may have values of any kind. Raises
    TOMLDecodeError."""
    first = text.find("\n[", text.find("[") + 1) + 1
    found = _texts(text[first:])
    return flat(tomllib.loads(text)) if found is None else flat(tomllib.loads(text[:first])) | found


def _texts(text: str) -> dict[str, str] | None:
    """Those of tables of texts; None where there is anything else in them."""
    lines = _LINE.findall(text)
    if len(lines) != text.count("\n") + 1:
        return None
    found, prefix = {}, ""
    for header, quoted, bare, value in lines:
        if header:
            prefix = f"{header}."
        elif quoted or bare:
            found[prefix + (quoted or bare)] = json.loads(f'"{value}"') if "\\" in value else value
    return found

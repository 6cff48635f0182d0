"""`known_keys`: the keys of keys.toml, by format; groups of them are joined."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple


class KnownKeys(NamedTuple):
    """Keys that change neither memory nor time, and keys that change one of them and are not planned."""

    harmless: frozenset[str]
    unplanned: frozenset[str]


@cache
def _file() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8"))


def known_keys(*groups: str) -> KnownKeys:
    """Those of the groups named, such as "training" and "trl"; what one group does not plan, none does."""
    tables = [_file()[group] for group in groups]
    unplanned = frozenset(key for table in tables for key in table["unplanned"].split())
    return KnownKeys(frozenset(key for table in tables for key in table["harmless"].split()) - unplanned, unplanned)

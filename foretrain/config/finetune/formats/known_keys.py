"""`known_keys`: what each key of keys.toml is, by format; groups of them are joined."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def _file() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8"))


def known_keys(*groups: str) -> dict[str, str]:
    """harmless, at_least, at_most or decisive, by the key; of groups such as "training" and "trl" the last one says."""
    tables = [table for group in groups for table in _file()[group].items()]
    return {key: kind for kind, keys in tables for key in keys.split()}

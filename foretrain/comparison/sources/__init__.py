"""Sources of a comparison: whatever a run can be read from, as a `Subject`; a kind is one file and one line here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from foretrain.base.errors import UserError
from foretrain.comparison.sources import logs, plans, runs, tables
from foretrain.comparison.sources.request import OWN_KEYS, SourceRequest, take_apart
from foretrain.comparison.subject import Subject
from foretrain.hardware.catalogue import Gpu


class Loader(NamedTuple):
    """`load` raises UserError for what is damaged. `takes`: keys that may follow a +."""

    id: str
    claims: Callable[[Path, bytes], bool]
    load: Callable[[SourceRequest], Subject]
    takes: tuple[str, ...]


LOADERS = (
    Loader("watched", runs.is_watched, runs.load, ("gpu", "used_by_others", "tokens_per_step", "bytes_per_token")),
    Loader("tracker", tables.is_tracked, tables.load_tracked, OWN_KEYS),
    Loader("run", runs.claims, runs.load, ("used_by_others", "bytes_per_token")),
    Loader("config", plans.is_config, plans.load_config, ("gpu", "used_by_others", "bytes_per_token")),
    Loader("plan", plans.claims, plans.load, ("bytes_per_token",)),
    Loader("table", tables.claims, tables.load, OWN_KEYS),
    Loader("log", logs.claims, logs.load, ("gpu", "used_by_others", "tokens_per_step", "bytes_per_token")),
)


def load(given: SourceRequest) -> Subject:
    path = Path(given.path)
    if given.is_model:
        raise UserError("usage.compare_model", path=given.path)
    loader = next(loader for loader in LOADERS if loader.claims(path, given.head))
    for key in given.own:
        if key not in loader.takes:
            raise UserError("usage.source_key_unused", path=given.path, key=key, takes=list(loader.takes))
    if given.tables and loader.id != "table":
        raise UserError("usage.source_table_unused", path=given.path, table=str(given.tables[0]))
    return loader.load(given)


def subjects_of(
    words: Sequence[str],
    tell: Callable[[tuple[UserError, ...]], None] = lambda notes: None,
    *,
    gpu: Gpu | None = None,
    used_by_others_bytes: int = 0,
    columns: Mapping[str, str] | None = None,
) -> list[Subject]:
    """Return the subjects of sources by a user's words. `tell` gets what was skipped in a config. Raises UserError."""
    given = [
        replace(take_apart(word), gpu=gpu, used_by_others_bytes=used_by_others_bytes, columns=columns or {})
        for word in words
    ]
    if len(given) == 1:
        raise UserError("usage.compare_one", path=given[0].path)
    subjects = []
    for one in given:
        subjects.append(load(one))
        if one.resolved:
            tell(one.resolved.notes)
    if others := [each for each in subjects if each.generates != subjects[0].generates]:
        one, other = sorted((subjects[0], others[0]), key=lambda each: not each.generates)
        raise UserError("usage.compare_kinds", one=one.label, other=other.label)
    return subjects

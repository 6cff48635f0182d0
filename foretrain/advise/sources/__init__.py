"""Sources of a comparison: whatever a run can be read from, as a `Subject`.

A further kind is one file and one line here. A loader says whether a path is its own, by the path and the first bytes,
and loads it. The first that claims it wins.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from foretrain.advise.sources import configs, logs, plans, runs, tables, watched
from foretrain.advise.sources.given import Given
from foretrain.advise.subject import Subject
from foretrain.errors import UserError


class Loader(NamedTuple):
    """One kind of source. `load` raises UserError for what is damaged."""

    id: str
    claims: Callable[[Path, bytes], bool]
    load: Callable[[Given], Subject]


LOADERS = (
    Loader("watched", watched.claims, watched.load),
    Loader("run", runs.claims, runs.load),
    Loader("config", configs.claims, configs.load),
    Loader("plan", plans.claims, plans.load),
    Loader("table", tables.claims, tables.load),
    Loader("log", logs.claims, logs.load),
)


def load(given: Given) -> Subject:
    """The subject. Raises UserError with one sentence for what cannot be read."""
    path = Path(given.path)
    head = b""
    if path.is_file():
        try:
            with path.open("rb") as file:
                head = file.read(4096)
        except OSError as error:
            raise UserError("data.log_unreadable", path=given.path, reason=error.strerror or str(error)) from None
    return next(loader for loader in LOADERS if loader.claims(path, head)).load(given)

"""SQLite files of trackers, read and never written: only tables, no views, and no more rows than are expected."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretrain.training.trackers.tracker import MOST_VALUES, damaged

_MAGIC = b"SQLite format 3\x00"
_MOST_INSTRUCTIONS = 200_000_000  # of a query; a file of others may hold one without end


class Base:
    """A file that is open. Errors of SQLite are let through."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds."""
        found = self.connection.execute(f"{query} LIMIT {MOST_VALUES + 1}", values).fetchall()
        if len(found) > MOST_VALUES:
            raise sqlite3.DataError(f"it has more than {MOST_VALUES:,} values")
        return found

    def columns(self, table: str) -> set[str]:
        """The columns of a table; none where there is no such table."""
        kind = self.connection.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        if kind != ("table",):
            return set()
        return {name for _, name, *_ in self.connection.execute(f"PRAGMA table_info({table})")}


def _connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    connection.execute("PRAGMA trusted_schema = OFF")
    count = iter(range(_MOST_INSTRUCTIONS // 1000))
    connection.set_progress_handler(lambda: next(count, None) is None, 1000)
    return connection


@contextlib.contextmanager
def opened(path: Path, tracker: str) -> Iterator[Base]:
    """The file, open to be read. Raises UserError for one that is damaged."""
    connection = None
    try:
        connection = _connection(path)
        yield Base(connection)
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise damaged(path, tracker, error) from None
    finally:
        if connection is not None:
            connection.close()


def has(path: Path, head: bytes, table: str, columns: Sequence[str]) -> bool:
    """Whether this is a SQLite file with a table that has these columns. Raises UserError for one that is damaged."""
    if not head.startswith(_MAGIC):
        return False
    with opened(path, "trackio or MLflow") as base:
        return {*columns} <= base.columns(table)

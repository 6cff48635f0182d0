"""The table of measured figures: cases.json as records, checked as it is read. No torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases.json"
UNITS = {"B": 1, "MiB": 2**20, "GiB": 2**30, "ms": 1e-3, "tok/s": 1, "OOM": 0}
GRADES = ("A", "A-", "B+", "B", "B-", "C")
# What a figure is of, and what the prediction gives for it.
KINDS = {
    "allocated": "memory",  # torch.cuda.max_memory_allocated
    "requested": "memory",  # the same, before the allocator rounds: a snapshot's peak
    "reserved": "memory",  # torch.cuda.max_memory_reserved, or memory_reserved at the end
    "at rest": "memory",  # torch.cuda.memory_allocated between steps
    "out of memory": "fits",  # the run ended so; the prediction says whether it fits
    "step time": "time",
    "tokens/s": "time",
}
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{7,40}")


class BadTable(ValueError):
    """The file is not what it should be: one sentence."""


@dataclass(frozen=True)
class Figure:
    """One measured figure; `reads` names what of the prediction stands against it."""

    id: str
    kind: str
    measured: float
    unit: str
    reads: str
    quote: str
    named: str = ""  # why prediction and measurement differ, where that is known; no part of the prediction

    @property
    def value(self) -> float:
        """In bytes, seconds or tokens a second."""
        return self.measured * UNITS[self.unit]

    def same(self, predicted: float) -> bool:
        """Whether a prediction is the figure, in all digits that were published."""
        digits = len(str(self.measured).partition(".")[2]) if isinstance(self.measured, float) else 0
        return abs(predicted - self.value) <= max(0.5 * 10.0**-digits * UNITS[self.unit], 0.5)


@dataclass(frozen=True)
class Case:
    """One run that somebody measured, and how foretrain predicts it."""

    id: str
    program: str
    settings: Mapping[str, Any]
    gpu: str
    measured_on: str
    torch: str
    grade: str
    what: str
    source: str
    checkouts: tuple[str, ...]
    assumed: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class LeftOut:
    """Rows of the collection that are not predicted, and why."""

    rows: str
    count: int
    world: str
    why: str


@dataclass(frozen=True)
class Table:
    collected: int
    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def _text(row: Mapping[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    value = row.get(key, "" if empty else None)
    if not isinstance(value, str) or not (value or empty):
        raise BadTable(f"{where}: {key} is {value!r}; it must be a text")
    return value


def _rows(row: Any, key: str, where: str) -> list[Mapping[str, Any]]:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadTable(f"{where}: {key} must be a list of objects")
    return value


def _figure(row: Mapping[str, Any], where: str) -> Figure:
    id = _text(row, "id", where)
    where = f"{where}, figure {id}"
    kind, unit, measured = _text(row, "kind", where), _text(row, "unit", where), row.get("measured")
    if kind not in KINDS:
        raise BadTable(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if unit not in UNITS:
        raise BadTable(f"{where}: unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    if isinstance(measured, bool) or not isinstance(measured, int | float) or not 0 <= measured < 1e15:
        raise BadTable(f"{where}: measured is {measured!r}; it must be a number from 0 to 1e15")
    if (kind == "out of memory") != (unit == "OOM") or (measured == 0) != (unit == "OOM"):
        raise BadTable(f"{where}: {measured} {unit} is not a figure of kind {kind!r}")
    return Figure(
        id, kind, measured, unit, _text(row, "reads", where), _text(row, "quote", where),
        _text(row, "named", where, empty=True),
    )  # fmt: skip


def _case(row: Mapping[str, Any], where: str) -> Case:
    id = _text(row, "id", where)
    where = f"{where}: case {id}"
    if not re.fullmatch(r"[\w.-]+", id):
        raise BadTable(f"{where}: an id has letters, digits, '.', '_' and '-' only")
    grade, settings, checkouts = _text(row, "grade", where), row.get("settings"), row.get("checkouts", [])
    if grade not in GRADES:
        raise BadTable(f"{where}: grade is {grade!r}; it must be one of {', '.join(GRADES)}")
    if not isinstance(settings, dict):
        raise BadTable(f"{where}: settings must be an object")
    if not isinstance(checkouts, list) or not all(isinstance(c, str) and REPOSITORY.fullmatch(c) for c in checkouts):
        raise BadTable(f"{where}: checkouts must be a list of owner/name@commit")
    program = _text(row, "program", where)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", program):
        raise BadTable(f"{where}: program is {program!r}; it must be the name of a file of programs/")
    figures = tuple(_figure(figure, where) for figure in _rows(row, "figures", where))
    if not figures:
        raise BadTable(f"{where}: it has no figures")
    return Case(
        id, program, settings, _text(row, "gpu", where), _text(row, "measured_on", where),
        _text(row, "torch", where), grade, _text(row, "what", where), _text(row, "source", where), tuple(checkouts),
        _text(row, "assumed", where, empty=True), figures,
    )  # fmt: skip


def read(path: Path = CASES) -> Table:
    """The table; BadTable where the file is not one."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadTable(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadTable(f"{path}: not JSON: {error}") from None
    where = path.name
    cases = tuple(_case(row, where) for row in _rows(data, "cases", where))
    left_out, collected = [], data.get("collected")
    for row in _rows(data, "left_out", where):
        count = row.get("count")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadTable(f"{where}: left_out: count is {count!r}; it must be a number of rows")
        left_out.append(LeftOut(_text(row, "rows", where), count, _text(row, "world", where), _text(row, "why", where)))
    if isinstance(collected, bool) or not isinstance(collected, int):
        raise BadTable(f"{where}: collected is {collected!r}; it must be a number of rows")
    for ids in ([case.id for case in cases], [figure.id for case in cases for figure in case.figures]):
        for id in ids:
            if ids.count(id) > 1:
                raise BadTable(f"{where}: {id} is there {ids.count(id)} times; an id names one thing")
    return Table(collected, cases, tuple(left_out))

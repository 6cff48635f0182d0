"""The table of measured figures: cases.json as records, checked as it is read. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

CASES = Path(__file__).parent / "cases.json"
UNITS = {"B": 1, "MiB": 2**20, "GiB": 2**30, "ms": 1e-3, "tok/s": 1, "OOM": 0}
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
Text = Annotated[str, StringConstraints(min_length=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Figure(_Record):
    """One measured figure; `reads` names its part of the prediction."""

    id: Text
    kind: Literal["allocated", "requested", "reserved", "at rest", "out of memory", "step time", "tokens/s"]
    measured: int | float = Field(ge=0, lt=1e15)
    unit: Literal["B", "MiB", "GiB", "ms", "tok/s", "OOM"]
    reads: Text
    quote: Text
    named: str = ""  # why prediction and measurement differ, where known

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if (self.kind == "out of memory") != (self.unit == "OOM") or (self.measured == 0) != (self.unit == "OOM"):
            raise ValueError(f"{self.measured} {self.unit} is not a figure of kind {self.kind!r}")
        return self

    @property
    def value(self) -> float:
        """Return bytes, seconds or tokens per second."""
        return self.measured * UNITS[self.unit]

    def same(self, predicted: float) -> bool:
        """Return whether a prediction is the figure, in all digits that were published."""
        digits = len(str(self.measured).partition(".")[2]) if isinstance(self.measured, float) else 0
        return abs(predicted - self.value) <= max(0.5 * 10.0**-digits * UNITS[self.unit], 0.5)


class Case(_Record):
    id: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    program: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]  # "plan", or a file of programs/
    settings: Mapping[str, Any]
    gpu: Text
    measured_on: Text
    torch: Text
    grade: Literal["A", "A-", "B+", "B", "B-", "C"]
    what: Text
    source: Text
    checkouts: list[Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+@[0-9a-f]{7,40}$")]] = []
    assumed: str = ""
    figures: list[Figure] = Field(min_length=1)


class LeftOut(_Record):
    rows: Text
    count: int = Field(ge=1)
    world: Text
    why: Text


class Table(_Record):
    model_config = ConfigDict(extra="ignore")

    collected: int
    cases: list[Case]
    left_out: list[LeftOut]

    @model_validator(mode="after")
    def _names_one_thing_each(self) -> Self:
        for ids in ([case.id for case in self.cases], [figure.id for case in self.cases for figure in case.figures]):
            if twice := {id for id in ids if ids.count(id) > 1}:
                raise ValueError(f"{', '.join(sorted(twice))}: an id names one thing")
        return self


def read(path: Path = CASES) -> Table:
    return Table.model_validate_json(path.read_text("utf-8"))

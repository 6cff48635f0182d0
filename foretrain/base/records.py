"""`Record`: the base of everything that is passed between layers: frozen, checked, with JSON."""

import json
from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value in base units (bytes, seconds, joules, FLOPs), without tensors, printed as SHOWN has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def __str__(self) -> str:
        shown = _shown(type(self))
        return shown(self, False) if shown else super().__str__()

    def _repr_html_(self) -> str | None:
        shown = _shown(type(self))
        return shown(self, True) if shown else None

    def to_json(self, **extra: Any) -> dict[str, Any]:
        """Return plain JSON values; `extra` comes first (the schema's name, for instance)."""
        return {**extra, **self.model_dump(mode="json")}

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        if isinstance(data, dict):
            data.pop("schema", None)
        return cls.model_validate(data)


class Note(Record):
    id: str
    values: dict[str, Any]


# Name of a record's class -> (record, as HTML?) -> text. Filled by reports/shown.py, since records know of no view.
SHOWN: dict[str, Callable[[Any, bool], str]] = {}
FIRST: set[Callable[[], None]] = set()  # run when the first record is shown: views take a while to load


def _shown(kind: type) -> Callable[[Any, bool], str] | None:
    for fill in () if SHOWN else tuple(FIRST):
        fill()
    return SHOWN.get(kind.__name__)

"""A run that a tracker has kept, as monitoring/tracked.py hands it over: a JSON object a line, each with its marker."""

import json
import math

from foretrain.runs.formats.log_format import LineReader, LogFormat, Reading

OURS, OTHERS = "foretrain in a tracker", "a tracker's run"
_NUMBERS = ("loss", "step_s", "tokens_per_s", "learning_rate")


class _Lines(LineReader):
    """Reads the lines of one format, and what the first of them says of the whole run."""

    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.known: dict[str, float] = {}

    def read(self, line: str) -> list[Reading]:
        """The step or the evaluation of a line."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return []
        if not isinstance(found, dict) or found.get("tracked") != self.format.name:
            return []
        self.known |= found.get("run") or {}
        if "val_loss" in found:
            return [Reading(0, found["step"], evaluated=True, val_loss=_finite(found["val_loss"]))]
        if "step" not in found:
            return []
        loss, step_s, tokens_per_s, rate = (_finite(found[key]) if key in found else None for key in _NUMBERS)
        return [Reading(0, found["step"], loss, step_s, tokens_per_s, rate)]

    def header(self) -> dict[str, float]:
        """Fields of LogHeader."""
        return self.known


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _format(name: str, **more: object) -> LogFormat:
    return LogFormat(
        name=name, words=(f'"{name}"',), reader=_Lines, mean_times=True, own_evaluations=True, printed=False,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


FORMATS = (
    _format(OURS, has_config=True),
    _format(OTHERS, step_time="stamps", times_evaluation=True, counts_to_total=True),
)

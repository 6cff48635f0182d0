"""JSON lines of fine-tuning programs: a record for each logged step, with the time since the start.

LLaMA-Factory's trainer_log.jsonl: `{"current_steps": 10, "total_steps": 300, "loss": 2.28, …, "elapsed_time":
"0:00:31"}`. ms-swift's logging.jsonl: `{"loss": 1.49, …, "global_step/max_steps": "5/100", "elapsed_time": "0m 15s"}`.
Tracked runs come from columns.py in such lines.
"""

import json
import math
import re

from foretrain.runs.formats.figures import loss_unit, readings_of
from foretrain.runs.formats.log_format import LineReader, LogFormat, PatternReader, Reading, number, pattern

_RECORD = re.compile(r"\{[^{}]{10,6000}\}")
_PAIR = re.compile(r"[\"']([^\"']{1,80})[\"']:\s*[\"']?([^\"',}]{1,60})[\"']?")
_OF = re.compile(r"(\d{1,12})/(\d{1,12})")
_CLOCK = re.compile(r"(?:(\d{1,5}) days?, )?(\d{1,5}):(\d\d):(\d\d)")
_WORDS = pattern(r"(?:(\d{1,5})d)?\s*(?:(\d{1,5})h)?\s*(?:(\d{1,5})m)?\s*(?:(\d{1,5})s)?")


class _Records(PatternReader):
    def read(self, line: str) -> list[Reading]:
        found: list[Reading] = []
        for match in _RECORD.finditer(line):
            pairs = _PAIR.findall(match[0])
            values = dict(pairs)
            if len(values) != len({*pairs}):  # a key with two values
                continue
            counts = _OF.fullmatch(values.get("global_step/max_steps", ""))
            step, of = counts.groups() if counts else (values.get("current_steps"), values.get("total_steps"))
            if step and step.isascii() and step.isdigit() and len(step) <= 12:
                found += self._record(values, int(step), int(of) if of and of.isascii() and of.isdigit() else None)
        return found

    def _record(self, values: dict[str, str], step: int, of: int | None) -> list[Reading]:
        known = {key: number(text, grouped_thousands=False) for key, text in values.items()}
        elapsed_s = _seconds(values.get("elapsed_time", ""))
        # The accuracy is LLaMA-Factory's of rewards, in trainings on preferences alone.
        self.refine("a preference loss" if "accuracy" in known else loss_unit(known))
        found = readings_of(known, step)
        for reading in found:
            if not reading.evaluated:
                reading.of = of
                reading.step_s = None if math.isnan(elapsed_s) else self.difference(step, elapsed_s)
        return found


def _seconds(text: str) -> float:
    """Return the seconds of 0:01:31, 1 day, 2:03:04 or 1h 2m 3s; NaN of anything else."""
    found = _CLOCK.fullmatch(text.strip()) or (_WORDS.fullmatch(text.strip()) if text.strip() else None)
    if found is None:
        return math.nan
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _format(name: str, title: str, word: str) -> LogFormat:
    return LogFormat(
        name=name, title=title, place=20, words=(word,), reader=_Records, counts_to_total=True,
        step_time="difference", mean_times=True, times_evaluation=True, own_evaluations=True,
    )  # fmt: skip


OURS, OTHERS = "foretrain in a tracker", "a tracker's run"
_NUMBERS = ("loss", "step_s", "tokens_per_s", "learning_rate")


class _Lines(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.known: dict[str, float] = {}

    def read(self, line: str) -> list[Reading]:
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
        return self.known


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _kept_format(name: str, **more: object) -> LogFormat:
    return LogFormat(
        name=name, words=(f'"{name}"',), reader=_Lines, mean_times=True, own_evaluations=True, printed=False,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


FORMATS = (
    _format("llama-factory", "LLaMA-Factory's trainer_log.jsonl", '"current_steps"'),
    _format("ms-swift", "ms-swift", "global_step/max_steps"),
    _kept_format(OURS, has_config=True),
    _kept_format(OTHERS, step_time="stamps", times_evaluation=True, counts_to_total=True),
)

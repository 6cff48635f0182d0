"""The description of one program's log: how its lines are found anywhere in a line, and each figure with its unit."""

import math
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# A number as programs print it; commas are grouping or, where the locale was another, the decimal point.
NUMBER = r"[-+]?(?:nan|inf|\d(?:[\d.,]{0,30}\d)?(?:e[-+]?\d{1,3})?)"
INT = r"\d{1,12}"
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9}
BYTES = {"bytes": 1, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}  # by the end of a group's name
MEMORY = ("allocated", "reserved", "active", "device")  # what a figure of memory counts: the beginning of such a name
# Where the time of a step is from: printed; the difference of times since the start; the lines' time stamps; a progress
# bar's mean; or none.
TimeSource = Literal["printed", "difference", "stamps", "bar", "none"]
LossUnit = Literal["nats per token", "bits a byte", "a preference loss", "a policy loss"]


def pattern(*parts: str) -> re.Pattern[str]:
    """Join the parts, in any case; digits are 0 to 9 alone."""
    return re.compile("".join(parts), re.IGNORECASE | re.ASCII)


def number(text: str, *, grouped_thousands: bool = True) -> float:
    """Return the value of a printed number, such as 1,024 or 11.5K, or NaN; a lone comma may group thousands."""
    scale = _SCALES.get(text[-1:].lower(), 1.0)
    text = text[:-1] if scale > 1 else text
    if "," in text:
        head, _, tail = text.rpartition(",")
        grouping = "." in tail or "," in head or (grouped_thousands and len(tail) == 3)
        text = text.replace(",", "") if grouping else f"{head.replace('.', '')}.{tail}"
    try:
        value = float(text) * scale
    except ValueError:  # such as 1.2.3
        return math.nan
    return value if math.isfinite(value) else math.nan


@dataclass(slots=True)
class Reading:
    """The content of one line. None: absent; NaN: present, but not a number. `evaluated`: it is of an evaluation, after
    `step`. `of`: the last step. `restarts`: the run begins again here."""

    at: int = 0  # where in the line, so that several keep their order
    step: int | None = None
    loss: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    mfu: float | None = None
    of: int | None = None
    memory_bytes: Mapping[str, int] | None = None
    evaluated: bool = False
    val_loss: float = math.nan
    restarts: bool = False


class Corrected(NamedTuple):
    """Numbers and times of the steps once all lines were read; None: unchanged."""

    numbers: "array[int] | None" = None
    times_s: "array[float] | None" = None


class LineReader:
    """`format`: what the whole log was found to be, which its lines may refine."""

    def __init__(self, format: "LogFormat") -> None:
        self.format = format
        self.words = format.words  # one of them is in every relevant line; none: read each

    def read(self, line: str) -> list[Reading]:
        raise NotImplementedError

    def flush(self) -> list[Reading]:
        """Return what waits for a line below it; there are no more."""
        return []

    def refine(self, unit: LossUnit | None) -> None:
        """Take the unit of the losses, where the figures beside them tell it."""
        if unit and unit != self.format.val_unit:
            self.format = replace(self.format, val_unit=unit)

    def finish(self) -> Corrected:
        return Corrected()

    def header(self) -> Mapping[str, object]:
        return {}


class Header(NamedTuple):
    """A line about the whole run, with a small-letter part `word`; groups are named as the fields of LogHeader."""

    word: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, kw_only=True)
class LogFormat:
    """One program's log.

    `step_line` finds the line of a step, with the group `step` and, where printed, `loss`, `ms` or `s` (the step's
    time) or `per_s`, `total_ms` (since the start), `of` (the last step), `epoch` and `in_epoch` (its number and its
    steps), `mfu` (percent), `rate` (tokens per second), `lr`, and memory as in `reserved_gib`. `val_line` has `step`
    and `val`.
    """

    name: str
    step_line: re.Pattern[str] | None = None
    val_line: re.Pattern[str] | None = None
    headers: tuple[Header, ...] = ()
    reader: "Callable[[LogFormat], LineReader] | None" = None
    words: tuple[str, ...] = ()  # one of them is in the line that identifies the program; none: try all
    title: str = ""  # the program's name as it is written, if that is another one
    place: int = 50  # the lower ones are tried first
    has_config: bool = False  # whether a config of foretrain's can describe its model
    val_unit: LossUnit = "nats per token"  # of validation losses
    h100_mfu: bool = False  # older versions divide by an H100's peak on every card
    fallback: bool = False  # used where no other format takes a line of the whole log
    counts_to_total: bool = False  # the last step has the number of all steps; else that less one
    times_evaluation: bool = False  # evaluations and saves are within the time of their step
    step_time: TimeSource = "printed"
    mean_times: bool = False  # a time is the mean of the steps since the line before
    rate_per_gpu: bool = False  # its tokens per second are one card's
    printed: bool = True  # it is a text that a program prints, and is shown as one
    own_evaluations: bool = False  # it never prints evaluations in nanoGPT's form

    @property
    def shown(self) -> str:
        return self.title or self.name

    def new_reader(self) -> LineReader:
        return self.reader(self) if self.reader else PatternReader(self)


class PatternReader(LineReader):
    """Reads by the patterns of a format. `before`: a step and the time since the start, of the last line with both."""

    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.before: tuple[int, float] | None = None
        self.first_epoch = -1
        names = format.step_line.groupindex if format.step_line else ()
        self.memory = [name for name in names if _memory_group(name)]

    def read(self, line: str) -> list[Reading]:
        found = []
        if self.format.step_line:
            found = [self.step(line, match) for match in self.format.step_line.finditer(line)]
        if self.format.val_line:
            found += [self.evaluation(match) for match in self.format.val_line.finditer(line)]
        return found

    def step(self, line: str, match: re.Match[str]) -> Reading:
        groups = match.groupdict()
        reading = Reading(match.start(), int(groups["step"]))
        if (text := groups.get("loss")) is not None:
            reading.loss = number(text, grouped_thousands=False)
        if (text := groups.get("ms")) is not None:
            reading.step_s = number(text) / 1e3
        elif (text := groups.get("s")) is not None:
            reading.step_s = number(text)
        elif (text := groups.get("per_s")) is not None:
            reading.step_s = 1 / value if (value := number(text)) > 0 else math.nan
        elif (text := groups.get("total_ms")) is not None:
            reading.step_s = self.difference(reading.step or 0, number(text) / 1e3)
        if (text := groups.get("of")) is not None:
            reading.of = int(text)
        if (text := groups.get("epoch")) is not None:
            self.first_epoch = min(int(text), 1) if self.first_epoch < 0 else self.first_epoch
            reading.step = int(groups["step"]) + (int(text) - self.first_epoch) * int(groups["in_epoch"] or 0)
        if (text := groups.get("mfu")) is not None:
            reading.mfu = number(text) / 100
        if (text := groups.get("rate")) is not None:
            reading.tokens_per_s = number(text)
        if (text := groups.get("lr")) is not None:
            reading.learning_rate = number(text, grouped_thousands=False)
        if self.memory:
            reading.memory_bytes = memory_of({name: groups[name] for name in self.memory})
        return reading

    def evaluation(self, match: re.Match[str]) -> Reading:
        groups = match.groupdict()
        at = int(groups["step"]) if "step" in groups else None
        if at is not None and self.before is None and (total := groups.get("total_ms")):
            self.before = at, number(total) / 1e3
        loss = number(groups["val"], grouped_thousands=False)
        return Reading(match.start(), at, evaluated=True, val_loss=loss)

    def difference(self, step: int, total_s: float) -> float | None:
        """Return the mean step time since the last line, from times since some start; None where there is none."""
        before, self.before = self.before, (step, total_s)
        if before is None or step <= before[0] or not total_s > before[1]:
            return None
        return (total_s - before[1]) / (step - before[0])


def memory_of(groups: Mapping[str, str | None]) -> dict[str, int] | None:
    found = {}
    for name, text in groups.items():
        named = _memory_group(name)
        if text is not None and named:
            value = number(text) * named[1]
            if 0 < value < 2**60:
                found[named[0]] = round(value)
    return found or None


def _memory_group(name: str) -> tuple[str, int] | None:
    """Return (what it counts, bytes of its unit) of a name such as `reserved_gib`; else None."""
    kind, _, unit = name.rpartition("_")
    return (kind, BYTES[unit]) if kind in MEMORY and unit in BYTES else None

"""tqdm's bar in a log, `  6%|▋         | 1/16 [01:18<19:31, 78.12s/it]`, and PyTorch Lightning's, which counts from one
in each epoch: `Epoch 9: 100%|█| 860/860 [00:05<00:00, 162.25it/s, v_num=1]`."""

import math
import re
from array import array
from bisect import bisect_right
from typing import NamedTuple

from foretrain.runs.formats.log_format import NUMBER, LineReader, LogFormat, Reading, number, pattern

WORDS = ("it/s", "s/it")
_BAR = re.compile(
    r"(?:^|[\r\n\]])(?P<label>[^\r\n\]]{0,120}?)\b\d{1,3}%\|[^|\r\n]{0,400}\|\s*(?P<now>\d{1,12})/(?P<of>\d{1,12})\s*"
    r"\[(?P<elapsed>[\d:]{1,20})<[^,\]]{0,30},\s*(?P<rate>\d{1,9}(?:\.\d{1,9})?)(?P<unit>it/s|s/it)"
    r"(?P<after>[^\]\r\n]{0,2000})",
    re.ASCII,
)


class Bar(NamedTuple):
    """One drawing of a bar. `label`: before it; `elapsed_s`: since it began; `after`: its postfix."""

    label: str
    now: int
    of: int
    elapsed_s: int
    step_s: float
    after: str
    at: int


def bars(line: str) -> list[Bar]:
    if "%|" not in line:
        return []
    found = []
    for match in _BAR.finditer(line):
        rate = float(match["rate"])
        if rate > 0:
            step_s = 1 / rate if match["unit"] == "it/s" else rate
            label, elapsed_s = match["label"].strip(" :"), seconds(match["elapsed"])
            now, of = int(match["now"]), int(match["of"])
            found.append(Bar(label, now, of, elapsed_s, step_s, match["after"], match.start()))
    return found


def seconds(clock: str) -> int:
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part or 0)
    return total


class Drawn:
    def __init__(self, of: int = 0) -> None:
        self.counts, self.times_s = array("q"), array("d")
        self.of, self.elapsed_s = of, 0

    def add(self, bar: Bar) -> None:
        """Add a drawing; one that counts less is of another bar with the same total."""
        if self.counts and bar.now < self.counts[-1]:
            return
        self.elapsed_s = bar.elapsed_s
        if self.counts and bar.now == self.counts[-1]:
            self.times_s[-1] = bar.step_s
        else:
            self.counts.append(bar.now)
            self.times_s.append(bar.step_s)

    @property
    def now(self) -> int:
        return self.counts[-1] if self.counts else 0

    def time_s(self, after: int, step: int) -> float:
        """Return the last mean shown between these steps; NaN where there is none."""
        i = bisect_right(self.counts, step) - 1
        return self.times_s[i] if i >= 0 and self.counts[i] > after else float("nan")


_NOTHING = Drawn()
_MOST_BARS = 64


class Bars:
    """The bars of a program, by their totals. The training's takes longest; evaluations draw theirs in between."""

    def __init__(self) -> None:
        self.by_total: dict[int, Drawn] = {}
        self.longest = _NOTHING

    def add(self, bar: Bar) -> None:
        if bar.of not in self.by_total:
            if len(self.by_total) >= _MOST_BARS:
                return
            self.by_total[bar.of] = Drawn(bar.of)
        drawn = self.by_total[bar.of]
        drawn.add(bar)
        if self.longest is _NOTHING or drawn.elapsed_s > self.longest.elapsed_s:
            self.longest = drawn


LIGHTNING_LOSSES = (
    "train_loss_step", "train/loss_step", "train_loss", "train/loss", "loss", "loss_step", "training_loss",
    "train_loss_epoch", "train/loss_epoch", "loss_epoch",
)  # fmt: skip
LIGHTNING_VAL_LOSSES = (
    "val_loss", "val/loss", "valid_loss", "valid/loss", "eval_loss", "validation_loss", "val_loss_epoch",
    "val/loss_epoch", "valid_loss_epoch",
)  # fmt: skip
_EPOCH = re.compile(r"\bEpoch:? *\[?(\d{1,9})(?:/\d{1,9})?\]?$", re.IGNORECASE)
_POSTFIX = pattern(rf"(?<![\w/])([a-z][\w/]{{0,60}})=({NUMBER})")
_LABEL = re.compile(r"(?:epoch|train|step|iter)[\w /:.-]{0,60}|", re.IGNORECASE)


def _named(bar: Bar, names: tuple[str, ...]) -> float | None:
    values = {name.lower(): number(text) for name, text in _POSTFIX.findall(bar.after)}
    return next((values[name] for name in names if name in values), None)


class _Lightning(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.val = math.nan

    def read(self, line: str) -> list[Reading]:
        found: list[Reading] = []
        for bar in bars(line):
            epoch = _EPOCH.search(bar.label)
            if epoch is None or "v_num=" not in bar.after or not bar.now:
                continue
            step = int(epoch[1]) * bar.of + bar.now
            found.append(Reading(bar.at, step, _named(bar, LIGHTNING_LOSSES), bar.step_s))
            val = _named(bar, LIGHTNING_VAL_LOSSES)
            # The bar repeats the last one until there is another.
            if val is not None and bar.now == bar.of and val != self.val:
                self.val = val
                found.append(Reading(bar.at, step, evaluated=True, val_loss=val))
        return found


class _AnyBar(LineReader):
    """Reads a training's progress bar, the first one, where nothing else tells its steps."""

    of = first_epoch = 0

    def read(self, line: str) -> list[Reading]:
        found = []
        for bar in bars(line):
            if not bar.now or not _LABEL.fullmatch(bar.label) or bar.of != (self.of or bar.of):
                continue
            epoch = int(match[1]) if (match := _EPOCH.search(bar.label)) else 0
            self.of, self.first_epoch = bar.of, self.first_epoch if self.of else epoch
            step = max(0, epoch - self.first_epoch) * bar.of + bar.now  # it counts from one in each epoch
            found.append(Reading(bar.at, step, _named(bar, LIGHTNING_LOSSES), bar.step_s, of=None if match else bar.of))
        return found

    def header(self) -> dict[str, str]:
        return {"read_as": "step, time and, where it is there, loss of the progress bar"}


FORMATS = (
    LogFormat(
        name="lightning", title="Lightning", words=("v_num=",), reader=_Lightning, counts_to_total=True,
        step_time="bar", mean_times=True, own_evaluations=True,
    ),
    LogFormat(
        name="progress bar", title="a progress bar", place=92, words=WORDS, reader=_AnyBar, fallback=True,
        step_time="bar", mean_times=True, counts_to_total=True, own_evaluations=True, printed=False,
    ),
)  # fmt: skip

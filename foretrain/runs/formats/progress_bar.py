"""tqdm's progress bar in a log, `  6%|▋         | 1/16 [01:18<19:31, 78.12s/it]`; its mean is of the last few
updates.
"""

import re
from array import array
from bisect import bisect_right
from typing import NamedTuple

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
            label, elapsed_s = match["label"].strip(" :"), _seconds(match["elapsed"])
            now, of = int(match["now"]), int(match["of"])
            found.append(Bar(label, now, of, elapsed_s, step_s, match["after"], match.start()))
    return found


def _seconds(clock: str) -> int:
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

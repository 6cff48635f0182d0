"""Hugging Face transformers' Trainer: one dictionary per line, with numbers or, since 5.0, text; and
trainer_state.json.

`{'loss': 1.1836, 'grad_norm': 2.29, 'learning_rate': 0.0002, 'epoch': 0.01}`, an evaluation `{'eval_loss': …}`, and the
end `{'train_runtime': 158.8, …, 'train_steps_per_second': 1.638, …}`. Only the progress bar has steps and times. A pipe
often reorders the lines, so steps are numbered at the end.
"""

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median

from foretrain.runs.formats.figures import figures, loss_unit, readings_of
from foretrain.runs.formats.log_format import Corrected, LineReader, LogFormat, Reading
from foretrain.runs.formats.progress_bar import WORDS, Bars, Drawn, bars

_DICT = re.compile(r"\{'[^{}]{3,6000}\}")  # as Python prints it; JSON has other quotes
_TOKENS = ("num_tokens", "num_input_tokens_seen", "tokens/total")  # since the start


class Tally:
    def __init__(self) -> None:
        self.first_tokens, self.last_tokens = (0, math.nan), (0, math.nan)  # (step or line, tokens)
        self.run_s = self.steps_per_s = self.last_epoch = math.nan
        self.ended = False

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add an entry, at a step or, where there is no number, at a line."""
        tokens = next((values[key] for key in _TOKENS if values.get(key, 0.0) > 0), math.nan)
        if "loss" in values and math.isfinite(tokens):
            if math.isnan(self.first_tokens[1]) or step <= self.first_tokens[0]:
                self.first_tokens = step, tokens
            self.last_tokens = step, tokens
        self.last_epoch = values.get("epoch", self.last_epoch)
        if values.get("train_runtime", 0.0) > 0 and "train_steps_per_second" in values:
            self.ended = True
            self.run_s, self.steps_per_s = values["train_runtime"], values["train_steps_per_second"]

    def header(self, steps: int) -> dict[str, float]:
        """Return fields of LogHeader. `steps`: of the whole run; 0 where only its rate tells them."""
        found: dict[str, float] = {}
        if self.ended:
            run_steps = steps or self.steps()
            if run_steps > 0 and self.run_s < 1e10:
                found |= {"run_s": self.run_s, "run_steps": run_steps, "total_steps": run_steps}
        return found

    def steps(self) -> int:
        """Return the steps of the whole run, by its time and rate; 0 where they are impossible."""
        steps = self.run_s * self.steps_per_s
        return round(steps) if 0 < steps < 1e12 else 0

    def tokens_per_step(self, first: int, last: int) -> float | None:
        tokens = self.last_tokens[1] - self.first_tokens[1]
        return tokens / (last - first) if last > first and 0 < tokens < 1e18 else None


class Dictionaries(LineReader):
    def __init__(self, format: LogFormat, keys: tuple[str, ...] = ("epoch",)) -> None:
        super().__init__(format)
        self.keys, self.known = keys, False
        self.tally, self.bars = Tally(), Bars()
        self.epochs, self.own_s = array("d"), array("d")  # own_s: TRL's step_time
        self.before, self.after = array("q"), array("q")  # the bar's count before each line with a loss, and after it
        self.lines = 0
        self.last: tuple[float, ...] = ()
        self.corrected: Corrected | None = None

    def read(self, line: str) -> list[Reading]:
        """Read the dictionaries in the line; bars wait for the end."""
        found = [reading for match in _DICT.finditer(line) for reading in self._take(match)]
        for bar in bars(line):
            if not bar.label:
                self.bars.add(bar)
                if len(self.after) < self.lines:
                    self.after.append(self.bar.now)
        return found

    def _take(self, match: re.Match[str]) -> list[Reading]:
        values = figures(match[0])
        if "loss/policy_avg" in values:  # PPO
            values["loss"] = values["loss/policy_avg"]
        if not self.known:
            self.known = "epoch" in values and any(key in values for key in self.keys)
        readings = readings_of(values, None, match.start()) if self.known else []
        if not self.known or "loss" not in values:
            self.tally.add(values, self.lines)
            return readings
        same = tuple(values.get(key, math.nan) for key in ("loss", "epoch", "learning_rate", "grad_norm"))
        if repr(same) == repr(self.last):  # another process prints it too; NaN is not itself
            return []
        self.last = same
        self.refine(loss_unit(values))
        epoch = values.get("epoch", math.nan)
        restarts = bool(self.epochs) and epoch < self.epochs[-1]
        if len(self.after) < self.lines:
            self.after.append(self.bar.now)
        self.lines += 1
        self.epochs.append(epoch)
        self.before.append(self.bar.now)
        self.tally.add(values, self.lines)
        readings[0].restarts = restarts
        self.own_s.append(readings[0].step_s or math.nan)
        return readings

    def finish(self) -> Corrected:
        """Return the steps' numbers, where the end or the bar tells them, and their times by the bar."""
        if self.corrected is not None:
            return self.corrected
        if len(self.after) < self.lines:
            self.after.append(self.bar.now)
        numbers = self._numbers()
        times = None
        if numbers is not None and self.bar.counts:
            drawn = (self.bar.time_s(a, b) for a, b in pairwise((0, *numbers)))
            times = array("d", (bar if math.isnan(own) else own for own, bar in zip(self.own_s, drawn, strict=True)))
        if any(map(math.isfinite, self.own_s)):
            self.format = replace(self.format, step_time="printed")
        self.corrected = Corrected(numbers, times)
        return self.corrected

    def _numbers(self) -> "array[int] | None":
        """Number by the epochs and all steps; by the bar; by lines at equal distances up to the last step."""
        total, lines = self._total(), self.lines
        if not lines:
            return None
        if self.tally.ended and total and self.tally.last_epoch > 0:
            share = total / self.tally.last_epoch
            by_epoch = array("q", (round(e * share) if 0 <= e * share < 1e12 else 0 for e in self.epochs))
            if _rises(by_epoch):
                return by_epoch
        drawn = [counts for counts in (self.before, self.after) if _rises(counts)]
        if drawn:
            return min(drawn, key=self._unevenness)
        if self.tally.ended and total and total // lines and lines == total // (total // lines):
            return array("q", range(total // lines, total + 1, total // lines))[:lines]
        return None

    @property
    def bar(self) -> Drawn:
        return self.bars.longest

    def _total(self) -> int:
        if self.bar.of:
            return self.bar.of
        return self.tally.steps()

    def _unevenness(self, counts: "array[int]") -> float:
        shares = [count / epoch for count, epoch in zip(counts, self.epochs, strict=True) if epoch > 0]
        middle = median(shares) if shares else 0.0
        return median(abs(share - middle) for share in shares) if shares else 0.0

    def header(self) -> dict[str, float]:
        found = self.tally.header(self._total())
        if self.bar.of:
            found["total_steps"] = self.bar.of
        numbers = self.finish().numbers
        first, last = self.tally.first_tokens[0], self.tally.last_tokens[0]
        if numbers is not None and 0 < first <= len(numbers) and 0 < last <= len(numbers):
            tokens = self.tally.tokens_per_step(numbers[first - 1], numbers[last - 1])
            found |= {"tokens_per_step": round(tokens)} if tokens and tokens >= 1 else {}
        return found


def _rises(numbers: "array[int]") -> bool:
    return len(numbers) > 0 and numbers[0] > 0 and all(a < b for a, b in pairwise(numbers))


_BEGIN = re.compile(r"\"log_history\"\s*:\s*\[")
_TOTAL = re.compile(r"\"max_steps\"\s*:\s*(\d{1,12})\b")
_MOST_OF_AN_ENTRY = 2**16  # characters; an entry has some hundred


class _Entries(LineReader):
    """Takes the pieces of the file; an entry is complete where its bracket closes."""

    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.tally = Tally()
        self.began = self.over = False
        self.rest = ""
        self.total = 0

    def read(self, line: str) -> list[Reading]:
        begin = _BEGIN.search(line)
        if begin:
            self.began, self.over, self.words, self.rest, line = True, False, (), "", line[begin.end() :]
        if not self.began:
            return []
        if self.over:
            self._after(line)
            return []
        text = self.rest + line
        found: list[Reading] = []
        while (end := text.find("}")) >= 0:
            start = text.rfind("{", 0, end)
            found += self._entry(text[start : end + 1]) if start >= 0 else []
            text = text[end + 1 :]
        if text.lstrip(", \t\r\n").startswith("]"):
            self.over = True
            self._after(text)
            text = ""
        self.rest = text[-_MOST_OF_AN_ENTRY:]
        return found

    def _entry(self, text: str) -> list[Reading]:
        values = figures(text)
        step = values.get("step", -1.0)
        if not 0 <= step < 1e12:
            return []
        self.tally.add(values, round(step))
        self.refine(loss_unit(values))
        return readings_of(values, round(step))

    def _after(self, text: str) -> None:
        total = _TOTAL.search(text)
        if total:
            self.total = int(total[1])

    def header(self) -> dict[str, float]:
        found = self.tally.header(self.total)
        if self.total:
            found["total_steps"] = self.total
        tokens = self.tally.tokens_per_step(self.tally.first_tokens[0], self.tally.last_tokens[0])
        return found | ({"tokens_per_step": round(tokens)} if tokens and tokens >= 1 else {})


FORMATS = (
    LogFormat(
        name="trainer",
        title="Hugging Face Trainer",
        place=60,
        words=("{'", *WORDS),
        reader=Dictionaries,
        counts_to_total=True,
        times_evaluation=True,
        step_time="bar",
        mean_times=True,
        own_evaluations=True,
    ),
    LogFormat(
        name="trainer_state.json",
        title="the Trainer's trainer_state.json",
        place=10,
        words=('"log_history"',),
        reader=_Entries,
        counts_to_total=True,
        step_time="none",
        own_evaluations=True,
    ),
)

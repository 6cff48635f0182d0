"""pytorch/torchtune, its log file and its bar: `Step 1 | loss:2.085 lr:2e-05 tokens_per_second_per_gpu:57.8 …`.

Tokens per second are one card's; `peak_memory_active`, `_alloc` and `_reserved` are in GiB. The log file has no times.
The console has the bar `1|10|Loss: 1.03: 10%|…| 10/100 [00:12<01:48, 1.20s/it]`, whose mean is a step's time.
"""

import re

from foretrain.runs.formats.figures import pairs, readings_of
from foretrain.runs.formats.log_format import INT, NUMBER, LineReader, LogFormat, Reading, number, pattern
from foretrain.runs.formats.progress_bar import WORDS, bars

_LINE = pattern(rf"(?<![a-z])Step\s+(?P<step>{INT})\s*\|\s*(?P<rest>\w{{1,80}}:\s?{NUMBER}.{{0,1000}})")
_LABEL = re.compile(rf"(?:^|\D)\d{{1,6}}\|(\d{{1,12}})\|Loss:\s*({NUMBER})$", re.ASCII | re.IGNORECASE)


class _Lines(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.step_s: float | None = None
        self.lines = False  # whether there are lines besides bars

    def read(self, line: str) -> list[Reading]:
        found = []
        for bar in bars(line):
            label = _LABEL.search(bar.label)
            if label:
                self.step_s = bar.step_s
                if not self.lines:
                    found.append(Reading(bar.at, int(label[1]), number(label[2]), bar.step_s))
        for match in _LINE.finditer(line):
            found += self._line(match)
        return found

    def _line(self, match: re.Match[str]) -> list[Reading]:
        values = pairs(match["rest"])
        found = readings_of(values, int(match["step"]), match.start())
        if "loss" in values and not ("lr" in values or "tokens_per_second_per_gpu" in values):
            return []
        for reading in found:
            if not reading.evaluated:
                self.lines, reading.step_s = True, self.step_s
        return found


FORMATS = (
    LogFormat(
        name="torchtune",
        words=("Step ", "Loss:", *WORDS),
        reader=_Lines,
        counts_to_total=True,
        step_time="bar",
        mean_times=True,
        times_evaluation=True,
        rate_per_gpu=True,
        own_evaluations=True,
    ),
)

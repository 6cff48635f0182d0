"""trainer_state.json, as the Trainer writes it beside each checkpoint: the entries of the console, with their steps.

Read entry by entry, as text comes, whatever its size. A step's time is not in it; the end has that of the whole run.
"""

import re

from foretrain.runs.formats.log_format import LineReader, LogFormat, Reading
from foretrain.runs.formats.trainer import Tally, figures, reading_of

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
        """The entries that end in this piece."""
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
        reading = reading_of(values, round(step))
        return [reading] if reading else []

    def _after(self, text: str) -> None:
        total = _TOTAL.search(text)
        if total:
            self.total = int(total[1])

    def header(self) -> dict[str, float]:
        """The time and the steps of the whole run, tokens a step."""
        found = self.tally.header(self.total)
        if self.total:
            found["total_steps"] = self.total
        tokens = self.tally.tokens_per_step(self.tally.first_tokens[0], self.tally.last_tokens[0])
        return found | ({"tokens_per_step": round(tokens)} if tokens and tokens >= 1 else {})


FORMATS = (
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

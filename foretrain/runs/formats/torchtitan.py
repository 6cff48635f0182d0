"""pytorch/torchtitan, components/metrics.py: `step: 14  loss:  3.24405  …  memory:  9.46GiB(64.99%)  tps: 7,282  …`.

A step's time is the difference of two time stamps, divided by the steps between them. Memory is the allocator's
reserved peak. Tokens per second are one card's. Colours are between the words.
"""

import re
from datetime import datetime

from foretrain.runs.formats.log_format import INT, NUMBER, Header, LogFormat, PatternReader, Reading, pattern

_COLOUR = r"(?:\[\d{1,2}m)?"  # a copy may have lost the escape character
_STEP = rf"step:\s*(?P<step>{INT})\s+{_COLOUR}loss:\s*"
_MEMORY = rf"(?:\s*{_COLOUR}memory:\s*(?P<reserved_gib>{NUMBER})\s*GiB(?:\({NUMBER}%\))?)?"
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{1,6})")


class _Stamped(PatternReader):
    def step(self, line: str, match: re.Match[str]) -> Reading:
        reading = super().step(line, match)
        stamp = next(iter(reversed(list(_STAMP.finditer(line, 0, match.start())))), None)
        if stamp and reading.step is not None and (self.before is None or reading.step != self.before[0]):
            reading.step_s = self.difference(reading.step, _seconds(stamp))
        return reading


def _seconds(stamp: re.Match[str]) -> float:
    try:
        return datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}.{stamp[3].ljust(6, '0')}+00:00").timestamp()
    except ValueError:  # such as the 99th of a month
        return float("nan")


FORMATS = (
    LogFormat(
        name="torchtitan",
        words=("step:",),
        reader=_Stamped,
        step_line=pattern(
            rf"(?<!validate )(?:(?<![a-z_])|(?<=\dm)){_STEP}(?P<loss>{NUMBER})",
            rf"(?:\s+{_COLOUR}grad_norm:\s*{NUMBER})?{_MEMORY}",
            rf"(?:\s+{_COLOUR}tps:\s*(?P<rate>{NUMBER}))?(?:\s+{_COLOUR}tflops:\s*{NUMBER})?",
            rf"(?:\s+{_COLOUR}mfu:\s*(?P<mfu>{NUMBER})\s*%)?",
        ),
        val_line=pattern(rf"\bvalidate {_STEP}(?P<val>{NUMBER})"),
        headers=(
            Header(
                "global batch size",
                pattern(
                    rf"global batch size (?P<sequences>{INT}),.{{0,80}}?sequence length (?P<seq_len>{INT}),",
                    rf"\s*total steps (?P<total_steps>{INT})",
                ),
            ),
            Header("cuda capacity:", pattern(r"CUDA capacity:\s*(?P<gpu_name>.{1,60}?) with ")),
        ),
        counts_to_total=True,
        times_evaluation=True,
        step_time="stamps",
        mean_times=True,
        rate_per_gpu=True,
        own_evaluations=True,
    ),
)

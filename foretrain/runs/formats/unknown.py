"""Logs of unknown programs, read by what their lines call a step, a loss, a time with its unit, and a rate.

They are tried only where no other format takes a line of the whole log. The interpretation is recorded.
"""

import math
import re

from foretrain.runs.formats.log_format import INT, NUMBER, LineReader, LogFormat, Reading, number, pattern
from foretrain.runs.formats.progress_bar import WORDS, bars

_GAP = r"\s{0,40}"  # bounded, as a line may be a million spaces
_END = rf"[\"']?{_GAP}[:=#]?{_GAP}"
_FIELDS = {
    "step": pattern(
        rf"(?<![a-z/_.])(?:global[_ ]?step|optimizer[_ ]?step|steps?|iter(?:ation)?|it|update)s?{_END}\[?{_GAP}",
        rf"(?P<value>{INT})(?![\d.]*{_GAP}(?:ms|s|sec|it/s|%)\b)(?:{_GAP}/{_GAP}(?P<of>{INT}))?",
    ),
    "loss": pattern(
        rf"(?<![a-z])(?<!val)(?<!val[_ /])(?<!eval[_ /])(?:train(?:ing)?[_ /])?loss{_END}(?P<value>{NUMBER})"
    ),
    "val": pattern(rf"(?:val(?:id(?:ation)?)?|eval|test)[_ /]?loss{_END}(?P<value>{NUMBER})"),
    "time": pattern(
        r"(?:(?<![a-z_])(?:(?:step|iter|batch)[_ ]?time|time[_ /](?:per[_ ])?(?:step|iter)|dt|time|took)",
        rf"[\"']?{_GAP}[:=(]?{_GAP}(?P<value>{NUMBER}){_GAP}(?P<unit>ms|s|sec|secs|seconds?)\b",
        rf"|(?<![a-z_])(?:step_time|iter_time|dt|time|[a-z_]{{0,20}}time_per_(?:step|iter(?:ation)?))[_(](?P<unit_before>ms|s|sec)\)?{_END}",
        rf"(?P<value_after>{NUMBER})",
        rf"|(?P<value_each>{NUMBER}){_GAP}(?P<unit_each>ms|s|sec)/(?:step|it|iter|batch)\b",
        rf"|(?P<value_per>{NUMBER}){_GAP}(?P<unit_per>it|steps?|iters?)/s(?:ec)?\b)",
    ),
    "rate": pattern(
        rf"(?:tok(?:en)?s?(?:/|[_ ]?per[_ ])s(?:ec(?:ond)?)?{_END}(?P<value>{NUMBER}){_GAP}(?P<scale>[kM])?(?![\w.])",
        rf"|(?P<value_before>{NUMBER}){_GAP}(?P<scale_before>[kM])?{_GAP}tok(?:en)?s?/s(?:ec(?:ond)?)?\b)",
    ),
    "lr": pattern(rf"(?<![a-z])(?:lr|learning[_ ]rate){_END}(?P<value>{NUMBER})"),
}
_SECONDS = {"ms": 1e-3}
_SCALES = {"k": 1e3, "m": 1e6}
_LABEL = re.compile(r"(?:epoch|train|step|iter)[\w /:.-]{0,60}|", re.IGNORECASE)


class _Fields(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.read_as = ""

    def read(self, line: str) -> list[Reading]:
        found = {name: field.search(line) for name, field in _FIELDS.items()}
        step, loss, val = found["step"], found["loss"], found["val"]
        if step is None or not (loss or val):
            return []
        if loss is None:
            return [Reading(step.start(), int(step["value"]), evaluated=True, val_loss=_value(val))]
        reading = Reading(
            step.start(), int(step["value"]), _value(loss), _time_s(found["time"]), _rate(found["rate"]),
            _value(found["lr"]) if found["lr"] else None, of=int(step["of"]) if step["of"] else None,
        )  # fmt: skip
        if not self.read_as:
            self.read_as = ", ".join(f"{name} {match[0].strip()!r}" for name, match in found.items() if match)
        return [reading, Reading(step.end(), reading.step, evaluated=True, val_loss=_value(val))] if val else [reading]

    def header(self) -> dict[str, str]:
        return {"read_as": self.read_as}


class _Bars(LineReader):
    """Reads a training's progress bar where nothing else tells its steps: their time without a loss.

    The first one is the training's; those of evaluations come later, with another total.
    """

    of = 0

    def read(self, line: str) -> list[Reading]:
        shown = [bar for bar in bars(line) if bar.now and _LABEL.fullmatch(bar.label)]
        self.of = self.of or (shown[0].of if shown else 0)
        shown = [bar for bar in shown if bar.of == self.of]
        return [Reading(bar.at, bar.now, step_s=bar.step_s, of=bar.of) for bar in shown]

    def header(self) -> dict[str, str]:
        return {"read_as": "step and time of the progress bar"}


def _value(match: "re.Match[str] | None") -> float:
    return number(match["value"], grouped_thousands=False) if match else math.nan


def _time_s(match: "re.Match[str] | None") -> float | None:
    if match is None:
        return None
    if match["value_per"]:
        rate = number(match["value_per"])
        return 1 / rate if rate > 0 else math.nan
    text = match["value"] or match["value_after"] or match["value_each"]
    unit = match["unit"] or match["unit_before"] or match["unit_each"]
    return number(text, grouped_thousands=False) * _SECONDS.get(unit.lower(), 1.0)


def _rate(match: "re.Match[str] | None") -> float | None:
    if match is None:
        return None
    scale = (match["scale"] or match["scale_before"] or "").lower()
    return number(match["value"] or match["value_before"]) * _SCALES.get(scale, 1.0)


FORMATS = (
    LogFormat(
        # step 500: train loss 3.9500, val loss 4.0500: nanoGPT's evaluations, or all that ng-video-lecture prints
        name="evaluations", title="evaluations as nanoGPT prints them", place=90, words=("train loss",), fallback=True,
        step_line=pattern(rf"(?<![a-z])step\s+(?P<step>{INT}):{_GAP}train loss\s+(?P<loss>{NUMBER}),{_GAP}val loss"),
        has_config=True, step_time="none",
    ),
    LogFormat(
        name="unknown", title="a program that is not known", place=91, reader=_Fields, fallback=True, printed=False,
        own_evaluations=True, counts_to_total=True,
    ),
    LogFormat(
        name="progress bar", title="a progress bar", place=92, words=WORDS, reader=_Bars, fallback=True,
        step_time="bar", mean_times=True, counts_to_total=True, own_evaluations=True, printed=False,
    ),
)  # fmt: skip

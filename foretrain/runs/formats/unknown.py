"""Logs of unknown programs, read by what their lines call a step, a loss, a time with its unit, and a rate."""

import math
import re
from array import array
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from foretrain.runs.formats.log_format import INT, NUMBER, Corrected, LogFormat, PatternReader, Reading, number, pattern

_SCALED = rf"(?!(?:nan|inf)\w){NUMBER}(?:[kMG](?![a-z]))?"
# A name and its value, whatever stands between them; the unit is what follows. Bounded, as a line may be very long.
_NAMED = pattern(
    r"(?<![a-z0-9_])(?P<name>[a-z][a-z_/.() -]{0,48}?)(?=[\s:=#\"'\])])[\"'\])]{0,2}\s{0,9}[:=#]?\s{0,9}[\"'\[(]{0,2}",
    rf"(?P<value>{_SCALED})(?:\s?/\s?(?P<of>{INT}))?(?=\s?(?P<unit>[a-z%][a-z/]{{0,11}})?)",
)
_UNNAMED = pattern(
    rf"(?<![\w.])(?P<value>{_SCALED})\s?(?P<unit>tok(?:en)?s?/s(?:ec)?|(?:ms|s|sec)/(?:step|it|iter|batch)",
    r"|(?:it|steps?|iters?|batch(?:es)?)/s(?:ec)?)\b(?!/|\s?[:=])",
)
_STEP = r"(?:^|[^a-z/_.])(?:(?:global|optimizer|train(?:ing)?)[-_ ]?)?(?:step|iter(?:ation)?|it|(?:num_)?update)s?$"
_ROLES = {
    role: pattern(name)
    for role, name in {
        "epoch": r"\bepoch$",
        "step": _STEP,
        "batch": r"(?:^|[^a-z/_.-])batch$",  # where nothing in the line is called a step
        "val": r"\b(?:val|valid|validation|eval|evaluation|test)[-_/ ]?loss$|\bloss[/_](?:val|eval)$",
        "loss": r"(?:^|[^a-z])loss(?:[/_](?:train|total))?$",
        "lr": r"(?:^|[^a-z])(?:lr|learning[-_ ]rate)$",
        "rate": r"tok(?:en)?s?(?:/|[-_ ]?per[-_ ])s(?:ec(?:ond)?)?$",
        "per_s": r"(?:^|[^a-z])(?:it|iter|step|batche?)s?(?:/|[-_ ]per[-_ ])s(?:ec(?:ond)?)?$",
        "elapsed": r"\b(?:elapsed|since)(?:[-_ ]time)?(?:[_( ](?:m?s|sec)\)?)?$|\b(?:total|wall|train)[-_ ]time$",
        "time": r"(?:^|[^a-z])(?:(?:step|iter|iteration|batch)[-_ /]?)?(?:time|timing|dt|took|seconds)(?: per step)?"
        r"(?:[-_ ]per[-_ ](?:step|iter|iteration|batch))?(?: in)?(?:[_( ](?:m?s|sec)\)?)?$",
    }.items()
}
# Beside "loss": a part of it, or of what another model learns. Beside "time": of a part of the step, or of more.
_PARTS = pattern(
    r"\b(?:aux|kl|nll|z|mtp|router|value|policy|best|val\w*|eval\w*|test)[-_/ .]|balanc|(?<!cross.)\bentropy"
    r"|\b(?:data|load|eval|epoch|forward|backward|optimi[sz]er|total|remaining|eta|end|start)[-_/ ](?:time|seconds)"
)
_SECONDS = {"ms": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0,
            "seconds": 1.0}  # fmt: skip
_ENOUGH = 5  # lines
_UNIT_IN_NAME = pattern(r"[_( ](ms|s|sec)\)?$|\b(seconds)$")


@lru_cache(2048)
def _role(name: str) -> str:
    role = next((role for role, pattern in _ROLES.items() if pattern.search(name)), "")
    return "" if role != "val" and _PARTS.search(name) else role


class _Fields(PatternReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.read_as = ""
        self.numbers, self.times_s = array("q"), array("d")
        self.epoch, self.of_epochs = -1, 0  # the steps of earlier epochs, where they count from one in each

    def read(self, line: str) -> list[Reading]:
        found: dict[str, re.Match[str]] = {}
        for match in _NAMED.finditer(line):
            if role := _role(match["name"]):
                found.setdefault(role, match)
        for match in _UNNAMED.finditer(line):
            first, _, last = match["unit"].lower().partition("/")
            found.setdefault("rate" if first[:3] == "tok" else "per_s" if last in ("s", "sec") else "time", match)
        counted = found.get("step") or found.get("batch")
        if counted is None or not re.fullmatch(INT, counted["value"]) or not ("loss" in found or "val" in found):
            return []
        step, of = self._step(counted, found.get("epoch"))
        val = [Reading(counted.end(), step, evaluated=True, val_loss=_value(found["val"]))] if "val" in found else []
        if "loss" not in found:
            return val
        if not self.read_as:
            roles = {"step": counted} | found
            texts = {role: match[0].strip() + (match["unit"] or "") * (role == "time") for role, match in roles.items()}
            self.read_as = ", ".join(f"{role} {text!r}" for role, text in texts.items() if role != "batch")
        time_s = self._time_s(found, step)
        self.numbers.append(step)
        self.times_s.append(math.nan if time_s is None else time_s)
        rate = _value(found["rate"]) if "rate" in found else None
        lr = _value(found["lr"]) if "lr" in found else None
        return [Reading(counted.start(), step, _value(found["loss"]), time_s, rate, lr, of=of), *val]

    def _step(self, counted: re.Match[str], epoch: re.Match[str] | None) -> tuple[int, int | None]:
        step, of = int(counted["value"]), int(counted["of"]) if counted["of"] else None
        if epoch is None or of is None or not re.fullmatch(INT, epoch["value"]):
            return step, of
        now = int(epoch["value"])
        if self.numbers and now > self.epoch >= 0 and step <= self.numbers[-1] - self.of_epochs:
            self.of_epochs += of * (now - self.epoch)
        self.epoch = now
        return step + self.of_epochs, None

    def _time_s(self, found: dict[str, re.Match[str]], step: int) -> float | None:
        if "time" in found and (time_s := _seconds(found["time"])) is not None:
            return time_s
        if "per_s" in found:
            return 1 / value if (value := _value(found["per_s"])) > 0 else math.nan
        if "elapsed" in found and (total_s := _seconds(found["elapsed"])) is not None:
            self.format = replace(self.format, step_time="difference", mean_times=True)
            return self.difference(step, total_s)
        return None

    def finish(self) -> Corrected:
        """Return times since the start as those of steps: they rise in every line, and to a multiple of the first."""
        known = [(step, s) for step, s in zip(self.numbers, self.times_s, strict=True) if math.isfinite(s)]
        since_start = len(known) == len(self.numbers) >= _ENOUGH and self.format.step_time == "printed"
        if not since_start or known[-1][1] < 2 * known[1][1] or any(a >= b for (_, a), (_, b) in pairwise(known)):
            return Corrected()
        self.format = replace(self.format, step_time="difference", mean_times=True)
        self.before = None
        return Corrected(self.numbers, array("d", (self.difference(*each) or math.nan for each in known)))

    def header(self) -> dict[str, str]:
        return {"read_as": self.read_as}


def _value(match: re.Match[str]) -> float:
    return number(match["value"], grouped_thousands="." not in match["value"])


def _seconds(match: re.Match[str]) -> float | None:
    """Return the time; None where neither its name nor what follows is a unit."""
    named = _UNIT_IN_NAME.search(match["name"]) if "name" in match.groupdict() else None
    unit = (named[1] or named[2] if named else match["unit"] or "").lower().partition("/")[0]
    return _value(match) * _SECONDS[unit] if unit in _SECONDS else None


FORMATS = (
    LogFormat(
        # step 500: train loss 3.9500, val loss 4.0500: nanoGPT's evaluations, or all that ng-video-lecture prints
        name="evaluations", title="evaluations as nanoGPT prints them", place=90, words=("train loss",), fallback=True,
        step_line=pattern(rf"(?<![a-z])step\s+(?P<step>{INT}):\s{{0,9}}train loss\s+(?P<loss>{NUMBER}),\s+val loss"),
        has_config=True, step_time="none",
    ),
    LogFormat(
        name="unknown", title="a program that is not known", place=91, reader=_Fields, fallback=True, printed=False,
        words=("loss", "Loss", "LOSS"), own_evaluations=True, counts_to_total=True,
    ),
)  # fmt: skip

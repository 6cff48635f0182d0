"""`read_log`: what a training log says, line by line and in little memory; of which programs, says log_formats.py."""

import errno
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.safe_read import open_stream
from foretrain.base.units import format_bytes
from foretrain.config.nanogpt_file import parse_expression
from foretrain.monitoring.log_formats import FORMATS, INT, NUMBER, LogFormat, pattern

EVALUATED, SAVED = 1, 2  # what happened inside the time of a step; nanoGPT alone times it with the step
MAX_STEPS = 2_000_000  # steps that are weighed; later ones are counted only, so that memory stays bounded
_MAX_LINE = 4096  # a longer line is read in pieces
_MOST_OF_A_LINE = 2**18  # characters; what a still longer one goes on with is passed over
MAX_CHARS, MAX_LINE_CHARS = 2**33, 2**29  # of a whole log, of one line: a pipe may have no end

_EVALUATION = pattern(
    rf"(?:(?<![a-z])step\s+(?P<step>{INT})(?::\s*train loss\s+{NUMBER},|\s*\|)\s*)?",
    rf"\bval(?:idation)?\s+(?:loss:?|bpb:)\s*(?P<val>{NUMBER})",
)
_SAVING = pattern(r"\bsaving checkpoint to\b")
_RANK = pattern(r"^\s*\[(?:rank|default)?(\d{1,5})\]")  # what torchrun and its --tee put before a line
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What nanoGPT's configurator.py prints: a config file as it is, and each option of the command line.
_CONFIG_FILE = re.compile(r"\bOverriding config with .{1,300}:\s*$")
_OVERRIDE = re.compile(r"\bOverriding: (\w{1,40}) = (.{1,80})$")
_ASSIGNMENT = re.compile(r"^([a-z]\w{0,39})\s*=\s*(\S.{0,199})$")
_MOST_SETTINGS = 500

# What a log says of its run before the first step. Each pattern has one group for each field.
_TENSORS = r"parameter tensors:\s*(\d{1,9}),\s*with\s*([\d,]{1,20}) parameters"
_HEADERS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("tokens_per_step",), pattern(rf"tokens per iteration will be:\s*({NUMBER})")),
    (("tokens_per_step",), pattern(rf"\btotal (?:desired )?batch size:?\s*(?:\|\s*)?({NUMBER})")),
    (("n_params_millions",), pattern(rf"number of parameters:\s*({NUMBER})\s*M\b")),
    (("n_params",), pattern(r"\bnum_parameters\s*\|\s*(\d{1,15})")),
    (("decayed_tensors", "decayed_params"), pattern("num decayed ", _TENSORS)),
    (("undecayed_tensors", "undecayed_params"), pattern("num non-decayed ", _TENSORS)),
    (("vocab_size",), pattern(r"(?:found vocab_size = |defaulting to vocab_size of GPT-2 to )(\d{1,9})")),
    (("gpu_name", "peak_flop_per_s"), pattern(rf"\bGPU:\s*([^|]{{1,60}}?)\s*\|\s*Peak FLOPS \(BF16\):\s*({NUMBER})")),
    (("gpu_name",), pattern(r"\|\s*device\s*\|\s*([^|]{1,60}?)\s*\|")),
)


class LogHeader(Record):
    """What the log says of its run; None where it does not. `n_params_millions` is nanoGPT's two decimals.

    `settings`: the config file and the options that nanoGPT prints, the later ones over the earlier.
    """

    tokens_per_step: int | None = None
    n_params_millions: float | None = None
    n_params: int | None = None
    decayed_tensors: int | None = None
    decayed_params: int | None = None
    undecayed_tensors: int | None = None
    undecayed_params: int | None = None
    vocab_size: int | None = None
    gpu_name: str | None = None
    peak_flop_per_s: float | None = None
    total_steps: int | None = None
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)


class Evaluation(Record):
    """One evaluation, at `step` or after it. `val_loss`: nats a token, of nanochat bits a byte; None: not finite."""

    step: int
    val_loss: float | None


@dataclass
class Steps:
    """The steps as columns, a number of bytes each. NaN: not printed, or not possible. `starts`: of each segment."""

    number: "array[int]" = field(default_factory=lambda: array("q"))
    time_s: "array[float]" = field(default_factory=lambda: array("d"))
    loss: "array[float]" = field(default_factory=lambda: array("d"))
    logged_mfu: "array[float]" = field(default_factory=lambda: array("d"))
    tokens_per_s: "array[float]" = field(default_factory=lambda: array("d"))
    happened: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.number)

    def segments(self) -> list[range]:
        """The indices of each segment: a run that was resumed, or started over, counts from a lower number again."""
        ends = [*self.starts[1:], len(self)]
        return [range(start, end) for start, end in zip(self.starts, ends, strict=True)]


@dataclass(frozen=True)
class TrainingLog:
    """A log that was read. `bad_times`: steps whose time cannot be; `uncounted`: steps beyond MAX_STEPS."""

    format: str
    header: LogHeader
    steps: Steps
    evaluations: tuple[Evaluation, ...]
    last_step: int
    bad_times: int = 0
    repeated: int = 0
    uncounted: int = 0
    earlier_runs: int = 0

    @property
    def program(self) -> LogFormat:
        """What is known of the program that printed it."""
        return FORMATS[self.format]


def number(text: str, *, grouped_thousands: bool = True) -> float:
    """The value of a printed number; NaN where it has none. A lone comma before three digits groups thousands."""
    if "," in text:
        head, _, tail = text.rpartition(",")
        grouping = "." in tail or "," in head or (grouped_thousands and len(tail) == 3)
        text = text.replace(",", "") if grouping else f"{head.replace('.', '')}.{tail}"
    try:
        value = float(text)
    except ValueError:  # such as 1.2.3
        return math.nan
    return value if math.isfinite(value) else math.nan


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _header_value(name: str, text: str) -> float | int | None:
    value = number(text.replace(",", "") if name.endswith("params") else text)
    if not 0 < value < 1e18:
        return None
    return value if name in ("n_params_millions", "peak_flop_per_s") else int(value)


class Reader:
    """Takes lines, one after the other; `steps` and `evaluations` are what was found so far."""

    def __init__(self) -> None:
        self.format: str | None = None
        self.header: dict[str, object] = {}
        self.settings: dict[str, bool | int | float | str] = {}
        self.in_config_file = False
        self.steps = Steps()
        self.evaluations: list[Evaluation] = []
        self.rank: str | None = None
        self.last_step = -1
        self.restarted = False
        self.happened: dict[int | None, int] = {}  # step or None -> what happened since the last step line
        self.bad_times = self.repeated = self.uncounted = self.earlier_runs = 0

    def line(self, line: str) -> None:
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        rank = _RANK.match(line)
        if rank:  # of several processes that print the same, the first one is believed
            self.rank = self.rank or rank[1]
            if rank[1] != self.rank:
                self.repeated += 1
                return
        # A line may hold several where processes write into each other; what is found keeps its order.
        found = [(m.start(), m, self._step) for m in self._step_matches(line)]
        if "val" in line or "Val" in line:
            found += [(m.start(), m, self._evaluation) for m in _EVALUATION.finditer(line)]
        for _, match, take in sorted(found, key=lambda one: one[0]) if len(found) > 1 else found:
            take(match)
        if not found:
            self._other(line)

    def _step_matches(self, line: str) -> Iterator[re.Match[str]]:
        if "ms" not in line:
            return
        for format in (self.format,) if self.format else FORMATS:
            for match in FORMATS[format].step_line.finditer(line):
                self.format = format
                yield match
            if self.format == format:
                return

    def _step(self, match: re.Match[str]) -> None:
        groups, steps = match.groupdict(), self.steps
        step = int(groups["step"])
        if step == self.last_step and not self.restarted:
            self.repeated += 1
            return
        starts = not len(steps) or step < self.last_step or self.restarted
        self.restarted, self.last_step = False, step
        if groups.get("of"):
            self.header["total_steps"] = int(groups["of"])
        inside = self.format is not None and FORMATS[self.format].times_evaluation
        happened = self.happened.get(step, 0) | self.happened.get(None, 0) if inside else 0
        self.happened.clear()
        if len(steps) >= MAX_STEPS:
            self.uncounted += 1
            return
        if starts:
            steps.starts.append(len(steps))
        time_s = number(groups["ms"]) / 1e3
        possible = 0 < time_s < 1e9
        self.bad_times += not possible
        mfu, rate = (number(groups.get(name) or "nan") for name in ("mfu", "rate"))
        steps.number.append(step)
        steps.time_s.append(time_s if possible else math.nan)
        steps.loss.append(number(groups["loss"], grouped_thousands=False))
        steps.logged_mfu.append(mfu / 100 if mfu > 0 else math.nan)  # -100 %: not known yet
        steps.tokens_per_s.append(rate if rate > 0 else math.nan)
        steps.happened.append(happened)

    def _evaluation(self, match: re.Match[str]) -> None:
        step = int(match["step"]) if match["step"] else None
        if step is not None and self.evaluations and self.evaluations[-1].step == step and step in self.happened:
            return  # another process says it too
        self.happened[step] = self.happened.get(step, 0) | EVALUATED
        if len(self.evaluations) < MAX_STEPS:
            loss = number(match["val"], grouped_thousands=False)
            at = max(0, self.last_step) if step is None else step
            self.evaluations.append(Evaluation(step=at, val_loss=loss if math.isfinite(loss) else None))

    def _other(self, line: str) -> None:
        if _SAVING.search(line):
            last = next(reversed(self.happened), None)  # nanoGPT saves right after it evaluated
            self.happened[last] = self.happened.get(last, 0) | SAVED
        for names, header in _HEADERS:
            match = header.search(line)
            if match:
                self._headers(dict(zip(names, match.groups(), strict=True)))
        self._setting(line.rstrip())

    def _setting(self, line: str) -> None:
        """What a line says of the config: an option, or a line of the file that is being printed."""
        override = _OVERRIDE.search(line)
        if override:
            self._set(override[1], override[2].strip())
        elif _CONFIG_FILE.search(line):
            self.in_config_file = True
        elif self.in_config_file and (found := _ASSIGNMENT.match(line.partition("#")[0].rstrip())):
            self._set(found[1], found[2])

    def _set(self, key: str, text: str) -> None:
        if len(self.steps) and not self.restarted:  # a run that was started again says its config anew
            self.restarted = True
            self.settings.clear()
        if len(self.settings) < _MOST_SETTINGS or key in self.settings:
            self.settings[key] = _plain(parse_expression(text, self.settings))

    def _headers(self, found: dict[str, str]) -> None:
        for name, text in found.items():
            value = text if name == "gpu_name" else _header_value(name, text)
            if value is None:
                continue
            self.in_config_file = False  # nanoGPT prints these figures after its config
            if len(self.steps):
                self.restarted = True
                if self.header.get(name, value) != value:  # another model or batch: another run begins
                    self._forget()
            self.header[name] = value

    def _forget(self) -> None:
        self.earlier_runs += 1
        self.steps, self.evaluations, self.last_step, self.restarted = Steps(), [], -1, False
        self.header.pop("total_steps", None)

    def done(self) -> TrainingLog | None:
        if self.format is None or not len(self.steps):
            return None
        header = LogHeader.model_validate({**self.header, "settings": self.settings})
        return TrainingLog(
            self.format, header, self.steps, tuple(self.evaluations), self.last_step, self.bad_times, self.repeated,
            self.uncounted, self.earlier_runs,
        )  # fmt: skip


def parse_log(lines: Iterable[str], name: str = "log") -> TrainingLog:
    """The log of these lines. Raises UserError where there is no step in them."""
    reader = Reader()
    count, binary = 0, False
    for line in lines:
        if count < 200 and not binary:
            binary = "\x00" in line
        count += bool(line.strip())
        reader.line(line)
    log = reader.done()
    if log is None:
        raise UserError("data.log_binary" if binary else "data.log_unknown" if count else "data.log_empty", path=name)
    return log


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Lines of text, whatever ends them (a progress bar ends them with \\r), in pieces of a bounded length."""
    head = stream.peek(4)[:4] if isinstance(stream, io.BufferedReader) else b""
    # What PowerShell writes with > is UTF-16.
    encoding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    with io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline=None) as text:
        total = of_line = 0
        while line := text.readline(_MAX_LINE if of_line < _MOST_OF_A_LINE else 2**20):
            total += len(line)
            if total > MAX_CHARS or of_line > MAX_LINE_CHARS:
                most = MAX_CHARS if total > MAX_CHARS else MAX_LINE_CHARS
                raise OSError(errno.EFBIG, f"it, or one line of it, is larger than {format_bytes(most)}")
            if of_line < _MOST_OF_A_LINE:
                yield line
            of_line = 0 if line.endswith("\n") else of_line + len(line)


def read_log(path: Path) -> TrainingLog:
    """The log in a file. Raises UserError for what is missing, unreadable or no log."""
    try:
        if path.is_dir():
            raise UserError("data.log_unreadable", path=str(path), reason="it is a folder")
        with open_stream(path) as stream:
            return parse_log(_lines(stream), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("data.log_unreadable", path=str(path), reason=reason) from None


def read_stream(stream: BinaryIO, name: str) -> TrainingLog:
    """The log that comes through a pipe. Raises UserError for what is not one, or has no end."""
    try:
        return parse_log(_lines(stream), name)
    except OSError as error:
        raise UserError("data.log_unreadable", path=name, reason=error.strerror or str(error)) from None

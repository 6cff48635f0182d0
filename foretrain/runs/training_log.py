"""`read_log`: a training log, read line by line in little memory; the programs are in formats/."""

import errno
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from foretrain.base.errors import UserError
from foretrain.base.files import open_stream
from foretrain.base.records import Record
from foretrain.base.units import format_bytes
from foretrain.config.nanogpt_file import parse_expression
from foretrain.runs.formats import FORMATS
from foretrain.runs.formats.log_format import (
    BYTES,
    INT,
    MEMORY,
    NUMBER,
    Header,
    LineReader,
    LogFormat,
    Reading,
    number,
    pattern,
)

EVALUATED, SAVED = 1, 2  # inside the time of a step; only nanoGPT times it with the step
MAX_STEPS = 2_000_000  # steps that are stored; later ones are only counted, so that memory stays bounded
_MAX_LINE = 2**14  # a longer line is read in pieces
_MOST_OF_A_LINE = 2**18  # characters; the rest of a longer one is skipped
MAX_CHARS, MAX_LINE_CHARS = 2**33, 2**29  # of a whole log, of one line: a pipe may have no end

_EVALUATION = pattern(
    rf"(?:(?<![a-z])step\s+(?P<step>{INT})(?::\s*train loss\s+{NUMBER},|\s*\|)\s*)?",
    rf"\bval(?:idation)?\s+(?:loss:?|bpb:)\s*(?P<val>{NUMBER})",
)
_SAVING = pattern(r"\bsaving checkpoint to\b")
_RANK = pattern(r"^\s*\[(?:rank|default)?(\d{1,5})\]")  # torchrun and its --tee put it before a line
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# nanoGPT's configurator.py prints a config file as it is, and each option of the command line.
_CONFIG_FILE = re.compile(r"\bOverriding config with .{1,300}:\s*$")
_OVERRIDE = re.compile(r"\bOverriding: (\w{1,40}) = (.{1,80})$")
_ASSIGNMENT = re.compile(r"^([a-z]\w{0,39})\s*=\s*(\S.{0,199})$")
_MOST_SETTINGS = 500


# What a log tells of its run before the first step. Each pattern has a group for each field.
def _tensors(which: str) -> re.Pattern[str]:
    groups = rf"(?P<{which}ed_tensors>\d{{1,9}}),\s*with\s*(?P<{which}ed_params>[\d,]{{1,20}}) parameters"
    return pattern(rf"num {'non-' if which == 'undecay' else ''}decayed parameter tensors:\s*{groups}")


_HEADERS = (
    Header("tokens per iteration", pattern(rf"tokens per iteration will be:\s*(?P<tokens_per_step>{NUMBER})")),
    Header("batch size", pattern(rf"\btotal (?:desired )?batch size:?\s*(?:\|\s*)?(?P<tokens_per_step>{NUMBER})")),
    Header("number of parameters", pattern(rf"number of parameters:\s*(?P<n_params_millions>{NUMBER})\s*M\b")),
    Header("num_parameters", pattern(r"\bnum_parameters\s*\|\s*(?P<n_params>\d{1,15})")),
    Header("num decayed", _tensors("decay")),
    Header("num non-decayed", _tensors("undecay")),
    Header(
        "vocab_size", pattern(r"(?:found vocab_size = |defaulting to vocab_size of GPT-2 to )(?P<vocab_size>\d{1,9})")
    ),
    Header(
        "peak flops",
        pattern(rf"\bGPU:\s*(?P<gpu_name>[^|]{{1,60}}?)\s*\|\s*Peak FLOPS \(BF16\):\s*(?P<peak_flop_per_s>{NUMBER})"),
    ),
    Header("device", pattern(r"\|\s*device\s*\|\s*(?P<gpu_name>[^|]{1,60}?)\s*\|")),
)
# before the program is known, most lines have none of them
_ANY_WORD = re.compile("|".join(sorted({re.escape(word) for format in FORMATS.values() for word in format.words})))
_ALL_HEADERS = _HEADERS + tuple(dict.fromkeys(header for format in FORMATS.values() for header in format.headers))


class LogHeader(Record):
    """The log's figures of its run; None where absent. `n_params_millions` is nanoGPT's two decimals.

    `settings`: the config file and options that nanoGPT prints. Memory peaks are the highest printed: held by tensors
    (allocated), in use at once (active), held by the allocator (reserved), in use on the card by all (device). `run_s`:
    the whole training, of `run_steps`.
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
    allocated_peak_bytes: int | None = None
    active_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    run_s: float | None = None
    run_steps: int | None = None
    read_as: str | None = None
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)


class Evaluation(Record):
    """One evaluation, at `step` or after it. `val_loss`: nats per token (nanochat: bits per byte); None: not finite."""

    step: int
    val_loss: float | None


@dataclass
class Steps:
    """The steps as columns. NaN: not printed, or impossible; `lost`: 1 where a loss is not a number."""

    number: "array[int]" = field(default_factory=lambda: array("q"))
    time_s: "array[float]" = field(default_factory=lambda: array("d"))
    loss: "array[float]" = field(default_factory=lambda: array("d"))
    logged_mfu: "array[float]" = field(default_factory=lambda: array("d"))
    tokens_per_s: "array[float]" = field(default_factory=lambda: array("d"))
    learning_rate: "array[float]" = field(default_factory=lambda: array("d"))
    happened: bytearray = field(default_factory=bytearray)
    lost: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.number)

    def segments(self) -> list[range]:
        """Return the indices of each segment: a resumed or restarted run counts from a lower number."""
        ends = [*self.starts[1:], len(self)]
        return [range(start, end) for start, end in zip(self.starts, ends, strict=True)]

    def in_order(self) -> "Steps":
        """Return the steps as they ran where the newest line stands first: each step begins a segment."""
        if len(self) < 3 or len(self.starts) < len(self) or len({*self.number}) < len(self):
            return self
        columns = {each.name: getattr(self, each.name)[::-1] for each in fields(self)}
        return replace(self, **{**columns, "starts": [0]})


@dataclass(frozen=True)
class TrainingLog:
    """A log that was read. `bad_times`: steps whose time is impossible; `uncounted`: steps beyond MAX_STEPS."""

    program: LogFormat
    header: LogHeader
    steps: Steps
    evaluations: tuple[Evaluation, ...]
    last_step: int
    bad_times: int = 0
    repeated: int = 0
    uncounted: int = 0
    earlier_runs: int = 0
    unnumbered: bool = False

    @property
    def times(self) -> bool:
        return self.bad_times > 0 or any(math.isfinite(time_s) for time_s in self.steps.time_s)

    @property
    def format(self) -> str:
        return self.program.name


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _header_value(name: str, text: str) -> float | int | None:
    value = number(text.replace(",", "") if name.endswith("params") else text)
    if not 0 < value < 1e18:
        return None
    return value if name in ("n_params_millions", "peak_flop_per_s") else int(value)


class Reader:
    def __init__(self, fallback: LogFormat | None = None) -> None:
        formats = [fallback] if fallback else [format for format in FORMATS.values() if not format.fallback]
        self.others = [] if fallback else [Reader(format) for format in FORMATS.values() if format.fallback]
        self.lines: LineReader | None = None  # of the program that printed the log
        self.looking: list[LineReader] = [format.new_reader() for format in formats]
        self.searching = all(lines.words for lines in self.looking)  # whether each of them looks for a word
        self.headers: tuple[Header, ...] = _ALL_HEADERS
        self.header: dict[str, object] = {}
        self.settings: dict[str, bool | int | float | str] = {}
        self.in_config_file = False
        self.steps = Steps()
        self.evaluations: list[Evaluation] = []
        self.rank: str | None = None
        self.last_step = -1
        self.restarted = self.unnumbered = False
        self.happened: dict[int | None, int] = {}  # step or None -> what happened since the last step line
        self.bad_times = self.repeated = self.uncounted = self.earlier_runs = 0

    @property
    def format(self) -> str | None:
        return self.lines.format.name if self.lines else None

    @property
    def per_gpu(self) -> bool:
        return self.lines is not None and self.lines.format.rate_per_gpu

    def line(self, line: str) -> None:
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        rank = _RANK.match(line) if "[" in line else None
        if rank:  # of several processes that print the same, the first one is believed
            self.rank = self.rank or rank[1]
            if rank[1] != self.rank:
                self.repeated += 1
                return
        # A line may hold several where processes write into each other; readings keep its order.
        found = self._readings(line)
        for other in self.others:
            other.line(line)
        if ("val" in line or "Val" in line) and not (self.lines and self.lines.format.own_evaluations):
            found = found + [_evaluation(match) for match in _EVALUATION.finditer(line)]
        self._add(found)
        if not found:
            self._other(line)

    def _add(self, found: list[Reading]) -> None:
        for reading in sorted(found, key=lambda one: one.at) if len(found) > 1 else found:
            if reading.evaluated:
                self._evaluation(reading)
            else:
                self._step(reading)

    def _readings(self, line: str) -> list[Reading]:
        if self.lines is not None:
            return self.lines.read(line) if _worth_a_look(line, self.lines.words) else []
        if self.searching and not _ANY_WORD.search(line):
            return []
        for lines in self.looking:
            found = lines.read(line) if _worth_a_look(line, lines.words) else []
            self.searching = self.searching and bool(lines.words)
            if found:
                self._choose(lines)
                return found
        return []

    def _choose(self, lines: LineReader) -> None:
        self.lines, self.looking, self.others = lines, [], []
        self.headers = _HEADERS + lines.format.headers
        if lines.format.own_evaluations:
            self.evaluations, self.happened = [], {}

    def _step(self, reading: Reading) -> None:
        steps = self.steps
        step = reading.step
        if step is None:
            self.unnumbered = True
            step = 1 if reading.restarts else max(0, self.last_step) + 1
        elif step == self.last_step and not self.restarted:
            self.repeated += 1
            return
        starts = not len(steps) or step < self.last_step or self.restarted or reading.restarts
        self.restarted, self.last_step = False, step
        if reading.of:
            self.header["total_steps"] = reading.of
        for kind, size in (reading.memory_bytes or {}).items():
            self._peak(kind, size)
        format = self.lines.format if self.lines else None
        inside = format is not None and format.times_evaluation
        happened = self.happened.get(step, 0) | self.happened.get(None, 0) if inside else 0
        if format and inside and format.own_evaluations:
            happened = max((*self.happened.values(), 0))  # these evaluate after a step, and so within the next one
        self.happened.clear()
        if len(steps) >= MAX_STEPS:
            self.uncounted += 1
            return
        if starts:
            steps.starts.append(len(steps))
        _append(steps, step, reading, happened)
        self.bad_times += reading.step_s is not None and math.isnan(steps.time_s[-1])

    def _evaluation(self, reading: Reading) -> None:
        step = reading.step
        if step is not None and self.evaluations and self.evaluations[-1].step == step and step in self.happened:
            return  # another process prints it too
        self.happened[step] = self.happened.get(step, 0) | EVALUATED
        if len(self.evaluations) < MAX_STEPS:
            loss = reading.val_loss
            at = max(0, self.last_step) if step is None else step
            self.evaluations.append(Evaluation(step=at, val_loss=loss if math.isfinite(loss) else None))

    def _peak(self, kind: str, size: int) -> None:
        name = f"{kind}_peak_bytes"
        known = self.header.get(name)
        self.header[name] = max(size, known) if isinstance(known, int) else size

    def _other(self, line: str) -> None:
        lower = line.lower()
        if "saving checkpoint to" in lower and _SAVING.search(line):
            last = next(reversed(self.happened), None)  # nanoGPT saves right after an evaluation
            self.happened[last] = self.happened.get(last, 0) | SAVED
        for word, header in self.headers:
            match = header.search(line) if word in lower else None
            if match:
                self._headers({name: text for name, text in match.groupdict().items() if text is not None})
        if "Overriding" in line or self.in_config_file:
            self._setting(line.rstrip())

    def _setting(self, line: str) -> None:
        override = _OVERRIDE.search(line)
        if override:
            self._set(override[1], override[2].strip())
        elif _CONFIG_FILE.search(line):
            self.in_config_file = True
        elif self.in_config_file and (found := _ASSIGNMENT.match(line.partition("#")[0].rstrip())):
            self._set(found[1], found[2])

    def _set(self, key: str, text: str) -> None:
        if len(self.steps) and not self.restarted:  # a restarted run prints its config again
            self.restarted = True
            self.settings.clear()
        if len(self.settings) < _MOST_SETTINGS or key in self.settings:
            self.settings[key] = _plain(parse_expression(text, self.settings))

    def _headers(self, found: dict[str, str]) -> None:
        if {"sequences", "seq_len"} <= found.keys():
            tokens = int(found.pop("sequences")) * int(found.pop("seq_len"))
            found = {**found, "tokens_per_step": str(tokens)}
        for name, text in found.items():
            kind, _, unit = name.rpartition("_")
            if kind in MEMORY and unit in BYTES:
                size = number(text) * BYTES[unit]
                if 0 < size < 2**60:
                    self._peak(kind, round(size))
                continue
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
        for lines in [self.lines] if self.lines else self.looking:
            if found := lines.flush():
                self._choose(lines)
                self._add(found)
                break
        if self.lines is None or not len(self.steps):
            # Of unknown lines with evaluations the longest reading; a progress bar where neither has any.
            logs = [
                log for other in self.others if (log := other.done()) and len(log.steps) > (log.format == "unknown")
            ]
            texts = [log for log in logs if log.program.step_time != "bar"]
            return max(texts or logs, key=lambda log: len(log.steps), default=None)
        found = self._corrected(self.lines)
        steps = found.in_order()
        if steps is not found:
            self.last_step = steps.number[-1]
            self.evaluations.reverse()
        header = {**self.header, **self.lines.header(), "settings": self.settings}
        return TrainingLog(
            self.lines.format, LogHeader.model_validate(header), steps, tuple(self.evaluations), self.last_step,
            self.bad_times, self.repeated, self.uncounted, self.earlier_runs, self.unnumbered,
        )  # fmt: skip

    def _corrected(self, lines: LineReader) -> Steps:
        """Return the steps with numbers and times that only the whole log tells; evaluations move with them."""
        numbers, times_s = lines.finish()
        steps = self.steps
        if numbers is None or len(numbers) != len(steps):
            return steps
        at = dict(zip(steps.number, numbers, strict=True)) if self.unnumbered and len(steps.starts) == 1 else {}
        self.evaluations = [one.model_copy(update={"step": at.get(one.step, one.step)}) for one in self.evaluations]
        self.unnumbered, self.last_step = False, numbers[-1]
        return replace(steps, number=numbers, time_s=steps.time_s if times_s is None else times_s)


def _worth_a_look(line: str, words: tuple[str, ...]) -> bool:
    for word in words:
        if word in line:
            return True
    return not words


def _append(steps: Steps, step: int, reading: Reading, happened: int) -> None:
    time_s, mfu, rate = (math.nan if v is None else v for v in (reading.step_s, reading.mfu, reading.tokens_per_s))
    loss, lr = (math.nan if value is None else value for value in (reading.loss, reading.learning_rate))
    steps.number.append(step)
    steps.time_s.append(time_s if 0 < time_s < 1e9 else math.nan)
    steps.loss.append(loss)
    steps.logged_mfu.append(mfu if mfu > 0 else math.nan)  # -100%: not known yet
    steps.tokens_per_s.append(rate if rate > 0 else math.nan)
    steps.learning_rate.append(lr)
    steps.happened.append(happened)
    steps.lost.append(reading.loss is not None and not math.isfinite(loss))


def _evaluation(match: re.Match[str]) -> Reading:
    step = int(match["step"]) if match["step"] else None
    loss = number(match["val"], grouped_thousands=False)
    return Reading(match.start(), step, evaluated=True, val_loss=loss)


def parse_log(lines: Iterable[str], name: str = "log") -> TrainingLog:
    """Read these lines. Raises UserError where there is no step in them."""
    reader = Reader()
    count, binary = 0, False
    for line in lines:
        if count < 200 and not binary:
            binary = "\x00" in line
        if line.isspace():
            continue
        count += 1
        reader.line(line)
    log = reader.done()
    if log is None:
        if count and not binary:
            raise UserError("data.log_unknown", path=name, count=sum(one.printed for one in FORMATS.values()))
        raise UserError("data.log_binary" if binary else "data.log_empty", path=name)
    return log


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Yield lines of text in pieces of a bounded length, whatever ends them."""
    head = stream.peek(4)[:4] if isinstance(stream, io.BufferedReader) else b""
    # PowerShell's > writes UTF-16.
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
    try:
        if path.is_dir():
            raise UserError("data.log_unreadable", path=str(path), reason="it is a folder")
        with open_stream(path) as stream:
            return parse_log(_lines(stream), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("data.log_unreadable", path=str(path), reason=reason) from None


def read_stream(stream: BinaryIO, name: str) -> TrainingLog:
    try:
        return parse_log(_lines(stream), name)
    except OSError as error:
        raise UserError("data.log_unreadable", path=name, reason=error.strerror or str(error)) from None

"""`watch`: somebody else's training, measured from outside. A driver that hangs keeps back samples, not the command."""

import codecs
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, BinaryIO, Literal

from foretrain.base import process_memory
from foretrain.base.bugs import redacted
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.hardware.card import Cards, CardSample
from foretrain.runs.folder import RunDirectory, now
from foretrain.runs.record import LOG, WatchedCard, WatchedRun
from foretrain.runs.training_log import Reader, Steps

# Where our output is a terminal the command gets a pseudo-terminal of the same size, so that its colours, progress bars
# and line buffering stay; elsewhere a pipe. Its input is our own. It has a process group of its own, so that a signal
# reaches it once: from the terminal where that is its input, else from us.

if sys.platform != "win32":
    import pty
    import termios

POSIX = os.name == "posix"
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
POLL_S = 0.05
DRAIN_S = 0.5  # how long after the command's end what it has started may still write
_CHUNK, _WAITING = 1 << 16, 64

Sink = Callable[[int, bytes], None]


class CommandStart(Exception):
    """The command cannot start; the text says why, as the end of a sentence."""


class Ended:
    """How a command ended, and what it and its children used of the processors; None where the system does not say."""

    def __init__(self, code: int, rusage: Any = None) -> None:
        self.signal = -code if code < 0 else 0
        self.code = 128 - code if code < 0 else code
        self.rusage = rusage


class _Stream:
    """One stream of the command's output, which a thread of its own passes on to ours, and to `told` afterwards."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target

    def begin(self, printed: "queue.Queue[tuple[int, bytes]]") -> None:
        """Start; an empty piece is the end."""
        threading.Thread(target=self._run, args=(printed,), daemon=True).start()

    def _run(self, printed: "queue.Queue[tuple[int, bytes]]") -> None:
        with contextlib.suppress(OSError):  # a pseudo-terminal ends with EIO
            while data := os.read(self.source, _CHUNK):
                heard = self._pass_on(data)
                printed.put((self.target, data))
                if not heard:  # the command learns it by its next write, as it would be without us
                    break
        os.close(self.source)
        printed.put((self.target, b""))

    def _pass_on(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.target, view) :]
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                return False
        return True


class Passthrough:
    """One command, started at once. `run` returns when it has ended. Raises CommandStart."""

    def __init__(self, command: Sequence[str], *, out: int = 1, err: int = 2) -> None:
        self._terminal: int | None = None
        self._early: list[int] = []  # signals that came before the command was there
        self._pid = 0
        self._masters: dict[int, int] = {}  # our terminal -> the pseudo-terminal that stands for it
        environment = dict(os.environ)
        targets = self._targets(out, err)
        if not all(target in self._masters for target, _ in targets):
            environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would keep lines back, and lose them with a crash
        self.streams = [_Stream(read, target) for target, (read, _) in targets]
        ends = [write for _, (_, write) in targets]
        options: dict[str, Any] = {"process_group": 0} if POSIX else {}
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(self._forwarding())
        try:
            self.child = subprocess.Popen(
                list(command), stdout=ends[0], stderr=ends[-1], env=environment, close_fds=True, **options
            )
        except (OSError, ValueError) as error:
            self._signals.close()
            for stream in self.streams:
                os.close(stream.source)
            raise CommandStart(getattr(error, "strerror", None) or str(error)) from None
        finally:
            for end in ends:
                os.close(end)
        self._pid = self.child.pid
        self._give_terminal()
        for number in self._early:
            self._send(number)

    @property
    def pid(self) -> int:
        return self._pid

    def _targets(self, out: int, err: int) -> list[tuple[int, tuple[int, int]]]:
        """Return [(our descriptor, (end to read, end for the command))]; one where both of ours are one terminal."""
        same = os.isatty(out) and os.isatty(err) and os.path.samestat(os.fstat(out), os.fstat(err))
        return [(target, self._pair(target)) for target in ((out,) if same else (out, err))]

    def _pair(self, target: int) -> tuple[int, int]:
        if not (POSIX and os.isatty(target)):
            return os.pipe()
        master, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST  # our terminal does to the output what has to be done, once
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self._masters[target] = master
        self._resize()
        return master, slave

    def _resize(self) -> None:
        for terminal, master in self._masters.items():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetwinsize(master, termios.tcgetwinsize(terminal))

    def _give_terminal(self) -> None:
        with contextlib.suppress(OSError, AttributeError, ValueError):
            if POSIX and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                self._terminal = 0
                os.tcsetpgrp(0, self.pid)
                os.killpg(self.pid, signal.SIGCONT)  # it may have asked for input before

    def _take_terminal(self) -> None:
        if self._terminal is None:
            return
        old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # we are in the background as long as it is not ours
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self._terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, old)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        old: dict[int, Any] = {}

        def forward(number: int, frame: Any) -> None:
            if self._pid:
                self._send(number)
            else:
                self._early.append(number)

        if threading.current_thread() is not threading.main_thread():  # only that one can have handlers
            yield
            return
        for name in FORWARDED:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, forward)
        if hasattr(signal, "SIGWINCH"):
            old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._resize())
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _send(self, number: int) -> None:
        if POSIX:  # Windows gives Ctrl-C to every process of the console by itself
            with contextlib.suppress(OSError):
                os.killpg(self._pid, number)

    def run(self, sink: Sink, tick: Callable[[], None] = lambda: None) -> Ended:
        """Pass everything on to the command's end. `sink` hears (our descriptor, bytes) of each piece after it was
        passed on; `tick` is called a few times a second."""
        printed: queue.Queue[tuple[int, bytes]] = queue.Queue(_WAITING)
        ended: Ended | None = None
        open_streams, quiet_since_s = len(self.streams), 0.0
        with self._signals:
            for stream in self.streams:
                stream.begin(printed)
            while ended is None or (open_streams and time.monotonic() - quiet_since_s < DRAIN_S):
                with contextlib.suppress(queue.Empty):
                    target, data = printed.get(timeout=POLL_S)
                    quiet_since_s = time.monotonic()
                    open_streams -= not data
                    if data:
                        sink(target, data)
                if ended is None:
                    ended = self._look()
                    quiet_since_s = time.monotonic()
                tick()
        self._take_terminal()
        return ended

    def _look(self) -> Ended | None:
        """Return how the command ended, if it has; when it was stopped from the terminal, so are we."""
        if not POSIX:
            code = self.child.poll()
            return None if code is None else Ended(code)
        pid, status, rusage = os.wait4(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self._stop_too()
            return None
        self.child.returncode = os.waitstatus_to_exitcode(status)
        return Ended(self.child.returncode, rusage)

    def _stop_too(self) -> None:
        if self._terminal is None:
            return
        self._take_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self._terminal, self.pid)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGCONT)


MAX_LOG_BYTES = 512 * 2**20
MAX_LINE_CHARS = 4096
DENSE_SAMPLES = 3600  # so many at the interval are kept, then fewer and fewer
_WAIT_FOR_SAMPLER_S = 2.0


class _CardSums:
    def __init__(self, before: CardSample | None) -> None:
        self.before = before
        self.used_peak = self.ours_peak = self.others_peak = 0
        self.busy: list[float] = [0.0, 0]  # sum, count; of samples with work on the card
        self.clock, self.power = [0.0, 0], [0.0, 0]
        self.clock_max = 0.0
        self.temperature_max: int | None = None
        self.reasons: Counter[str] = Counter()
        self.energy: list[float] = []  # the counter, first and last
        self.power_j = 0.0
        self.last_s: float | None = None
        self.by: Literal["processes", "rise", "nothing"] = "nothing"

    def add(self, sample: CardSample, at_s: float) -> None:
        if sample.empty:
            return
        used = sample.used_bytes
        if used is not None:
            ours = self._ours(sample, used)
            self.used_peak = max(self.used_peak, used)
            self.ours_peak = max(self.ours_peak, ours)
            self.others_peak = max(self.others_peak, used - ours)
        if sample.busy:
            for sums, value in ((self.busy, sample.busy), (self.clock, sample.clock_ghz), (self.power, sample.power_w)):
                if value is not None:
                    sums[0] += value
                    sums[1] += 1
            self.reasons.update(sample.reasons)
        self.clock_max = max(self.clock_max, sample.clock_ghz or 0.0)
        if sample.temperature_c is not None:
            self.temperature_max = max(self.temperature_max or 0, sample.temperature_c)
        if sample.energy_j is not None:
            self.energy = [self.energy[0] if self.energy else sample.energy_j, sample.energy_j]
        if self.last_s is not None and sample.power_w is not None:
            self.power_j += sample.power_w * (at_s - self.last_s)
        self.last_s = at_s

    def _ours(self, sample: CardSample, used: int) -> int:
        """Count by NVML's processes as soon as they have shown ours once, else what is in use beyond the beginning."""
        if sample.ours_bytes and self.by != "processes":
            self.by, self.ours_peak, self.others_peak = "processes", 0, 0
        if self.by == "processes":
            return min(used, sample.ours_bytes or 0)
        if self.before is None or self.before.used_bytes is None:
            return 0
        self.by = "rise"
        return max(0, used - self.before.used_bytes)

    def result(self, facts: Any) -> WatchedCard:
        def mean(sums: list[float]) -> float | None:
            return sums[0] / sums[1] if sums[1] else None

        counted = self.energy[1] - self.energy[0] if self.energy else None
        energy_by = "counter" if counted else "power" if self.power_j else "nothing"
        known = self.by != "nothing"
        return WatchedCard(
            index=facts.index, name=facts.name, driver=facts.driver, total_bytes=facts.total_bytes,
            before_bytes=self.before.used_bytes if self.before else None, used_peak_bytes=self.used_peak or None,
            ours_peak_bytes=self.ours_peak if known else None,
            used_by_others_peak_bytes=self.others_peak if known else None,
            by=self.by, busy=mean(self.busy), clock_ghz=mean(self.clock), clock_max_ghz=self.clock_max or None,
            power_w=mean(self.power), energy_j=counted or self.power_j or None, energy_by=energy_by,
            temperature_max_c=self.temperature_max,
            reasons={name: count / self.busy[1] for name, count in self.reasons.items()} if self.busy[1] else {},
        )  # fmt: skip


class Sampler(threading.Thread):
    def __init__(self, directory: RunDirectory, cards: Cards, interval_s: float) -> None:
        super().__init__(daemon=True)
        self.directory, self.cards, self.interval_s = directory, cards, interval_s
        self.pid = 0
        self.count = 0
        self.spent_s = self.cpu_s = 0.0
        self.rss_peak_bytes = self.processes = 0
        self.problem = ""
        before = cards.sample(())
        self.sums = [_CardSums(sample) for sample in before]
        self.began_s = time.monotonic()
        self._written_s = -math.inf
        self._ending = threading.Event()

    def begin(self, pid: int) -> None:
        self.pid, self.began_s = pid, time.monotonic()
        self.start()

    def end(self) -> None:
        self._ending.set()
        self.join(_WAIT_FOR_SAMPLER_S)
        if self.is_alive():
            self.problem = "NVML did not answer any more"

    def run(self) -> None:
        while True:
            before = time.thread_time()
            try:
                self._sample()
            except Exception as error:  # no figure is worth a traceback in somebody else's output
                self.problem = f"{type(error).__name__}: {error}"
                return
            self.spent_s += time.thread_time() - before
            if self._ending.wait(self.interval_s):
                return

    def _sample(self) -> None:
        at_s = time.monotonic() - self.began_s
        tree = process_memory.sample_tree(self.pid)
        samples = self.cards.sample(tree.pids if tree else (self.pid,))
        self.count += 1
        if tree is not None:
            self.cpu_s = max(self.cpu_s, tree.cpu_s)
            self.rss_peak_bytes = max(self.rss_peak_bytes, tree.rss_bytes)
            self.processes = max(self.processes, len(tree.pids))
        for sums, sample in zip(self.sums, samples, strict=False):
            sums.add(sample, at_s)
        if at_s - self._written_s >= max(0.0, at_s / DENSE_SAMPLES):
            self._written_s = at_s
            line = {
                "elapsed_s": round(at_s, 3), "cpu_s": tree.cpu_s if tree else None,
                "rss_bytes": tree.rss_bytes if tree else None, "processes": len(tree.pids) if tree else None,
                "cards": [sample.to_json() for sample in samples],
            }  # fmt: skip
            try:
                self.directory.append("samples", line)
            except OSError as error:
                self.problem = error.strerror or str(error)


class _Output:
    """What the command writes: kept as a file, and read line by line for steps and evaluations."""

    def __init__(self, directory: RunDirectory, file: BinaryIO) -> None:
        self.directory, self.file = directory, file
        self.reader = Reader()
        self.began_s = time.monotonic()
        self.bytes = self.kept_bytes = 0
        self.problem = ""
        self._decoders: dict[int, Any] = {}
        self._parts: dict[int, str] = {}
        self._steps = self._evaluations = 0

    def take(self, stream: int, data: bytes) -> None:
        self.bytes += len(data)
        if not self.problem and self.kept_bytes + len(data) <= MAX_LOG_BYTES:
            try:
                self.file.write(data)
                self.kept_bytes += len(data)
            except OSError as error:  # a full disk must not end somebody's training
                self.problem = error.strerror or str(error)
        try:
            self._read(stream, data)
        except Exception as error:  # whatever this makes of the output, the command goes on
            self.problem = f"{type(error).__name__}: {error}"

    def _read(self, stream: int, data: bytes) -> None:
        decoder = self._decoders.setdefault(stream, codecs.getincrementaldecoder("utf-8")("replace"))
        text = self._parts.get(stream, "") + decoder.decode(data)
        *lines, rest = text.replace("\r", "\n").split("\n")
        self._parts[stream] = rest[-MAX_LINE_CHARS:]
        for line in lines:
            self._line(line)

    def finish(self) -> None:
        for rest in self._parts.values():
            self._line(rest)
        self._parts.clear()

    def _line(self, line: str) -> None:
        for start in range(0, len(line), MAX_LINE_CHARS):
            self.reader.line(line[start : start + MAX_LINE_CHARS])
        steps, evaluations = self.reader.steps, self.reader.evaluations
        if len(steps) < self._steps or len(evaluations) < self._evaluations:  # another run began in the same output
            self._steps, self._evaluations = 0, 0
        elapsed_s = round(time.monotonic() - self.began_s, 3)
        rate = "tokens_per_gpu_s" if self.reader.per_gpu else "tokens_per_s"
        for i in range(self._steps, len(steps)):
            values = {
                "loss": steps.loss[i], "step_s": steps.time_s[i], rate: steps.tokens_per_s[i],
                "learning_rate": steps.learning_rate[i],
            }  # fmt: skip
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            number = None if self.reader.unnumbered else steps.number[i]
            self._metric({"kind": "step", "step": number, **finite, "elapsed_s": elapsed_s})
        for found in evaluations[self._evaluations :]:
            at = None if self.reader.unnumbered else found.step
            line_of = {"kind": "evaluation", "step": at, "val_loss": found.val_loss, "elapsed_s": elapsed_s}
            self._metric(line_of)
        self._steps, self._evaluations = len(steps), len(evaluations)

    def _metric(self, line: dict[str, Any]) -> None:
        try:
            self.directory.append("metrics", json.loads(json.dumps(line)))
        except OSError as error:
            self.problem = error.strerror or str(error)


def watch(
    command: Sequence[str], directory: RunDirectory, *, interval_s: float = 1.0, config: RunConfig | None = None,
    nvml: Any = None, out: int = 1, err: int = 2,
) -> WatchedRun:  # fmt: skip
    """Run a command and measure it. `out` and `err` are the descriptors that its output goes on to; the caller holds
    the directory's lock. Raises UserError 'environment.cannot_start'; what was made is the caller's to remove then."""
    cards, shown = Cards(nvml), redacted(command)
    sampler = Sampler(directory, cards, interval_s)
    record = WatchedRun(
        id=directory.id, name=" ".join(shown)[:80] or directory.id, command=shown, status="running", started_at=now(),
        interval_s=interval_s, config=config,
    )  # fmt: skip
    with (directory.path / LOG).open("wb", buffering=0) as file:
        output = _Output(directory, file)
        try:
            child = Passthrough(command, out=out, err=err)
        except CommandStart as error:
            raise UserError("environment.cannot_start", command=str(command[0]), reason=str(error)) from None
        directory.write_record(record)
        directory.tell("running", pid=child.pid)
        began_s = output.began_s = time.monotonic()
        sampler.begin(child.pid)
        ended = child.run(output.take)
        wall_s = time.monotonic() - began_s
        sampler.end()
        output.finish()
    record = _result(record, ended, wall_s, sampler, output)
    directory.write_record(record)
    return record


def _result(record: WatchedRun, ended: Ended, wall_s: float, sampler: Sampler, output: _Output) -> WatchedRun:
    log = output.reader.done()
    steps, evaluations = (log.steps, log.evaluations) if log else (Steps(), ())
    times = [t for t in steps.time_s if math.isfinite(t)]
    losses = [loss for loss in steps.loss[-1:] if math.isfinite(loss)]
    used = ended.rusage
    cpu_s = max(sampler.cpu_s, used.ru_utime + used.ru_stime if used is not None else 0.0)
    return record.model_copy(
        update={
            "status": "stopped" if ended.signal else "finished" if ended.code == 0 else "failed",
            "exit_code": ended.code, "signal": signal.Signals(ended.signal).name if ended.signal else "",
            "ended_at": now(), "wall_s": wall_s, "samples": sampler.count, "sampling_s": sampler.spent_s,
            "cpu_s": cpu_s or None, "rss_peak_bytes": sampler.rss_peak_bytes or None,
            "processes": sampler.processes,
            "cards": tuple(s.result(f) for s, f in zip(sampler.sums, sampler.cards.facts, strict=False)),
            "nvml_problem": sampler.problem or sampler.cards.problem or output.problem,
            "log_format": output.reader.format, "log_bytes": output.bytes, "log_kept_bytes": output.kept_bytes,
            "steps_done": len(steps), "last_step": log.last_step if log else None,
            "step_s": median(times) if times else None, "last_loss": losses[0] if losses else None,
            "val_loss": evaluations[-1].val_loss if evaluations else None,
        }
    )  # fmt: skip

"""A run is a directory, whose process holds `run.lock`, so "running" without a lock means a killed run. No torch."""

import contextlib
import glob
import json
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

from foretrain.base.errors import UserError
from foretrain.base.files import append_lines, read_bytes, read_text, refuse_links, replace_text
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.config.resolve import to_toml
from foretrain.runs import record as run_record
from foretrain.runs.record import RECORD, SCHEMA, SCORES_SCHEMA, RunRecord, Scores, TrainedRun, TrainerRun
from foretrain.runs.state import NOW_FILE as NOW
from foretrain.runs.state import Phase, Teller

# Reasons after which a new process can resume by itself: a lost card or rank, and one that takes less memory.
BEGIN_AGAIN = (
    "environment.card_failed", "environment.ranks_lost", "environment.rank_late", "environment.collective_failed",
    "memory.optimizer_step", "memory.others_wait",
)  # fmt: skip
SCORES = "scores"  # results of `foretrain eval`, one file per checkpoint
WRITTEN_ONCE = ("config.toml", "environment.json", "plan.json")  # before the first step
MOST_WAITING = 10_000  # lines of a log that the disk refused
# Files that a run extends or removes from; its others are replaced, and a link to one with them.
_OWN = ("run.lock", "checkpoints", "events.jsonl", "rank-*.jsonl", "*.log", ".ranks", "tensorboard", SCORES)
_MOST_LINES_BYTES = 512 * MIB  # a line for each of 600,000 steps takes 120 MB
KindOfRun = TypeVar("KindOfRun", bound=RunRecord)


class StepMetrics(Record):
    kind: Literal["step"] = "step"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    memory_bytes: int | None
    elapsed_s: float
    eta_s: float
    data_wait_s: float = 0.0  # share of step_s spent waiting for batches; a mean like step_s


class EvaluationMetrics(Record):
    kind: Literal["evaluation"] = "evaluation"
    step: int
    train_loss: float
    val_loss: float
    evaluation_s: float
    best: bool


# The keys that each kind of line of metrics.jsonl must have: looked up once, as a long run has 100,000 lines.
_LINES: dict[str, tuple[type[Record], frozenset[str]]] = {
    name: (kind, frozenset(kind.model_fields))
    for name, kind in (("step", StepMetrics), ("evaluation", EvaluationMetrics))
}


def now() -> str:
    """Return local time with offset, to the second; a label only, never for order or durations."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / "run.lock")
        self._waiting: dict[str, deque[str]] = {}
        self._kept: dict[str, str] = {}  # files that are written once, in case they are lost
        self.followers: list[Callable[[str, dict[str, Any]], None]] = []  # called with (log, line) for each line
        self._teller = Teller(lambda: self.scratch)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def scratch(self) -> Path:
        return self.path

    def acquire(self) -> None:
        """Take the run's lock. Raises UserError when another process trains here, or 'environment.link'."""
        refuse_links(path for path in sorted(self.path.glob("*")) if any(map(path.match, _OWN)))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError("usage.run_in_use", path=str(self.path)) from None
        for name in WRITTEN_ONCE:
            with contextlib.suppress(OSError, ValueError):
                self._kept[name] = read_text(self.path / name)

    def write(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)
        self._kept[name] = text

    def write_config(self, config: RunConfig) -> None:
        self.write("config.toml", to_toml(config))

    def restore_removed(self) -> tuple[str, ...]:
        """Restore write-once files and the lock, removed under the run; return those that could be."""
        lost = [name for name in (*self._kept, "run.lock") if not (self.path / name).exists()]
        with contextlib.suppress(OSError, Timeout):
            for name in lost:
                self.path.mkdir(parents=True, exist_ok=True)
                if name == "run.lock":
                    fresh = FileLock(self.path / name)
                    fresh.acquire(timeout=0)
                    old, self._lock = self._lock, fresh
                    old.release()
                else:
                    replace_text(self.path / name, self._kept[name])
        return tuple(lost)

    def release(self) -> None:
        self._teller.end()
        self._lock.release()

    def tell(self, phase: Phase, step: int = 0, pid: int | None = None) -> None:
        self._teller.tell(phase, step, pid)

    def is_locked(self) -> bool:
        if not (self.path / "run.lock").exists():
            return False
        probe = FileLock(self.path / "run.lock")
        try:
            probe.acquire(timeout=0)
        except Timeout:
            return True
        except OSError:  # a read-only medium: nobody trains there
            return False
        probe.release()
        return False

    def write_record(self, record: RunRecord) -> None:
        replace_text(self.path / RECORD, json.dumps(record.to_json(schema=SCHEMA), indent=1) + "\n")

    def any_record(self) -> RunRecord:
        """Return the record; a run that is "running" without its lock was killed. Raises UserError."""
        record = run_record.read(self.path)
        if record.status != "running" or self.is_locked():
            return record
        known = self._up_to_its_end(record) if isinstance(record, TrainerRun) else {}
        return record.model_copy(update={**known, "status": "killed"})

    def record_of(self, kind: type[KindOfRun]) -> KindOfRun:
        """Return the record of a run of this kind. Raises UserError 'data.no_run' for another one."""
        record = self.any_record()
        if not isinstance(record, kind):
            raise UserError("data.no_run", path=str(self.path))
        return record

    def read_record(self) -> TrainedRun:
        """Return the record of a run that foretrain trained. Raises UserError."""
        return self.record_of(TrainedRun)

    def _up_to_its_end(self, record: TrainerRun) -> dict[str, Any]:
        steps = [line for line in self.read_lines("metrics", whole=False) if line["kind"] == "step"]
        times = [line["step_s"] for line in steps if isinstance(line.get("step_s"), int | float)]
        ended = [line["elapsed_s"] for line in steps if isinstance(line.get("elapsed_s"), int | float)]
        return {
            "steps_done": max([record.steps_done, *(line["step"] for line in steps)]),
            "wall_s": float(max([record.wall_s, *ended])),
            "step_s": median(times[1:]) if times[1:] else record.step_s,
        }

    def scores(self) -> tuple[Scores, ...]:
        found = []
        for path in sorted((self.path / SCORES).glob("step-*.json")):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
                found.append(Scores.from_json(read_text(path)))
        return tuple(found)

    @property
    def bits_per_byte(self) -> float | None:
        """Return that of the last evaluated text, for the newest checkpoint with one."""
        found = [each for each in self.scores() if each.texts]
        return max(found[-1].texts, key=lambda score: score.at).bits_per_byte if found else None

    def keep_scores(self, scores: Scores) -> Path:
        """Add these to the checkpoint's earlier scores; return the file. Raises OSError."""
        folder = self.path / SCORES
        refuse_links([folder, folder / ".lock"])
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{scores.step:010d}.json"
        with FileLock(folder / ".lock"):
            before = next((each for each in self.scores() if each.step == scores.step), None)
            kept = scores if before is None else before.with_more(scores)
            replace_text(path, json.dumps(kept.to_json(schema=SCORES_SCHEMA), indent=1) + "\n")
        return path

    def append(self, name: str, record: dict[str, Any]) -> None:
        waiting = self._waiting.setdefault(name, deque(maxlen=MOST_WAITING))
        waiting.append(json.dumps(record))
        with contextlib.suppress(OSError):  # a log is not worth a run
            append_lines(self.path / f"{name}.jsonl", waiting)
            waiting.clear()
        for hear in self.followers:
            hear(name, record)

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*"))

    def event(self, id: str, /, **values: Any) -> None:
        self.append("events", {"at": now(), "id": id, "values": values})

    def read_lines(self, name: str, *, last_bytes: int = 0, whole: bool = True) -> list[dict[str, Any]]:
        """Return the valid lines of metrics.jsonl or events.jsonl, or of its last bytes; `whole`: with all figures."""
        path = self.path / f"{name}.jsonl"
        if not path.is_file():
            return []
        lines = []
        for text in read_bytes(path, _MOST_LINES_BYTES, last_bytes=last_bytes).decode("utf-8", "replace").splitlines():
            try:
                line = json.loads(text)
                if name == "metrics" and whole:
                    kind, known = _LINES["step" if line["kind"] == "step" else "evaluation"]
                    kind.model_validate({k: v for k, v in line.items() if k in known})
                elif not isinstance(line, dict) or (name == "metrics" and not _has_step(line)):
                    continue
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            lines.append(line)
        return lines

    def drop_metrics_from(self, step: int, *, keep_evaluation: bool, whole: bool = True) -> None:
        kept = [
            line
            for line in self.read_lines("metrics", whole=whole)
            if line["step"] < step or (keep_evaluation and line["kind"] == "evaluation" and line["step"] == step)
        ]
        replace_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))


def _has_step(line: dict[str, Any]) -> bool:
    return isinstance(line["kind"], str) and isinstance(line["step"], int)


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def base_path(out_dir: str) -> Path:
    """Return the folder of out_dir; ~ is the home directory. Raises UserError where a run cannot have its files."""
    try:
        path = Path(out_dir).expanduser()
        if path.exists() and not path.is_dir():
            raise UserError("environment.file_not_folder", path=out_dir)
        if path.name in ("", ".."):
            raise UserError("environment.not_a_folder", path=out_dir)
    except (OSError, RuntimeError) as error:  # a name too long, or ~ without a home
        raise UserError("environment.cannot_write", path=out_dir, reason=str(error)) from None
    return path


def _is_free(path: Path) -> bool:
    return not path.exists() or all(entry.name in ("run.lock", NOW) for entry in path.iterdir())


def create(out_dir: str) -> RunDirectory:
    """Make a fresh run directory (`out_dir`, or `out_dir-2`, …) and hold its lock. Raises UserError."""
    for path in _numbered(base_path(out_dir)):
        directory = RunDirectory(path)
        try:
            if not _is_free(path):
                continue
            path.mkdir(parents=True, exist_ok=True)
            directory.acquire()
        except UserError:  # another process makes a run here at this moment
            continue
        except OSError as error:
            raise UserError("environment.cannot_write", path=str(path), reason=error.strerror or str(error)) from None
        if _is_free(path):
            return directory
        directory.release()
    raise AssertionError("unreachable")


def newest_unfinished(out_dir: str, max_iters: int) -> RunDirectory | None:
    """Return the last run of this name (or name-2, …) with steps to do before `max_iters`, for `--resume auto`."""
    for directory in _runs_of(out_dir):
        try:
            record = directory.read_record()
        except UserError:
            _refuse_lost(directory.path)
            raise
        if record.status != "finished" or record.steps_done < max_iters:
            return directory
    return None


def newest(out_dir: str) -> RunDirectory | None:
    return next(_runs_of(out_dir), None)


def _runs_of(out_dir: str) -> Iterator[RunDirectory]:
    base = base_path(out_dir)
    numbers = {1: base} if base.is_dir() else {}
    for path in base.parent.glob(f"{glob.escape(base.name)}-*"):
        number = path.name.removeprefix(f"{base.name}-")
        if number.isascii() and number.isdigit() and int(number) > 1:
            numbers[int(number)] = path
    for number in sorted(numbers, reverse=True):
        if run_record.source_of(numbers[number]) in ("watched", "trainer"):
            continue
        if (numbers[number] / RECORD).exists():
            yield RunDirectory(numbers[number])
        else:
            _refuse_lost(numbers[number])


def _refuse_lost(path: Path) -> None:
    """Raise UserError 'data.lost_record' where weights exist without the run's record."""
    if weights := max(path.glob("checkpoints/step-*/model.safetensors"), default=None):
        raise UserError("data.lost_record", path=str(path), weights=shlex.quote(str(weights)))


def find_runs(roots: Iterable[Path]) -> list[RunDirectory]:
    """Return every run in these directories and the two levels below them, by path."""
    found = {file.parent for root in roots for depth in ("", "*/", "*/*/") for file in root.glob(depth + RECORD)}
    return [RunDirectory(path) for path in sorted(found)]


class Note:
    def __init__(self, id: str, /, **values: Any) -> None:
        self.id = id
        self.values = values


Event = StepMetrics | EvaluationMetrics | Note
Listener = Callable[[Event], None]

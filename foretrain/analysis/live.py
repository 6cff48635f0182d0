"""Runs in folders, whoever trained them, and with this machine's cards their present state. Files are only read."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from foretrain.analysis.forecast_check import forecast_in, highest, plan_of
from foretrain.analysis.measured_step import with_measured_step
from foretrain.base.errors import UserError
from foretrain.base.process_memory import sample_tree
from foretrain.base.records import Record
from foretrain.hardware.card import Cards, CardSample
from foretrain.runs import state
from foretrain.runs.folder import RunDirectory, find_runs
from foretrain.runs.record import PLAN, RECORD, RunRecord, TrainedRun, WatchedRun
from foretrain.runs.state import UNSAID, Label

MAX_RECORD_BYTES = 16 * 2**20
FRESH_S = 60.0
_LAST_BYTES = 65536  # hold the newest lines of any run
LOCK = "run.lock"
FILES = (
    RECORD, "metrics.jsonl", "events.jsonl", "plan.json", "sample.txt", LOCK, state.NOW_FILE, state.LABEL_FILE,
    "samples.jsonl",
)  # fmt: skip
_SMALL = (RECORD, "plan.json")
LOCKS = Path("/proc/locks")


class ObservedRun(RunDirectory):
    def is_locked(self) -> bool:
        now = state.read_now(self.path)
        lives = state.lives(now) if now else None
        if lives is not None:
            return lives
        held = lock_is_held(self.path / LOCK)
        return held or age_s(self.path / "metrics.jsonl") < FRESH_S or age_s(self.path / RECORD) < FRESH_S

    def is_plain(self) -> bool:
        """Return whether the folder and its files are neither links nor pipes, and of a sensible size."""
        files = [self.path / name for name in FILES]
        try:
            if self.path.is_symlink() or not self.path.is_dir():
                return False
            if any(file.is_symlink() or (file.exists() and not file.is_file()) for file in files):
                return False
            small = [self.path / name for name in _SMALL]
            return all(file.stat().st_size <= MAX_RECORD_BYTES for file in small if file.exists())
        except OSError:  # it went away, or is not ours to see
            return False


def age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def lock_is_held(path: Path) -> bool:
    """Return whether somebody holds a lock on this file, by the kernel's list of locks, where there is one."""
    try:
        status = path.stat()
    except OSError:
        return False
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(file in words for words in _locks(LOCKS))


def _locks(listing: Path) -> list[list[str]]:
    try:
        return [line.split() for line in listing.read_text("ascii", "replace").splitlines()]
    except OSError:
        return []


def held_here(listing: Path = LOCKS, processes: Path = Path("/proc")) -> list[Path]:
    """Return the folders of runs whose lock a process of this machine holds, where its files may be read."""
    folders: set[Path] = set()
    for words in _locks(listing):
        if len(words) > 4 and words[1] == "FLOCK" and words[4].isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to see
                files = map(Path.readlink, (processes / words[4] / "fd").iterdir())
                folders |= {path.parent for path in files if path.name == LOCK}
    return sorted(folders)


def newest_lines(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open("rb") as opened:
            start = max(0, file.stat().st_size - _LAST_BYTES)
            opened.seek(start)
            lines = opened.read().split(b"\n")[1 if start else 0 : -1]
    except OSError:
        return []
    values = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


@dataclass(frozen=True)
class Listed:
    runs: list[tuple[Path, RunRecord]]
    unreadable: list[UserError]


def listed(folders: Iterable[Path], tags: Iterable[str] = ()) -> Listed:
    wanted, found = set(tags), Listed([], [])
    for directory in find_runs(folders):
        if wanted - set(state.read_label(directory.path).tags):
            continue
        try:
            record = directory.any_record()
        except UserError as error:
            found.unreadable.append(error)
            continue
        if isinstance(record, TrainedRun):
            record = with_measured_step(directory, record)
        found.runs.append((directory.path, record))
    return found


SCHEMA = "foretrain.run/1#top"
RECORDS = (RECORD, state.NOW_FILE)
_DEPTHS = ("", "*/", "*/*/")
MOST_RUNS = 60  # read at once; a screen shows fewer
_ORDER = ("here", "elsewhere", "nowhere")  # the newest first within each
_RECENT = 20  # steps whose median predicts the rest
_MOST = 1e18  # no figure of a run is higher, and NaN is not below it

Values = dict[str, Any]
_KINDS = {"trained": "run", "watched": "watched", "trainer": "trainer"}


class LiveRun(Record):
    """One run at one moment; None where unknown.

    `where`: its process is here, on another machine or in a container, or has ended. `memory_bytes`: PyTorch's reserved
    memory, or its processes' on a CPU. `problem`: why a run cannot be read.
    """

    path: str
    kind: Literal["run", "watched", "trainer"]
    name: str
    label: Label = UNSAID
    where: Literal["here", "elsewhere", "nowhere"]
    host: str = ""
    phase: Literal[state.Phase, "ended", "unreadable"]
    phase_s: float | None = None
    status: str = ""
    device: str = ""
    started_at: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    planned_bytes: int | None = None
    planned_high_bytes: int | None = None
    eta_s: float | None = None
    pids: tuple[int, ...] = ()
    problem: str = ""


class LiveCard(CardSample):
    name: str
    driver: str = ""
    total_bytes: int | None = None


class Top(Record):
    """`runs`: those alive first, each kind the newest first. `more_runs`: older ones. `no_cards`: why there is none."""

    at: str
    host: str
    cards: tuple[LiveCard, ...] = ()
    no_cards: str = ""
    runs: tuple[LiveRun, ...] = ()
    more_runs: int = 0


def look(cards: Cards, folders: Sequence[Path] = (), locks: Path = LOCKS) -> Top:
    found = found_in(folders or [Path()], None if folders else locks)
    runs = [of_folder(run) for run in found[:MOST_RUNS]]
    pids: list[int] = []
    for number, run in enumerate(runs):
        trees = [tree for pid in run.pids if (tree := sample_tree(pid))]
        pids += [pid for tree in trees for pid in tree.pids]
        if trees and run.device.startswith("CPU"):
            runs[number] = run.model_copy(update={"memory_bytes": sum(tree.rss_bytes for tree in trees)})
    return Top(
        at=datetime.now().astimezone().isoformat(timespec="seconds"), host=socket.gethostname(),
        cards=tuple(
            LiveCard(**{**sample.model_dump(), **facts.model_dump(exclude={"reserved_bytes"})})
            for facts, sample in zip(cards.facts, cards.sample(pids), strict=False)
        ),
        no_cards="" if cards.facts else cards.problem,
        runs=tuple(sorted(runs, key=lambda run: _ORDER.index(run.where))),
        more_runs=max(0, len(found) - MOST_RUNS),
    )  # fmt: skip


def found_in(roots: Sequence[Path], locks: Path | None = LOCKS) -> list[ObservedRun]:
    """Find every run in these folders and two levels below, and those whose lock is held; the live ones first."""
    paths = {
        file.parent for root in roots for depth in _DEPTHS for name in RECORDS for file in root.glob(f"{depth}{name}")
    }
    seen = {path.resolve() for path in paths}
    held = (path for path in (held_here(locks) if locks else ()) if path.resolve() not in seen)
    paths |= {path for path in held if any((path / name).is_file() for name in RECORDS)}
    return sorted(filter(ObservedRun.is_plain, map(ObservedRun, paths)), key=_newness, reverse=True)


def _newness(run: ObservedRun) -> tuple[bool, float]:
    youngest_s = min(age_s(run.path / name) for name in (*RECORDS, "metrics.jsonl"))
    return (run.path / state.NOW_FILE).is_file(), -youngest_s


def of_folder(run: ObservedRun) -> LiveRun:
    path, now = run.path, state.read_now(run.path)
    values: Values = {"path": str(path), "kind": "run", "name": path.resolve().name, "label": state.read_label(path)}
    try:
        if (path / RECORD).is_file() or now is None:
            record = run.any_record()
            values |= {"kind": _KINDS[record.source], **_figures(run, record)}
        else:  # it has only just begun, or ended before its record
            values["status"] = "running" if run.is_locked() else "killed"
    except (UserError, OSError, ValueError) as error:  # ValueError and OSError: it went away between two readings
        return LiveRun(**{**values, "where": "nowhere", "phase": "unreadable", "problem": str(error)})
    if values["status"] != "running":
        values |= {"where": "nowhere", "phase": "ended", "eta_s": None}
    elif now is None:
        values |= {"where": "here" if lock_is_held(path / LOCK) else "elsewhere", "phase": "running"}
    else:
        here = state.is_here(now)
        values |= {"where": "here" if here else "elsewhere", "host": now.host, "phase": now.phase}
        values["phase_s"] = max(0.0, state.seconds_since(now))
        values["pids"] = tuple(_processes(path, now)) if here else ()
    if values["phase"] == "running" and values.get("loss") is not None:  # its lines tell of steps
        values["phase"] = "training"
    return LiveRun(**values)


def _processes(path: Path, now: state.Now) -> Iterator[int]:
    yield now.pid
    for file in sorted(path.glob(f".ranks/*/{state.NOW_FILE}")):
        rank = state.read_now(file.parent)
        if rank is not None and state.lives(rank):
            yield rank.pid


def _figures(run: ObservedRun, record: RunRecord) -> Values:
    alive, (last, evaluation, recent_s) = record.status == "running", _tail(run.path)
    step = _step(record, _whole(last.get("step")), alive=alive)
    steps, tokens, last_s = record.steps_asked, _number(last.get("tokens")), _number(last.get("step_s"))
    step_s = median(recent_s) if recent_s else record.step_s
    eta_s = _number(last.get("eta_s"))
    if eta_s is None and steps and step and step_s:
        eta_s = (steps - step) * step_s
    found: Values = {
        "status": record.status, "started_at": record.started_at, "step": step, "steps": steps,
        "loss": (None if alive else record.last_loss) or _number(last.get("loss")) or record.last_loss,
        "val_loss": _number(evaluation.get("val_loss")) if alive else record.val_loss,
        "tokens_per_s": record.tokens_per_s, "mfu": getattr(record, "mfu", None),
        "eta_s": None if eta_s is None else max(0.0, eta_s - age_s(run.path / "metrics.jsonl")),
        **_planned(run, record),
    }  # fmt: skip
    if isinstance(record, WatchedRun):
        found["name"] = record.name
    else:
        found["device"] = record.device_name
    if alive:
        by_tokens = tokens / last_s if tokens and last_s else record.tokens_per_s
        found |= {"tokens_per_s": _number(last.get("tokens_per_s")) or by_tokens, "mfu": _number(last.get("mfu"))}
        found["memory_bytes"] = _whole(last.get("memory_bytes")) or _sampled(run.path)
    return found


def _step(record: RunRecord, last: int | None, *, alive: bool) -> int | None:
    if isinstance(record, WatchedRun):
        return last if alive else record.last_step
    if not alive or last is None:
        return record.steps_done
    return max(record.steps_done, last + isinstance(record, TrainedRun))  # whose lines count from 0


def _sampled(path: Path) -> int | None:
    sample = next(reversed(newest_lines(path / "samples.jsonl")), {})
    cards = [card for card in sample.get("cards") or () if isinstance(card, dict)]
    return sum(_whole(card.get("ours_bytes")) or 0 for card in cards) or _whole(sample.get("rss_bytes"))


def _planned(run: ObservedRun, record: RunRecord) -> Values:
    if not (run.path / PLAN).is_file():
        return {}
    try:
        if isinstance(record, TrainedRun):
            _, expected, most = highest(plan_of(run.path, record))
            return {"planned_bytes": expected, "planned_high_bytes": most}
        found = forecast_in(run.path)
        return {"planned_bytes": found.memory.worst.allocated_bytes} if found else {}
    except (UserError, OSError, ValueError, StopIteration):
        return {}


def _tail(path: Path) -> tuple[Values, Values, list[float]]:
    step, evaluation, recent_s = Values(), Values(), list[float]()
    for line in newest_lines(path / "metrics.jsonl"):
        if line.get("kind") == "evaluation":
            evaluation = line
        elif line.get("kind") in ("step", "log"):
            step = {**step, **line} if line.get("step") == step.get("step") else line
            if (step_s := _number(line.get("step_s"))) is not None:
                recent_s.append(step_s)
    return step, evaluation, recent_s[-_RECENT:]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and _number(value) is not None else None

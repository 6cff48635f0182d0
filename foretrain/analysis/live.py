"""Runs in folders, whoever trained them: their list, and with this machine's cards how they are at one moment.

Files are read and nothing else.
"""

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

from foretrain.analysis.forecast_check import highest, plan_of
from foretrain.analysis.measured_step import with_measured_step
from foretrain.analysis.run import forecast_in
from foretrain.base.errors import UserError
from foretrain.base.process_memory import TreeSample, sample_tree
from foretrain.base.records import Record
from foretrain.hardware.card import Cards, CardSample
from foretrain.runs import state
from foretrain.runs import state as label
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
        """Whether a living process trains here, as far as can be seen without touching the lock."""
        said = state.read_now(self.path)
        lives = state.lives(said) if said else None
        if lives is not None:
            return lives
        held = lock_is_held(self.path / LOCK)
        return held or age_s(self.path / "metrics.jsonl") < FRESH_S or age_s(self.path / RECORD) < FRESH_S

    def is_plain(self) -> bool:
        """Whether the folder and the files in it are neither links nor pipes, and of a sensible size."""
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        files = [self.path / name for name in FILES]
        if any(file.is_symlink() or (file.exists() and not file.is_file()) for file in files):
            return False
        small = [self.path / name for name in _SMALL]
        return all(file.stat().st_size <= MAX_RECORD_BYTES for file in small if file.exists())


def age_s(path: Path) -> float:
    """Seconds since a file changed; infinite where there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def lock_is_held(path: Path, listing: Path = LOCKS) -> bool:
    """Whether somebody holds a lock on this file, by the kernel's list of locks; False where there is no list."""
    try:
        status = path.stat()
    except OSError:
        return False
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(file in words for words in _locks(listing))


def _locks(listing: Path) -> list[list[str]]:
    """The words of each line of the kernel's list."""
    try:
        return [line.split() for line in listing.read_text("ascii", "replace").splitlines()]
    except OSError:
        return []


def held_here(listing: Path = LOCKS, processes: Path = Path("/proc")) -> list[Path]:
    """Folders of the runs whose lock some process of this machine holds, as far as we may look at its files."""
    found: set[Path] = set()
    for words in _locks(listing):
        if len(words) > 4 and words[1] == "FLOCK" and words[4].isdigit():
            found |= {path.parent for path in _open_files(processes / words[4] / "fd") if path.name == LOCK}
    return sorted(found)


def _open_files(folder: Path) -> Iterator[Path]:
    """What a process has open; nothing of another user's."""
    try:
        for link in folder.iterdir():
            yield link.readlink()
    except OSError:  # it ended meanwhile, or is not ours to see
        return


def newest_lines(file: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines; those that a crash or a hand has spoilt are left out."""
    try:
        with file.open("rb") as opened:
            start = max(0, file.stat().st_size - _LAST_BYTES)
            opened.seek(start)
            lines = opened.read().split(b"\n")[1 if start else 0 : -1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [line for line in found if isinstance(line, dict)]


@dataclass(frozen=True)
class Listed:
    """Runs with their folders, by path; `unreadable`: why others could not be read."""

    runs: list[tuple[Path, RunRecord]]
    unreadable: list[UserError]


def listed(folders: Iterable[Path], tags: Iterable[str] = ()) -> Listed:
    """Read the runs in these folders and the two levels below them that have all of these tags."""
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


SCHEMA = "foretrain.top/1"
RECORDS = (RECORD, state.NOW_FILE)
_DEPTHS = ("", "*/", "*/*/")
MOST_RUNS = 60  # are read at a look; a screen shows fewer
_ORDER = ("here", "elsewhere", "nowhere")  # each in the order in which they came: the newest first
_RECENT = 20  # steps whose median time says what is left
_MOST = 1e18  # more is no figure of a run, and NaN is not below it

Values = dict[str, Any]
_KINDS = {"trained": "run", "watched": "watched", "trainer": "trainer"}


class LiveRun(Record):
    """One run at one moment; None where nothing says it.

    `where`: the process that does it is on this machine; on another one, or in another container; it has ended.
    `status`: the record's. `memory_bytes`: of a run on a card what PyTorch has reserved there, on a CPU what its
    processes hold; `planned_bytes`: the highest that the plan expects of the same, at most `planned_high_bytes`.
    `problem`: why a run cannot be read.
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
    """One card at one moment; `ours_bytes`: what the runs here hold."""

    name: str
    driver: str = ""
    total_bytes: int | None = None


class Top(Record):
    """Everything at one moment. `runs`: those that are alive first, each kind the newest first; `more_runs`: how many
    older ones there are. `no_cards`: why NVML shows no card."""

    at: str
    host: str
    cards: tuple[LiveCard, ...] = ()
    no_cards: str = ""
    runs: tuple[LiveRun, ...] = ()
    more_runs: int = 0


def look(cards: Cards, folders: Sequence[Path] = (), locks: Path = LOCKS) -> Top:
    """What there is now. `folders`: where runs are looked for; none: here, and all that are alive on this machine."""
    found = found_in(folders or [Path()], None if folders else locks)
    runs = [of_folder(run) for run in found[:MOST_RUNS]]
    trees = {run.path: [tree for pid in run.pids if (tree := sample_tree(pid))] for run in runs}
    pids = [pid for processes in trees.values() for tree in processes for pid in tree.pids]
    shown = [_with_memory(run, trees[run.path]) for run in runs]
    return Top(
        at=datetime.now().astimezone().isoformat(timespec="seconds"), host=socket.gethostname(),
        cards=tuple(
            LiveCard(**{**sample.model_dump(), **facts.model_dump(exclude={"reserved_bytes"})})
            for facts, sample in zip(cards.facts, cards.sample(pids), strict=False)
        ),
        no_cards="" if cards.facts else cards.problem,
        runs=tuple(sorted(shown, key=lambda run: _ORDER.index(run.where))),
        more_runs=max(0, len(found) - MOST_RUNS),
    )  # fmt: skip


def _with_memory(run: LiveRun, trees: list[TreeSample]) -> LiveRun:
    """The run with what its processes hold where it trains on a CPU."""
    held = sum(tree.rss_bytes for tree in trees)
    return run.model_copy(update={"memory_bytes": held}) if held and run.device.startswith("CPU") else run


def found_in(roots: Sequence[Path], locks: Path | None = LOCKS) -> list[ObservedRun]:
    """Every run in these folders and the two levels below them, and those whose lock a process of `locks` holds: those
    that may be alive first, then the newest first. A folder or file that is a link is not followed."""
    paths = {
        file.parent for root in roots for depth in _DEPTHS for name in RECORDS for file in root.glob(f"{depth}{name}")
    }
    seen = {path.resolve() for path in paths}
    held = (path for path in (held_here(locks) if locks else ()) if path.resolve() not in seen)
    paths |= {path for path in held if any((path / name).is_file() for name in RECORDS)}
    return sorted(filter(_is_plain, map(ObservedRun, paths)), key=_newness, reverse=True)


def _is_plain(run: ObservedRun) -> bool:
    try:
        return run.is_plain()
    except OSError:  # it went away, or is not ours to see
        return False


def _newness(run: ObservedRun) -> tuple[bool, float]:
    ages = [age_s(run.path / name) for name in (*RECORDS, "metrics.jsonl")]
    return (run.path / state.NOW_FILE).is_file(), -min(ages)


def of_folder(run: ObservedRun) -> LiveRun:
    """The run in a folder as it is now; one that cannot be read says why."""
    path, said = run.path, state.read_now(run.path)
    values: Values = {"path": str(path), "kind": "run", "name": path.resolve().name, "label": label.read_label(path)}
    try:
        if (path / RECORD).is_file() or said is None:
            record = run.any_record()
            values |= {"kind": _KINDS[record.source], **_figures(run, record)}
        else:  # it has only just begun, or never came as far as a record
            values["status"] = "running" if run.is_locked() else "killed"
    except (UserError, OSError, ValueError) as error:  # ValueError and OSError: it went away between two readings
        return LiveRun(**{**values, "where": "nowhere", "phase": "unreadable", "problem": str(error)})
    if values["status"] != "running":
        values |= {"where": "nowhere", "phase": "ended", "eta_s": None}
    elif said is None:
        values |= {"where": "here" if lock_is_held(path / LOCK) else "elsewhere", "phase": "running"}
    else:
        here = state.is_here(said)
        values |= {"where": "here" if here else "elsewhere", "host": said.host, "phase": said.phase}
        values["phase_s"] = max(0.0, state.seconds_since(said))
        values["pids"] = tuple(_processes(path, said)) if here else ()
    if values["phase"] == "running" and values.get("loss") is not None:  # its lines tell of steps
        values["phase"] = "training"
    return LiveRun(**values)


def _processes(path: Path, said: state.Now) -> Iterator[int]:
    """The process of a run, and those of its other ranks here."""
    yield said.pid
    for file in sorted(path.glob(f".ranks/*/{state.NOW_FILE}")):
        rank = state.read_now(file.parent)
        if rank is not None and state.lives(rank):
            yield rank.pid


def _figures(run: ObservedRun, record: RunRecord) -> Values:
    """Return what the record and the newest lines say; while a run goes on, the lines come first."""
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
        "eta_s": _left(eta_s, run.path), **_planned(run, record),
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
    """Return how many steps are done, of a watched command the number of the last one."""
    if isinstance(record, WatchedRun):
        return last if alive else record.last_step
    if not alive or last is None:
        return record.steps_done
    return max(record.steps_done, last + isinstance(record, TrainedRun))  # whose lines count from 0


def _sampled(path: Path) -> int | None:
    """Return what a watched command's processes hold: on the cards, or without one in the computer's memory."""
    sample = next(reversed(newest_lines(path / "samples.jsonl")), {})
    cards = [card for card in sample.get("cards") or () if isinstance(card, dict)]
    return sum(_whole(card.get("ours_bytes")) or 0 for card in cards) or _whole(sample.get("rss_bytes"))


def _planned(run: ObservedRun, record: RunRecord) -> Values:
    """Return what the plan beside a run expects; nothing where it says nothing."""
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


def _left(eta_s: float | None, path: Path) -> float | None:
    """What is left since the line that said it."""
    return None if eta_s is None else max(0.0, eta_s - age_s(path / "metrics.jsonl"))


def _tail(path: Path) -> tuple[Values, Values, list[float]]:
    """The last step and the last evaluation of metrics.jsonl, and the seconds of the newest steps."""
    step: Values = {}
    evaluation: Values = {}
    recent_s: list[float] = []
    for line in newest_lines(path / "metrics.jsonl"):
        if line.get("kind") == "evaluation":
            evaluation = line
        elif line.get("kind") in ("step", "log"):
            step = {**step, **line} if line.get("step") == step.get("step") else line
            if (step_s := _number(line.get("step_s"))) is not None:
                recent_s.append(step_s)
    return step, evaluation, recent_s[-_RECENT:]


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


def _whole(value: Any) -> int | None:
    """A number of steps or bytes; None for anything else."""
    return value if isinstance(value, int) and _number(value) is not None else None

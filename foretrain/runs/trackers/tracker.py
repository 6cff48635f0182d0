"""`Tracker`: an experiment tracker and its runs, in a process of its own (report.py): its library may raise."""

import contextlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from foretrain.base.errors import UserError
from foretrain.base.units import JOULES_PER_KWH

MOST_VALUES = 4_000_000  # read of one run; each takes about 100 bytes
MOST_OF_A_REASON = 160  # characters of a library's message
VERSION = "foretrain_version"  # in the config of a run: it is one of ours
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    project: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed: str | None = None


@dataclass(frozen=True)
class Started:
    """`id`: to resume with. `look`: what shows the run. `offline`: why it stays here; `send`: the command for it."""

    id: str
    look: str
    offline: str = ""
    send: str = ""


@dataclass(frozen=True)
class Tracked:
    """A tracked run. `rows`: metric -> value, as logged, the earliest first, by the tracker's names."""

    tracker: str
    name: str
    rows: list[Row]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return VERSION in self.config


class Tracker(ABC):
    """One tracker: reports one run, and reads reported runs. Errors of its library are let through. `package`: the
    module needed. `check`: where to look when reporting fails. `project`: the variable of its project."""

    name: ClassVar[str]
    package: ClassVar[str]
    check: ClassVar[str]
    project: ClassVar[str] = ""
    takes_back: ClassVar[bool] = False

    @abstractmethod
    def start(self, job: Job) -> Started:
        """Begin or resume the run."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Take the values of one step, logged at this time since 1970."""

    def flush(self) -> None:
        """Send what is buffered: nothing more comes for now."""
        return

    @abstractmethod
    def finish(self, status: str) -> None:
        """End the run: finished, interrupted, diverged, failed or killed."""

    @classmethod
    @abstractmethod
    def claims(cls, path: Path, head: bytes) -> bool:
        """Return whether this path holds runs of this tracker, by its name and its first bytes."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        """Read the run in this path; `run`: one of several, by its name or id. Raises UserError."""

    @classmethod
    def install(cls) -> str:
        return f"pip install 'foretrain[{cls.name}]'"

    @classmethod
    def is_installed(cls) -> bool:
        try:
            return importlib.util.find_spec(cls.package) is not None
        except (ImportError, ValueError):
            return False

    @classmethod
    def need_to_read(cls, path: Path) -> None:
        if not cls.is_installed():
            raise UserError("environment.tracker_reader", path=str(path), tracker=cls.name, command=cls.install())


def damaged(path: Path, tracker: str, reason: object) -> UserError:
    return UserError("data.tracker_damaged", path=str(path), tracker=tracker, reason=short(reason))


def short(reason: object) -> str:
    text = " ".join(str(reason).split()).rstrip(".") or type(reason).__name__
    return text if len(text) <= MOST_OF_A_REASON else text[: MOST_OF_A_REASON - 1] + "…"


def chosen(path: Path, runs: Mapping[str, str], wanted: str | None) -> str:
    """Return the id of the only run, or of the one with this id or name, in `runs` (id -> name). Raises UserError."""
    if wanted is None and len(runs) == 1:
        return next(iter(runs))
    found = [id for id, name in runs.items() if wanted in (id, name)]
    if wanted is not None and found:
        return found[-1]
    shown = list(runs.values()) if len({*runs.values()}) == len(runs) else list(runs)
    raise UserError("usage.table_runs", path=str(path), runs=shown[-8:], run=shown[-1] if shown else "")


def without_undone(rows: Iterable[Row], step: str) -> list[Row]:
    """Leave out the rows of steps that a resumed run repeated: it was resumed where `step` goes back."""
    kept: list[Row] = []
    for row in rows:
        at = row.get(step)
        if not isinstance(at, int | float):
            continue
        if kept and at < kept[-1][step]:
            kept = [one for one in kept if one[step] < at or (one[step] == at and "eval/loss" in one)]
        kept.append(row)
    return kept


def logged_at_s(row: Row) -> float | None:
    """Return when a row was logged, in seconds of the tracker's clock; None where unknown."""
    for name in ("_timestamp", "timestamp"):
        value = row.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError, OverflowError, OSError):
                return datetime.fromisoformat(value).timestamp()
    return None


# Names of a metrics.jsonl line in trackers, so that runs of ours and of the Trainer share charts: those of transformers
# 5.23 (integrations/integration_utils.py): `rewrite_logs` makes `eval/loss` of `eval_loss` and `train/loss` of `loss`,
# and charts are drawn over `train/global_step`. What the Trainer does not log (time of a step, MFU, memory, energy) has
# the unit in its name.

STEP = "train/global_step"
OF_STEP = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_second", "step_s": "train/step_time_s", "mfu": "train/mfu",
    "data_wait_s": "train/data_wait_s", "elapsed_s": "train/elapsed_s", "memory_bytes": "train/memory_bytes",
    "power_w": "train/power_w",
}  # fmt: skip
OF_EVALUATION = {"val_loss": "eval/loss", "train_loss": "eval/train_loss", "evaluation_s": "eval/runtime"}
OF_PLAN, ENERGY = "train/memory_of_plan", "train/energy_kwh"


class Namer:
    """Names the lines of one run. `planned_bytes`: the memory of its plan, if any."""

    def __init__(self, planned_bytes: float | None) -> None:
        self.planned_bytes = planned_bytes
        self._energy_j = 0.0
        self._last: tuple[float, float] | None = None  # seconds and watts of the last line with a power

    def named(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return {metric: value} of a line; absent figures are left out."""
        names = OF_STEP if line["kind"] == "step" else OF_EVALUATION
        found = {name: float(line[key]) for key, name in names.items() if isinstance(line.get(key), int | float)}
        if line["kind"] != "step":
            return found
        if self.planned_bytes and (held := found.get("train/memory_bytes")):
            found[OF_PLAN] = held / self.planned_bytes
        if (power_w := found.get("train/power_w")) is not None:
            self._add_energy(found["train/elapsed_s"], power_w)
        if self._last:
            found[ENERGY] = self._energy_j / JOULES_PER_KWH
        return found

    def skip(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the energy of lines that were reported before."""
        for line in lines:
            self.named(line)

    def _add_energy(self, elapsed_s: float, power_w: float) -> None:
        """Add energy: a card is asked once per second at most; between two answers it drew the mean of both."""
        if self._last is not None and elapsed_s > self._last[0]:
            self._energy_j += (elapsed_s - self._last[0]) * (power_w + self._last[1]) / 2
        self._last = elapsed_s, power_w

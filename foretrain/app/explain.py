"""What happened and why: a run, a Trainer's run, a log, a watched run, a snapshot. `foretrain.explain` for Python."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from foretrain.advice.advisor import remedies, short_of
from foretrain.advice.record import Advice
from foretrain.analysis import snapshot_file
from foretrain.analysis.forecast_check import ForecastCheck, in_the_end, of_directory
from foretrain.analysis.log_analysis import SCHEMA as LOG_SCHEMA
from foretrain.analysis.log_analysis import LogAnalysis, analyse, config_of, of_tracked, of_watched
from foretrain.analysis.run import SCHEMA as RUN_SCHEMA
from foretrain.analysis.run import (
    OutOfMemory,
    RunExplanation,
    TrainerRunExplanation,
    explain_directory,
    explain_run,
    failure_of,
)
from foretrain.analysis.snapshot_analysis import SCHEMA as SNAPSHOT_SCHEMA
from foretrain.analysis.snapshot_analysis import SnapshotAnalysis
from foretrain.app.finetune import FineTuneQuestion, advised, plan_question, question
from foretrain.app.plan import Config, resolved_of
from foretrain.base import oom_message
from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes, read_bytes
from foretrain.base.oom_message import OutOfMemoryMessage
from foretrain.base.records import Note, Record
from foretrain.base.units import GIB
from foretrain.comparison.sources import tables
from foretrain.comparison.sources.tables import read_table
from foretrain.config.finetune.read import is_asked
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.plan import Plan, plan
from foretrain.runs import columns, trackers
from foretrain.runs.columns import NAMES
from foretrain.runs.folder import RunDirectory
from foretrain.runs.formats.log_format import LogFormat
from foretrain.runs.record import LOG, TrainedRun, WatchedRun, folder_of, source_of
from foretrain.runs.trackers.tracker import Tracked
from foretrain.runs.training_log import TrainingLog, read_log, read_stream

TAIL_BYTES = 1 << 18  # of a log; where memory ran out, its end shows it
_CARD = 0.88, 1.02  # what CUDA gives of the memory that a card is sold with, at least and at most
# What people change besides their config, the least first.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"compile": False}, {"dtype": "float32"}, {"compile": False, "dtype": "float32"},
)  # fmt: skip

Listen = Callable[[str], object]  # hears what is being done: 'searching'


def ran_out_in(log: Path) -> oom_message.OutOfMemoryMessage | None:
    try:
        return oom_message.parse(read_bytes(log, 2 * TAIL_BYTES, last_bytes=TAIL_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def failure(message: oom_message.OutOfMemoryMessage) -> OutOfMemory:
    known = {"fatal": True, "expandable_segments": not message.before_2_1}
    return failure_of(message.figures()).model_copy(update=known)


def doubts_of(
    message: oom_message.OutOfMemoryMessage, program: LogFormat | None, config: RunConfig, gpu: Gpu
) -> tuple[Note, ...]:
    """Return why a message cannot be from this config's run on this card. `program`: what printed the log."""
    if program is not None and program.name not in ("nanogpt", "evaluations"):
        return (Note(id="program", values={"program": program.shown}),)
    most = _most(config, gpu)
    found, held = [*_of_card(message, gpu), *_of_need(message, most)], _held(message)
    if any(note.id == "held" for note in found):
        for changes in _VARIANTS:
            most = _most(config.model_copy(update=changes), gpu)
            if most is not None and held <= most.needed_high_bytes:
                words = " ".join(f"--{key}={value}" for key, value in changes.items())
                values = {"change": words, "needed": most.allocated_bytes, "high": most.needed_high_bytes}
                found.append(Note(id="variant", values=values))
                break
        else:
            found.append(Note(id="no_variant", values={}))
    return tuple(found)


def _of_card(message: oom_message.OutOfMemoryMessage, gpu: Gpu) -> list[Note]:
    """Return that a message is from a card of another size."""
    card, label = message.card_bytes, gpu.label_bytes
    if card is None or label is None or _CARD[0] <= card / label <= _CARD[1]:
        return []
    return [Note(id="card", values={"logged": card, "gpu": gpu.name, "given": label})]


def _held(message: oom_message.OutOfMemoryMessage) -> int:
    return message.allocated_bytes + (message.asked_bytes or 0) if message.allocated_bytes is not None else 0


def _of_need(message: oom_message.OutOfMemoryMessage, most: PhaseMemory | None) -> list[Note]:
    held = _held(message)
    if most is None or held <= most.needed_high_bytes:
        return []
    return [Note(id="held", values={"held": held, "needed": most.allocated_bytes, "high": most.needed_high_bytes})]


def _most(config: RunConfig, gpu: Gpu) -> PhaseMemory | None:
    """The worst phase of nanoGPT's run; None where the card cannot do what the config asks for."""
    try:
        return plan(config, gpu).memory_of("nanogpt").neediest
    except UserError:
        return None


def saved_by(
    message: oom_message.OutOfMemoryMessage, failed: OutOfMemory, config: RunConfig, gpu: Gpu
) -> tuple[Advice, ...]:
    """Return what would have saved nanoGPT's run on a card with the memory that the message states."""
    gpu = _as_stated(message, gpu)
    return remedies(
        config, gpu, used_by_others_bytes=failed.used_by_others_bytes or 0, over_bytes=_over_bytes(failed),
        step="nanogpt", expandable_segments=failed.expandable_segments,
    )  # fmt: skip


def _over_bytes(failed: OutOfMemory) -> int:
    return (failed.over_bytes if failed.over_bytes is not None else failed.asked_bytes) or 0


def finetune_saved_by(
    message: oom_message.OutOfMemoryMessage,
    program: LogFormat | None,
    failed: OutOfMemory,
    asked: FineTuneQuestion,
    gpu: Gpu,
) -> dict[str, Any]:
    """Return the doubts about a fine-tuning run's log, or what would have saved the run. Raises UserError."""
    if program is not None and program.has_config:
        return {"doubts": (Note(id="program_finetune", values={"program": program.shown}),)}
    gpu, others_bytes = _as_stated(message, gpu), failed.used_by_others_bytes or 0
    found = plan_question(asked, gpu, others_bytes)
    if found.bound != "exact":
        return {"unknown": "not_planned"}
    doubts = [*_of_card(message, gpu), *_of_need(message, found.memory.neediest)]
    if doubts:
        longer = [Note(id="longer", values={"seq_len": found.tune.seq_len})] if doubts[-1].id == "held" else []
        return {"doubts": (*doubts, *longer)}
    short_bytes = short_of(found.available_bytes or 0, found.needed_bytes, _over_bytes(failed))
    changes = advised(plan_question(asked, gpu, others_bytes + short_bytes))
    return {"changes": tuple(change for change in changes if change.effect.verdict == "fits")}


def _as_stated(message: oom_message.OutOfMemoryMessage, gpu: Gpu) -> Gpu:
    if message.card_bytes is None:
        return gpu
    return gpu.model_copy(update={"cuda_memory_gib": message.card_bytes / GIB})


Tell = Callable[[UserError], object]  # hears what was skipped in a config, and of a card that the catalogue lacks


class LogExplanation(Record):
    """A log, a watched run with or without steps in its log, or a log that says no more than that memory ran out.

    `remedies`, `changes`: what would have saved it; `unknown`: what to give first; `doubts`: why the log cannot be of
    that config's run on that card.
    """

    log: LogAnalysis | None
    watched: WatchedRun | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    remedies: tuple[Advice, ...] = ()
    changes: tuple[Advice, ...] | None = None
    unknown: Literal["", "give_config", "give_gpu", "give_config_gpu", "give_figures", "not_planned"] = ""
    doubts: tuple[Note, ...] = ()

    def to_json(self, **extra: Any) -> dict[str, Any]:
        """Return the log's own figures, with those of the others beside them."""
        found: dict[str, Any] = self.log.to_json(**extra) if self.log else extra
        if self.watched or not self.log:
            found["watch"] = self.watched.to_json() if self.watched else None
        if self.out_of_memory:
            found["out_of_memory"] = self.out_of_memory[-1].to_json()
            found["remedies"] = [remedy.to_json() for remedy in self.changes or self.remedies]
            found["doubts"] = [doubt.to_json() for doubt in self.doubts]
        return found


Explanation = RunExplanation | SnapshotAnalysis | LogExplanation | TrainerRunExplanation
SCHEMAS = {
    RunExplanation: RUN_SCHEMA, SnapshotAnalysis: SNAPSHOT_SCHEMA, LogExplanation: LOG_SCHEMA,
    TrainerRunExplanation: RUN_SCHEMA,
}  # fmt: skip


def explain(
    source: str | Path | BinaryIO,
    config: Config | None = None,
    gpu: str = "auto",
    *,
    tell: Tell = lambda note: None,
    listen: Listen = lambda what: None,
) -> Explanation:
    """Where memory and time of a run went, and why: `foretrain.explain("out-baby").memory`.

    `source`: a run directory (gives a RunExplanation; one of ForetrainCallback's a TrainerRunExplanation), a memory
    snapshot of PyTorch (a SnapshotAnalysis), or a log, a watched run or one that a tracker keeps (a LogExplanation);
    a log may come as an open binary file. `config`, of a log: as in `plan`. `gpu`:
    the card of a log; "auto": the one that it names, else this machine's. Bytes and seconds, as the names say.
    Raises UserError for what cannot be read; memory snapshots are read as data and never run.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        kind, directory = source_of(folder_of(path)), RunDirectory(folder_of(path))
        if kind in ("trained", "trainer") or snapshot_file.looks_like_one(path):
            if config is not None:
                raise UserError("usage.explain_config", path=str(path))
            if kind == "trained":
                return run_of(directory).explanation
            return explain_directory(directory) if kind == "trainer" else snapshot_file.read(path)
    try:
        return log_of(source, config, gpu, tell=tell, listen=listen).explanation
    except UserError as error:
        if error.id != "data.log_unreadable" or not isinstance(source, str | Path):
            raise
        raise UserError("data.explain_unreadable", **error.values) from None


@dataclass(frozen=True)
class ExplainedRun:
    """An explained run. `plan`: from before it; `current`: of the micro-batch that it trained with in the end."""

    record: TrainedRun
    plan: Plan
    current: Plan
    check: ForecastCheck
    metrics: list[dict[str, Any]]
    explanation: RunExplanation


def run_of(directory: RunDirectory) -> ExplainedRun:
    record, made, check = of_directory(directory)
    metrics, current = directory.read_lines("metrics"), in_the_end(record, made)
    explanation = explain_run(record, current, metrics, directory.read_lines("events"))
    explanation = explanation.model_copy(update={"scores": directory.scores()})
    return ExplainedRun(record, made, current, check, metrics, explanation)


@dataclass(frozen=True)
class ExplainedLog:
    """A log as it was read, with the config and the card that it was explained with."""

    read: TrainingLog | None
    config: RunConfig | None
    gpu: Gpu | None
    explanation: LogExplanation


def log_of(
    source: str | Path | BinaryIO, config: Config | None = None, gpu: str = "auto", *,
    tell: Tell = lambda note: None, listen: Listen = lambda what: None,
) -> ExplainedLog:  # fmt: skip
    tuned = question(config[0], config[1:]) if isinstance(config, list) and is_asked(config) else None
    resolved = None if config is None or tuned else resolved_of(config)
    for note in resolved.notes if resolved else ():
        tell(note)
    given = read_given(source)
    read, watched = given.log, given.watched
    ran_out = ran_out_in(given.path) if given.path and not given.kept else None
    if given.problem and watched is None and (ran_out is None or given.problem.id == "data.log_unreadable"):
        raise given.problem  # a program that printed no steps still took memory and time
    own = tuned or given.config(resolved)
    card = devices.find_device(gpu, given.cards, tell)
    found = None
    if read is not None:
        found = analyse(read, name=given.name, config=own if isinstance(own, RunConfig) else None, gpu=card)
    failed = _of_failure(ran_out, read, own, card, listen)
    explanation = LogExplanation(log=found, watched=watched, **failed)
    return ExplainedLog(read, own if isinstance(own, RunConfig) else None, card, explanation)


def _of_failure(
    message: OutOfMemoryMessage | None,
    log: TrainingLog | None,
    config: RunConfig | FineTuneQuestion | None,
    gpu: Gpu | None,
    listen: Listen,
) -> dict[str, Any]:
    if message is None:
        return {}
    failed = failure(message)
    if message.program:
        return {"out_of_memory": (failed,), "unknown": "give_figures"}
    if config is None or gpu is None:
        both = config is None and gpu is None
        return {
            "out_of_memory": (failed,),
            "unknown": "give_config_gpu" if both else "give_gpu" if config else "give_config",
        }
    listen("searching")
    program = log.program if log else None
    if isinstance(config, FineTuneQuestion):
        return {"out_of_memory": (failed,), **finetune_saved_by(message, program, failed, config, gpu)}
    doubts = doubts_of(message, program, config, gpu)
    changes = () if doubts else saved_by(message, failed, config, gpu)
    return {"out_of_memory": (failed,), "remedies": changes, "doubts": doubts}


@dataclass(frozen=True)
class GivenLog:
    """`log`: None where no step is in it, and `problem` says why. `path`: of the log; None for a pipe."""

    log: TrainingLog | None
    problem: UserError | None
    path: Path | None
    watched: WatchedRun | None = None
    kept: Tracked | None = None

    @property
    def name(self) -> str:
        if self.watched or self.kept:
            return self.watched.id if self.watched else self.kept.name if self.kept else ""
        return self.path.name if self.path else "stdin"

    @property
    def cards(self) -> list[str]:
        """Return the cards that it names, those that somebody saw at work first."""
        seen = [card.name for card in self.watched.cards if card.ours_peak_bytes] if self.watched else []
        if self.kept and isinstance(card := self.kept.config.get("gpu"), str) and not card.startswith("CPU"):
            seen.append(card)
        return seen + ([self.log.header.gpu_name] if self.log and self.log.header.gpu_name else [])

    def config(self, resolved: ResolvedConfig | None) -> RunConfig | None:
        """Return the config as the user named it, else as the watched command or the tracker has it."""
        if resolved is None and self.kept:
            return of_tracked(self.kept)
        return config_of(resolved, self.log) or of_watched(self.watched.config if self.watched else None, self.log)


def is_tracked(path: Path) -> bool:
    return path.exists() and trackers.keeper_of(path) is not None


def read_given(source: str | Path | BinaryIO) -> GivenLog:
    if not isinstance(source, str | Path):
        return _read(lambda: read_stream(source, "stdin"), None)
    path = Path(source)
    if source_of(path) == "watched":
        watched, path = RunDirectory(path).record_of(WatchedRun), path / LOG
        return replace(_read(lambda: read_log(path), path), watched=watched)
    path, run = _with_run(path)
    if trackers.keeper_of(path):
        kept = trackers.read(path, run)
        return GivenLog(columns.log_of(kept, path), None, path, kept=kept)
    found = _read(lambda: read_log(path), path)
    if found.problem and found.problem.id == "data.log_unknown" and tables.claims(path, first_bytes(path, 4096)):
        return _read(lambda: _of_table(path, run), path)
    return found


def _of_table(path: Path, run: str | None) -> TrainingLog:
    roles = tables.by_step(read_table(path, run), path, {})
    roles["timestamp"] = tables.seconds_of(roles)
    roles["step_s"] = {step: ms / 1e3 for step, ms in roles.get("step_ms", {}).items()} | roles.get("step_s", {})
    rows: dict[int, dict[str, Any]] = {}
    for role, values in roles.items():
        for step, value in values.items():
            rows.setdefault(step, {"step": step})[NAMES[role][0]] = value
    return columns.log_of(Tracked("table", path.name, [rows[step] for step in sorted(rows)]), path)


def _with_run(path: Path) -> tuple[Path, str | None]:
    """Split a path and, behind +run=, which one of a tracker's runs."""
    before, sign, run = str(path).rpartition("+run=")
    return (Path(before), run) if sign and not path.exists() else (path, None)


def _read(how: Callable[[], TrainingLog], path: Path | None) -> GivenLog:
    try:
        return GivenLog(how(), None, path)
    except UserError as problem:
        return GivenLog(None, problem, path)

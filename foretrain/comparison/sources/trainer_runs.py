"""A Trainer's run with ForetrainCallback as a subject: everything in it was measured."""

from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.comparison import settings
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.runs import steady_times
from foretrain.comparison.subject import Curve, Memory, Subject, curve, exact
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import device_named
from foretrain.predict.plan import Note
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainerRun, folder_of, source_of


def claims(path: Path, head: bytes) -> bool:
    """A directory that ForetrainCallback made, or the record in it."""
    return source_of(folder_of(path)) == "trainer"


def load(given: Given) -> Subject:
    """The run. Raises UserError where its record is damaged."""
    if given.words:
        raise UserError("usage.source_has_config", path=given.path)
    directory = RunDirectory(folder_of(Path(given.path)))
    return of(given, directory.record_of(TrainerRun), directory.read_lines("metrics", whole=False))


def of(given: Given, record: TrainerRun, metrics: list[dict[str, Any]]) -> Subject:
    """A record that is read, with its lines."""
    steps = [line for line in metrics if line["kind"] == "step" and isinstance(line.get("step_s"), int | float)]
    times, since = steady_times([line["step"] for line in steps], [float(line["step_s"]) for line in steps])
    gpu, byte_share = _gpu(record), given.number("bytes_per_token", 0.01, 100)
    known = {**record.settings, "program": record.trainer, "parameters": record.n_params, **settings.of_gpu(gpu)}
    seconds = record.step_s if record.step_s is not None else None
    done = sum(1 for line in steps if line.get("tokens"))
    tokens = round(sum(line["tokens"] for line in steps if line.get("tokens")) / done) if done else None
    return Subject(
        label=given.label or record.name, path=given.path, kind="run", settings=known, gpu=gpu, tokens_per_step=tokens,
        bytes_per_token=byte_share, step_times_s=times, steps_since_start=since,
        step_s=exact(seconds) if seconds else None, step_source="measured" if seconds else None,
        used_by_others_bytes=given.held_bytes, memory=_memory(record), train=_curve(metrics, "log", "loss"),
        val=_curve(metrics, "evaluation", "val_loss"), wall_s=record.wall_s or None, notes=_notes(record),
    )  # fmt: skip


def _gpu(record: TrainerRun) -> Gpu | None:
    """The card, if it is in the catalogue; of a run on a CPU nothing, as it may have been another machine's."""
    try:
        return device_named(record.device) if record.kind == "cuda" else None
    except UserError:
        return None


def _memory(record: TrainerRun) -> Memory | None:
    """The highest moment: what the allocator reserved on a card, the process on a CPU."""
    phases = record.memory.phases
    if record.kind == "cuda":
        held = max((phase.reserved_bytes or 0 for phase in phases), default=0)
        what = "reserved"
    else:
        held, what = record.memory.process_peak_bytes or 0, "process"
    if not held:
        return None
    return Memory(low_bytes=held, expected_bytes=held, high_bytes=held, source="measured", what=what)


def _curve(metrics: list[dict[str, Any]], kind: str, key: str) -> Curve:
    points = [
        (line["step"], float(line[key]), line.get("elapsed_s"))
        for line in metrics
        if line["kind"] == kind and isinstance(line.get(key), int | float)
    ]
    return curve(points)


def _notes(record: TrainerRun) -> tuple[Note, ...]:
    if record.status == "finished":
        return ()
    return (Note(id="unfinished", values={"status": record.status, "steps": record.steps_done}),)

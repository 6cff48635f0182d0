"""Runs beside each other for the page: the report of a comparison as JSON, each run as far as it goes.

Files are read and nothing else (observe.py); what cannot be read is a sentence in its place, and the rest is compared.
"""

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.analysis.forecast_check import plan_of
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.comparison.compare import compare
from foretrain.comparison.loss_axes import gather
from foretrain.comparison.sources import runs as source
from foretrain.comparison.sources.request import SourceRequest
from foretrain.comparison.subject import Subject
from foretrain.reports.html import document_json
from foretrain.reports.views import compare as compare_view
from foretrain.runs.record import RunRecord, TrainedRun, TrainerRun
from foretrain.web import child
from foretrain.web.answers import SCHEMA, Made
from foretrain.web.observe import ObservedRun, said_of
from foretrain.web.runs import Runs, row


def made(chosen: Sequence[tuple[str, ObservedRun | None]]) -> dict[str, Any]:
    """`runs`: how each is, in the order of `chosen`; `document`: the comparison of those that can be read, or why there
    is none in `problem`; `command`: what makes a file of it. None in place of a run: the server has none of that id."""
    told, subjects = [], []
    for id, run in chosen:
        state, subject = _read(id, run)
        told.append(state)
        subjects += [subject] if subject else []
    answer = {"schema": SCHEMA, "runs": told, "document": None, "problem": "", "command": ""}
    if len(subjects) < 2:
        return {**answer, "problem": say("page.beside.too_few")}
    try:
        found = compare(subjects)
        facts = gather(subjects, found, ObservedRun)
    except UserError as error:
        return {**answer, "problem": printable(str(error))}
    except OSError as error:  # went away between two readings
        return {**answer, "problem": _unreadable(str(error.filename or ""), error)}
    document = compare_view.report(found, facts.losses, dict(facts.verdicts), facts.checks, facts.sources)
    command = shlex.join(["foretrain", "report", *(subject.path for subject in subjects)])
    return {**answer, "document": document_json(document), "command": printable(command)}


def of_paths(asked: list[tuple[str, str | None]]) -> dict[str, Any]:
    """`made` of ids and folders of runs, in a process of its own (child.py)."""
    return made([(id, ObservedRun(Path(path)) if path else None) for id, path in asked])


def _read(id: str, run: ObservedRun | None) -> tuple[dict[str, Any], Subject | None]:
    if run is None:
        return {"id": id, "name": "", "path": "", "notes": [], "problem": say("page.beside.gone")}, None
    state = {"id": id, **said_of(run, run.id), "notes": [], "problem": ""}
    try:
        record = run.any_record()
        if isinstance(record, TrainerRun):
            state |= said_of(run, record.name)
        subject = source.of(SourceRequest(path=str(run.path), label=state["name"]), run)
    except UserError as error:
        return {**state, "problem": printable(str(error))}, None
    except OSError as error:
        return {**state, "problem": _unreadable(str(run.path), error)}, None
    return {**row(id, run, record), **state, "notes": _notes(run, record)}, subject


def _unreadable(path: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    return printable(str(UserError("data.log_unreadable", path=path, reason=reason)))


def _notes(run: ObservedRun, record: RunRecord) -> list[str]:
    notes = [] if record.status == "finished" else [say("page.beside.so_far")]
    try:
        if isinstance(record, TrainedRun):
            plan_of(run.path, record)
    except UserError as error:
        notes.append(printable(str(error)))
    return notes


# Which runs are asked to be compared, and where that is done: small ones in a thread, large ones in a process.
#
# The metrics of a long run, parsed, take many times their size, and seconds in which sliders would stand still.

MOST = 4  # stand side by side in a table that can be read
LARGE_BYTES = 512 * 1024
TIMEOUT_S = 180.0


class Asked(Record):
    """Runs by the ids that the list of runs gave; the others are held against the first."""

    runs: Annotated[tuple[Annotated[StrictStr, Field(max_length=64)], ...], Field(min_length=2, max_length=MOST)]


class Comparer:
    """Compares runs of a server; of large ones one comparison at a time, the newest wins."""

    def __init__(self, known: Runs) -> None:
        self._known, self._turn = known, threading.Lock()
        self._child: child.Child | None = None

    def answer(self, asked: Asked) -> Made:
        """What the page shows of these runs. Raises UserError where the process ends without an answer."""
        found = self._known.all()
        chosen = [(id, found.get(id)) for id in asked.runs]
        if sum(_size(run) for _, run in chosen if run) <= LARGE_BYTES:
            return 200, made(chosen)
        self.stop()
        with self._turn:
            working = self._child = child.Child(
                "comparison", [[id, str(run.path) if run else None] for id, run in chosen]
            )
            if not working.finished(TIMEOUT_S):
                working.stop()
                raise UserError("page.failed", reason=f"{TIMEOUT_S:.0f} s")
            if working.failure:
                raise UserError("page.failed", reason=working.failure)
            status, answer = working.answer
            return status, answer

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


def _size(run: ObservedRun) -> int:
    try:
        return (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        return 0

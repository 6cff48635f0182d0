"""A run reported to the trackers that its config names. `trackers.json` beside it has the ids to go on with."""

import json
import time
from os import environ
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from foretrain.app.training.request import Ready
from foretrain.base.installation import installed
from foretrain.base.safe_read import read_text
from foretrain.config.options import OPTIONS
from foretrain.model.shape import ModelShape
from foretrain.training.notes import Listener, Note
from foretrain.training.trackers import TRACKERS
from foretrain.training.trackers.names import Namer
from foretrain.training.trackers.report import FINISH_S, TELL_S, Report
from foretrain.training.trackers.tracker import VERSION, Job, Tracker

IDS = "trackers.json"
PROJECT = "foretrain"  # where nothing names one


class Reporting:
    """The reports of one run; a context in which the run is made. Without trackers it does nothing.

    `planned_bytes`: the memory that the plan beside the run expects.
    """

    def __init__(self, ready: Ready, names: tuple[str, ...], listen: Listener, planned_bytes: float | None) -> None:
        self.directory, self.listen = ready.directory, listen
        self.ids = self._known_ids() if ready.resuming else {}
        self.reports: list[Report] = []
        before = self.directory.read_lines("metrics") if names and ready.resuming else []
        for name in names:
            job = _job(ready, TRACKERS[name], planned_bytes, self.ids.get(name))
            self.reports.append(Report(TRACKERS[name], job, Namer(planned_bytes), before if job.resumed else []))

    def __enter__(self) -> "Reporting":
        if self.reports:
            self.directory.followers.append(self._hear)
            self._tell()
        return self

    def __exit__(self, *_: object) -> None:
        if self.reports:
            self.directory.followers.remove(self._hear)
            self._end()

    def processor_s(self) -> float:
        """Processor seconds of the trackers' own processes, which are no other programs'."""
        return sum(report.processor_s for report in self.reports)

    def _hear(self, log: str, line: dict[str, Any]) -> None:
        if log == "metrics":
            for report in self.reports:
                report.hear(line)
            self._tell()

    def _tell(self) -> None:
        """What the trackers' threads have found since; and keep ids that are new."""
        for report in self.reports:
            while not report.told.empty():
                id, values = report.told.get()
                self.directory.event(id, **values)
                self.listen(Note(id, **values))
        ids = {report.tracker.name: report.id for report in self.reports if report.id}
        if not ids.items() <= self.ids.items():
            self.ids |= ids
            self._keep_ids()

    def _keep_ids(self) -> None:
        try:
            self.directory.write(IDS, json.dumps(self.ids, indent=1) + "\n")
        except OSError:  # a full disk: a resume is then reported as a new run
            return

    def _known_ids(self) -> dict[str, str]:
        try:
            found = json.loads(read_text(self.directory.path / IDS))
            return {name: id for name, id in found.items() if isinstance(id, str)}
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}

    def _end(self) -> None:
        """Tell the trackers how it ended, and wait a little for what they still have to send."""
        try:
            status = self.directory.read_record().status
        except Exception:
            status = "failed"
        try:
            for report in self.reports:
                report.begin_end(status)
            until = time.monotonic() + FINISH_S
            for report in self.reports:
                if not report.ended(TELL_S):
                    self.listen(Note("tracker_waiting", tracker=report.tracker.name, most=FINISH_S))
                    report.ended(max(0.0, until - time.monotonic()))
        finally:  # of Ctrl-C too
            for report in self.reports:
                report.give_up()
            self._tell()


def _job(ready: Ready, tracker: type[Tracker], planned_bytes: float | None, id: str | None) -> Job:
    """Named as nanoGPT's own two options say, where they are set."""
    config, placement = ready.resolved.config, ready.placement
    ran = config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    known: dict[str, Any] = {
        **ran.model_dump(), "dataset": without_secrets(config.dataset), "dataset_fingerprint": ready.info.fingerprint,
        "gpu": placement.gpu.name, "n_params": ModelShape.of(config).n_params,
        "tokens_per_step": config.tokens_per_step, VERSION: installed("foretrain"),
    }  # fmt: skip
    if planned_bytes:
        known["planned_memory_bytes"] = round(planned_bytes)
    project, name = (
        value if value != OPTIONS[option].default else ""
        for option, value in (("wandb_project", config.wandb_project), ("wandb_run_name", config.wandb_run_name))
    )
    project = project or environ.get(tracker.project or "", "") or PROJECT
    return Job(project, name or ready.directory.id, ready.directory.path.resolve(), known, id)


def without_secrets(dataset: str) -> str:
    """An address without a password, or a signature in its query."""
    if "://" not in dataset:
        return dataset
    parts = urlsplit(dataset)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

"""A training run from its config to its record: alone, or as one rank of several; with what it tells of itself."""

import json
import time
from dataclasses import replace
from os import environ
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch

from foretrain.app.training.ready import alone, together
from foretrain.app.training.request import Ready, Request
from foretrain.base.files import read_text
from foretrain.base.installation import installed
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.shape import ModelShape
from foretrain.data.remote import no_bar
from foretrain.predict.plan import Plan
from foretrain.runs.folder import Listener, Note, RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.runs.trackers import TRACKERS
from foretrain.runs.trackers.report import FINISH_S, TELL_S, Report
from foretrain.runs.trackers.tracker import VERSION, Job, Namer, Tracker
from foretrain.training.contention import Clock, Contention, Reading, own_s
from foretrain.training.device import Placement
from foretrain.training.ranks import Group, Ranks
from foretrain.training.trainer import Trainer

IDS = "trackers.json"
PROJECT = "foretrain"  # where nothing names one


class Reporting:
    """Reports a run, within, to its trackers, if any. `planned_bytes`: of the plan beside the run."""

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
        return sum(report.processor_s for report in self.reports)

    def _hear(self, log: str, line: dict[str, Any]) -> None:
        if log == "metrics":
            for report in self.reports:
                report.hear(line)
            self._tell()

    def _tell(self) -> None:
        """Report what the trackers' threads have found since, and keep ids that are new."""
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
    """Name the job by nanoGPT's own two options, where they are set."""
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
    if "://" not in dataset:
        return dataset
    parts = urlsplit(dataset)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def forecast(directory: RunDirectory, world: int) -> Plan | None:
    try:
        plan = Plan.from_json(read_text(directory.path / "plan.json"))
    except (OSError, ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    return plan if plan.world == world else None


def expected_times(plan: Plan | None) -> tuple[float, float] | None:
    if plan is None or (timing := plan.foretrain_timing) is None:
        return None
    return timing.step_s.expected_s, timing.evaluation_s.expected_s if timing.evaluation_s else 0.0


def expected_bytes(plan: Plan | None, *, on_card: bool) -> float | None:
    """Return the highest memory of a plan: what the allocator reserves on a card, else the process's."""
    if plan is None:
        return None
    memory = plan.memory_of("foretrain")
    context = memory.context.expected_bytes if on_card else 0
    return max(phase.needed_expected_bytes for phase in memory.phases) - context


def run(asked: Request) -> TrainedRun:
    if asked.place.world == 1:
        return _train(asked, alone(asked), Ranks())
    if not asked.place.first:
        asked = replace(asked, listen=lambda event: None, bar=no_bar)
    with Group(asked.place, asked.resolved.config.collective_timeout) as ranks:
        return _train(asked, together(asked, ranks), ranks)


def _train(asked: Request, ready: Ready | TrainedRun, ranks: Ranks) -> TrainedRun:
    if isinstance(ready, TrainedRun):  # there is nothing left to do
        return ready
    resolved, placement, directory, listen = ready.resolved, ready.placement, ready.directory, asked.listen
    try:
        listen(_start(directory, resolved, placement))
        if ranks.world > 1:
            listen(_shared(resolved.config, ranks.world))
        plan = forecast(directory, ranks.world)
        planned_bytes = expected_bytes(plan, on_card=placement.gpu.reserves)
        with Reporting(ready, asked.trackers if ranks.first else (), listen, planned_bytes) as reporting:
            trainer = Trainer(
                resolved.config, ready.info, directory, placement, listen, resolved.name, expected_times(plan),
                _contention(placement, asked.since, reporting) if ranks.world == 1 else None, ranks,
            )  # fmt: skip
            trainer.flag.ends_process = asked.ends_process
            record = trainer.run(resume=ready.resuming)
        listen(_end(directory, record))
        return record
    finally:
        directory.release()


def _start(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement) -> Note:
    config = resolved.config
    return Note(
        "train.start", name=resolved.name, params=ModelShape.of(config).n_params, device=placement.gpu.name,
        dtype=placement.dtype, compiled=placement.compiled, steps=config.max_iters, tokens=config.tokens_per_step,
        path=str(directory.path),
    )  # fmt: skip


def _shared(config: RunConfig, world: int) -> Note:
    own = config.gradient_accumulation_steps // world
    return Note("train.ranks", world=world, strategy=config.strategy, micro_batches=own, batch_size=config.batch_size)


def _end(directory: RunDirectory, record: TrainedRun) -> Note:
    return Note(
        f"train.{record.status}", path=str(directory.path), steps=record.steps_done, wall=record.wall_s,
        val=record.val_loss if record.val_loss is not None else float("nan"), reason=record.reason,
    )  # fmt: skip


def _contention(placement: Placement, since: Reading, reporting: Reporting) -> Contention | None:
    if placement.device.type != "cpu":
        return None
    clock = Clock(own=lambda: own_s() + reporting.processor_s())
    return Contention(torch.get_num_threads(), clock=clock, since=since)

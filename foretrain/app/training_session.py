"""A training run from its config to its record, alone or as one rank of several, of which the first makes it ready."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import environ
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch

from foretrain.advice.micro_batch import choose as choose_micro_batch
from foretrain.app.plan import make_plan
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.installation import installed, installed_torch
from foretrain.base.process_memory import resident_bytes
from foretrain.base.units import GIB
from foretrain.config.microbatches import in_parts, sequences_of, smaller_micro_batch, split_of, with_micro_batch
from foretrain.config.options import OPTIONS, RunConfig, step_options
from foretrain.config.resolve import ResolvedConfig, to_toml
from foretrain.config.shape import ModelShape
from foretrain.config.sharing import as_one_rank_of, config_of_all_ranks, config_of_rank
from foretrain.data import dataset
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.data.locate import locate, no_dataset
from foretrain.data.remote import Bar, fetch, no_bar
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import available_memory_bytes, total_memory_bytes
from foretrain.hardware.devices import Target, used_here_bytes
from foretrain.measure import trial as trials
from foretrain.measure.trial import Trial
from foretrain.predict.memory import MARGIN_BYTES, REFUSED, predict
from foretrain.predict.plan import SCHEMA, Plan, available
from foretrain.predict.ranks import of_run
from foretrain.predict.spec import StepSpec
from foretrain.runs import folder, state
from foretrain.runs.folder import Listener, Note, RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.runs.state import UNSAID, Label
from foretrain.runs.trackers import TRACKERS
from foretrain.runs.trackers.report import FINISH_S, TELL_S, Report
from foretrain.runs.trackers.tracker import VERSION, Job, Namer, Tracker
from foretrain.training import ranks as group
from foretrain.training import starting
from foretrain.training.contention import Clock, Contention, Reading, own_s
from foretrain.training.device import Placement, environment, give_back, keep_memory, place
from foretrain.training.place import ALONE, Place
from foretrain.training.ranks import FollowerDirectory, Group, Ranks
from foretrain.training.trainer import Trainer


@dataclass(frozen=True)
class Request:
    """What `train_resolved` is asked. `since`: the machine before torch was imported. `place`: of this rank.
    `trackers`: that the run is reported to."""

    resolved: ResolvedConfig
    resume: bool
    trial: bool
    listen: Listener
    bar: Bar
    ends_process: bool
    since: Reading
    trackers: tuple[str, ...]
    place: Place = ALONE
    label: Label = UNSAID


@dataclass(frozen=True)
class Ready:
    resolved: ResolvedConfig
    placement: Placement
    info: DatasetInfo
    directory: RunDirectory
    resuming: bool


# Linux grants memory that it does not have and later kills a process for it, so a run that cannot fit is refused by its
# forecast. Only what is certain is refused: the low end of what the run needs, in the dtype that needs least. A
# memory_limit as large as that is the user's word that it shall start all the same.
def check_memory(
    config: RunConfig, gpu: Gpu, *, compiled: bool, free: Callable[[], int | None] = available_memory_bytes
) -> None:
    """Raise UserError 'memory.machine…' where the run needs more than this process has and the machine has free."""
    left = free()
    if left is None:
        return
    left += resident_bytes() or 0
    dtypes: list[Dtype] = ["float32", "bfloat16"] if config.dtype == "auto" else [config.dtype]
    needs = min(_needs(config, gpu, dtype, compiled)[0] for dtype in dtypes)
    if needs <= left or needs <= (config.memory_limit_bytes or 0):
        return
    values = {"needs": needs, "free": left, "total": total_memory_bytes(), "limit": f"{-(-needs // GIB) + 1}GiB"}
    smaller = _fitting(config, gpu, dtypes[0], compiled, left)
    if smaller is None:
        raise UserError("memory.machine", **values)
    more = sequences_of(config) // smaller
    raise UserError("memory.machine_smaller", smaller=smaller, more=more, **values)


def _needs(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool) -> tuple[int, int]:
    """Return (low, expected) bytes of the run's need."""
    memory = predict(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled))
    return max(phase.needed_low_bytes for phase in memory.phases), memory.needed_bytes


def _fitting(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool, left: int) -> int | None:
    """Return the largest smaller micro-batch for the same training that fits with room to spare."""
    size = smaller_micro_batch(config.batch_size, sequences_of(config))
    while size is not None:
        if _needs(with_micro_batch(config, size), gpu, dtype, compiled)[1] + MARGIN_BYTES <= left:
            return size
        size = smaller_micro_batch(size, sequences_of(config))
    return None


KEPT = Cache("trials")


def _kept_at(config: RunConfig, placement: Placement) -> Path:
    calibration = placement.gpu.calibration
    driver = calibration.driver if calibration else ""
    return KEPT.path([step_options(config), placement.gpu.name, placement.dtype, driver, installed_torch()])


def _kept(path: Path, cap_bytes: int | None) -> Trial | None:
    """Return an earlier trial that still holds."""
    found = KEPT.record(path, Trial)
    holds = found is not None and found.lived and (cap_bytes is None or found.peak_bytes <= cap_bytes)
    return found if holds else None


def choose_batch(resolved: ResolvedConfig, placement: Placement, *, trial: bool, listen: Listener) -> ResolvedConfig:
    """Choose the micro-batch for this device. Raises UserError 'memory.trial' where not even one fits."""
    device = placement.device.type if placement.device.index is None else str(placement.device)
    config = resolved.config.model_copy(update={"device": device})
    room, _ = available(config, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    planned = config.model_copy(update={"compile": placement.compiled})
    choice = choose_micro_batch(planned, placement.gpu, placement.dtype, room)
    listen(Note(f"note.{choice.note.id}", **choice.note.values))
    config = config.model_copy(update=split_of(choice.config))
    if trial:
        config = tried(config, placement, room, listen)
    final = in_parts(resolved.config.model_copy(update=split_of(config)))
    sources = {**resolved.sources, **dict.fromkeys(split_of(config), "batch_size = auto")}
    return replace(resolved, config=final, sources=sources)


def tried(config: RunConfig, placement: Placement, cap_bytes: int | None, listen: Listener) -> RunConfig:
    """Return the config with a micro-batch that lives in a trial. Raises UserError 'memory.trial'."""
    while True:
        path, size = _kept_at(config, placement), config.batch_size
        found = _kept(path, cap_bytes)
        if found is not None:
            listen(Note("auto.kept", batch_size=size, peak=found.peak_bytes))
            return config
        listen(Note("auto.trying", batch_size=size))
        found = trials.run_trial(config, cap_bytes)
        if found.problem:
            listen(Note("auto.problem", problem=found.problem))
            return config
        if found.lived:
            listen(Note("auto.lived", batch_size=size, peak=found.peak_bytes))
            KEPT.keep(path, found.model_dump_json())
            return config
        smaller = smaller_micro_batch(size, sequences_of(config))
        if smaller is None:
            raise UserError("memory.trial", peak=found.peak_bytes, cap=cap_bytes or 0)
        listen(Note("auto.died", batch_size=size, smaller=smaller))
        config = with_micro_batch(config, smaller)


def choose(
    resolved: ResolvedConfig, placement: Placement, directory: RunDirectory, resuming: bool, world: int = 1
) -> tuple[ResolvedConfig, Placement]:
    """Decide what the config leaves open: as the run has it already, else measured."""
    given = set(resolved.sources)
    if world > 1:  # their gradients would be sent in half precision (config/sharing.py)
        given.add("master_weights")
    if resuming:
        chosen = starting.recall(resolved.config, placement, directory.read_record(), given)
    else:
        chosen = starting.spared_compiling(starting.decide(resolved.config, placement, given), given)
    return replace(resolved, config=chosen.config), chosen.placement


def pick_batch(resolved: ResolvedConfig, placement: Placement, asked: Request, world: int) -> ResolvedConfig:
    whole = resolved.config
    own = replace(resolved, config=config_of_rank(as_one_rank_of(whole, world), world))
    chosen = choose_batch(own, placement, trial=asked.trial, listen=asked.listen)
    return replace(chosen, config=config_of_all_ranks(chosen.config, world))


def write_inputs(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement, asked: Request) -> None:
    known = environment(placement)
    config = resolved.config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    planned = ResolvedConfig(config, {**resolved.sources, "vocab_size": "run"}, (), resolved.name)
    forecast = make_plan(planned, Target(placement.gpu, 0))
    if asked.place.world > 1:
        forecast = of_run(forecast, asked.place.world, asked.place.local_world)
    if resolved.config.memory_limit and forecast.verdict_of("foretrain") in REFUSED:
        # It starts all the same: it may shrink its micro-batch, and a CPU's limit is only watched.
        needs = max(phase.needed_low_bytes for phase in forecast.memory_of("foretrain").phases)
        if needs > (limit := resolved.config.memory_limit_bytes or 0):  # else it is the card that is too small
            asked.listen(Note("train.beyond_limit", needs=needs, limit=limit))
    directory.write("config.toml", to_toml(resolved.config))
    directory.write("environment.json", json.dumps(known, indent=1) + "\n")
    directory.write("plan.json", json.dumps(forecast.to_json(schema=SCHEMA)) + "\n")


def agreement_of(found: Ready | TrainedRun) -> dict[str, Any]:
    if isinstance(found, TrainedRun):
        return {"finished": found.model_dump_json()}
    return {
        "config": found.resolved.config.model_dump_json(), "dtype": found.placement.dtype,
        "compiled": found.placement.compiled, "path": str(found.directory.path.resolve()),
        "resuming": found.resuming, "fingerprint": found.info.fingerprint,
    }  # fmt: skip


def follow(asked: Request, placement: Placement, agreed: dict[str, Any], rank: int) -> Ready:
    config = RunConfig.from_json(agreed["config"])
    if placement.device.type == "cpu":
        keep_memory()
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
    resolved, info = prepare_data(replace(asked.resolved, config=config), asked.bar)
    if info.fingerprint != agreed["fingerprint"]:
        raise UserError("data.other_on_rank", path=info.path)
    directory = FollowerDirectory(Path(agreed["path"]), rank)
    own = replace(placement, dtype=agreed["dtype"], compiled=agreed["compiled"] and placement.compiled)
    return Ready(replace(resolved, config=config), own, info, directory, agreed["resuming"])


def already_finished(asked: Request) -> TrainedRun | None:
    if not asked.resume or (done := _finished(asked.resolved.config)) is None:
        return None
    record = done.read_record()
    values = {"path": str(done.path), "steps": record.steps_done, "total": asked.resolved.config.max_iters}
    asked.listen(Note("train.already_finished", **values))
    return record


def _steps_wanted(config: RunConfig) -> int:
    return 1 << 62 if config.eval_only else config.max_iters


def _finished(config: RunConfig) -> RunDirectory | None:
    if folder.newest_unfinished(config.out_dir, _steps_wanted(config)) is not None:
        return None
    return folder.newest(config.out_dir)


def check_start(resolved: ResolvedConfig, resume: bool) -> None:
    """Check what a run starts from, before its data. Raises UserError."""
    config = resolved.config
    if not resume:
        starting.find(config.init_from)
    elif folder.newest_unfinished(config.out_dir, _steps_wanted(config)) is None:
        left = folder.base_path(config.out_dir) / "ckpt.pt"
        if left.is_file():  # nanoGPT's own init_from = 'resume' means this file
            raise UserError("usage.resume_nanogpt", path=str(left))


def directory_of(resolved: ResolvedConfig, resume: bool, listen: Listener) -> tuple[RunDirectory, bool]:
    out_dir = resolved.config.out_dir
    if resume:
        found = folder.newest_unfinished(out_dir, _steps_wanted(resolved.config))
        if found is not None:
            found.acquire()
            return found, True
        listen(Note("train.nothing_to_resume", out_dir=out_dir))
    return folder.create(out_dir), False


def prepare_data(resolved: ResolvedConfig, bar: Bar = no_bar) -> tuple[ResolvedConfig, DatasetInfo]:
    """Find or make the dataset of a config, and check it against the model. Raises UserError."""
    config = resolved.config
    if config.dataset == dataset.BUILT_IN:
        info = prepare_built_in(config)
    else:
        found = locate(config.dataset)
        if found is None:
            raise no_dataset(config.dataset)
        info = found
        fetch(info, bar)
    if info.vocab_size and "vocab_size" not in resolved.sources:
        config = config.model_copy(update={"vocab_size": info.vocab_size})
        resolved = replace(resolved, config=config, sources={**resolved.sources, "vocab_size": info.path})
    dataset.check_usable(info, config.vocab_size, config.block_size, config.eval_block)
    return resolved, info


def alone(asked: Request) -> Ready | TrainedRun:
    return _first(asked, lambda: place(asked.resolved.config), 1)


def together(asked: Request, ranks: Group) -> Ready | TrainedRun:
    placement = group.placed(asked.resolved.config, ranks)
    if ranks.first:
        found = _first(asked, lambda: placement, ranks.world)
        ranks.agree(agreement_of(found), lambda words: words[0], patient=True)
        return found
    word = ranks.agree(None, lambda words: words[0], patient=True)
    return TrainedRun.from_json(word["finished"]) if "finished" in word else follow(asked, placement, word, ranks.rank)


def _first(asked: Request, placed: Callable[[], Placement], world: int) -> Ready | TrainedRun:
    if (done := already_finished(asked)) is not None:
        return done
    check_start(asked.resolved, asked.resume)
    return _ready(asked, placed(), world)


def _ready(asked: Request, placement: Placement, world: int) -> Ready:
    resolved, listen = asked.resolved, asked.listen
    if placement.device.type == "cpu":
        keep_memory()
    resolved, info = prepare_data(resolved, asked.bar)
    if placement.device.type == "cpu" and not resolved.config.auto_batch_size:  # which looks by itself
        check_memory(resolved.config, placement.gpu, compiled=placement.compiled)
    directory, resuming = directory_of(resolved, asked.resume, listen)
    try:
        directory.tell("starting")
        if asked.label:
            state.write(directory.path, state.read_label(directory.path).with_more(asked.label))
        resolved, placement = choose(resolved, placement, directory, resuming, world)
        give_back()  # what the measurements took is not the training's
        if resolved.config.auto_batch_size and not resuming:  # a resumed run goes on as it was
            resolved = pick_batch(resolved, placement, asked, world)
            split = (resolved.config.batch_size, resolved.config.gradient_accumulation_steps)
            directory.event("auto_batch", batch_size=split[0], accumulation=split[1])
        if not resuming:
            write_inputs(directory, resolved, placement, asked)
    except BaseException:
        directory.release()
        raise
    return Ready(resolved, placement, info, directory, resuming)


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
            while not report.events.empty():
                id, values = report.events.get()
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

"""What a run was and did, whoever trained it: `RunRecord`, which is run.json in the folder of a run. No torch.

run.json        the record, `"schema": "foretrain.run/1"`; replaced as a whole, at the start and the end, and by
                ForetrainCallback at each evaluation and save
metrics.jsonl   a line for each step and evaluation, {"kind": "step", "step", …}; null where unknown
events.jsonl    what happened: {"at", "id", "values"}
plan.json       the forecast from before the first step, where there is one

`foretrain watch` adds output.log, the command's whole output, and samples.jsonl: {"elapsed_s", "cpu_s", "rss_bytes",
"processes", "cards": [CardSample, …]} at intervals that grow beyond an hour. Of a Trainer's processes only the first
writes, with its own card's figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Note, Record
from foretrain.config.options import RunConfig
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import Dtype, Gpu

SCORES_SCHEMA = "foretrain.scores/1"


class TextScore(Record):
    """How well a text was predicted. `loss`: nats per token over `tokens`; `bits_per_byte`: over `size_bytes` of UTF-8.
    `standard_error`: of bits_per_byte, from the differences of windows. `whole`: all of it was scored."""

    text: str
    sha256: str
    size_bytes: int
    tokens: int
    loss: float
    bits_per_byte: float
    standard_error: float | None
    windows: int
    context_tokens: int
    stride_tokens: int
    whole: bool
    device: str
    dtype: str
    at: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what identifies the measurement; another checkpoint's has another result."""
        return self.sha256, self.tokens, self.context_tokens, self.stride_tokens


class TaskScore(Record):
    """One metric of an lm-eval task. `shots`: examples before each question. `through`: a "model" or a "folder"."""

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    higher_is_better: bool | None
    shots: int | None
    documents: int | None
    documents_in_all: int | None
    version: str
    harness: str
    through: str
    device: str
    dtype: str
    at: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.task, self.metric, self.filter, self.shots, self.documents, self.version


class Scores(Record):
    """All measurements of one checkpoint. `weights_sha256`: over the checksums of its weights."""

    checkpoint: str
    step: int
    weights_sha256: str
    texts: tuple[TextScore, ...] = ()
    tasks: tuple[TaskScore, ...] = ()

    def with_more(self, more: Scores) -> Scores:
        """Add more of the same checkpoint; repeated measurements are replaced, and all where the weights are others."""
        if more.weights_sha256 != self.weights_sha256:
            return more
        texts = {score.key: score for score in (*self.texts, *more.texts)}
        tasks = {score.key: score for score in (*self.tasks, *more.tasks)}
        return more.model_copy(update={"texts": tuple(texts.values()), "tasks": tuple(tasks.values())})


class Evaluation(Record):
    """Result of one `foretrain eval`. `skipped`: newer damaged checkpoints; `kept_in`: a file beside the run."""

    source: str
    checkpoint: str | None
    step: int | None
    device: str
    texts: tuple[TextScore, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    kept_in: str | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


SCHEMA = "foretrain.run/1"
RECORD, PLAN, LOG = "run.json", "plan.json", "output.log"
CROWDED = 0.1  # of the cores that training wants, used by others: below that a forecast's range covers it
Source = Literal["trained", "watched", "trainer"]
Status = Literal["running", "finished", "interrupted", "stopped", "diverged", "failed", "killed"]
Setting = bool | int | float | str


class MeasuredPhase(Record):
    phase: str
    allocated_bytes: int | None
    reserved_bytes: int | None = None
    process_bytes: int | None = None


class MeasuredMemory(Record):
    """Measured memory. `saved_bytes`: by autograd, of a micro-batch; `process_peak_bytes`: of the host's process."""

    method: str
    phases: tuple[MeasuredPhase, ...] = ()
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    saved_bytes: int | None = None
    process_base_bytes: int | None = None
    process_peak_bytes: int | None = None
    limit_bytes: int | None = None

    def phase(self, name: str) -> MeasuredPhase | None:
        return next((phase for phase in self.phases if phase.phase == name), None)


class MachineLoad(Record):
    """Processor use by others, as shares of all usable cores. `stalls`: steps in which a thread waited long for its
    turn; `stalled_s`: their loss."""

    cores: int
    threads: int
    others_share: float
    own_share: float
    stalls: int = 0
    stalled_s: float = 0.0

    @property
    def busy(self) -> bool:
        return crowded(self.others_share * self.cores, self.cores, self.threads)


class RankFigures(Record):
    """One rank's own measurements, as of the last evaluation. `evaluated_s`: of its part of that, forward passes only,
    without waits but with FSDP; `step_s`: with waits."""

    rank: int
    card: str
    host: str = ""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    step_s: float | None = None
    data_wait_s: float | None = None
    evaluated_s: float = 0.0
    evaluated_tokens: int = 0


def crowded(others: float, cores: int, threads: int) -> bool:
    wanted = min(threads, cores)
    return others - (cores - wanted) > CROWDED * wanted


class RunRecord(Record):
    """One run, trained by foretrain, watched by it, or a Trainer's with ForetrainCallback: see `source`. `reason`: what
    ended an unfinished run. Losses are mean nats per token; `val_loss` and `last_loss` are the last ones. `step_s` and
    `tokens_per_s` are medians without the first steps."""

    source: Source
    id: str
    name: str
    status: Status
    reason: str = ""
    started_at: str
    ended_at: str | None = None
    wall_s: float = 0.0
    n_params: int = 0
    steps_done: int = 0
    resumed_from: tuple[int, ...] = ()
    step_s: float | None = None
    tokens_per_s: float | None = None
    evaluation_s: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    memory: MeasuredMemory = MeasuredMemory(method="none")

    @property
    def device_name(self) -> str:
        return ""

    @property
    def steps_asked(self) -> int | None:
        return None

    @property
    def reserves(self) -> bool:
        """Return whether its allocator reserves memory, so that reserved bytes count."""
        return False

    @property
    def highest_bytes(self) -> int | None:
        """Return the allocator's reserved peak on a GPU, the process's on a CPU, which may lie between two phases."""
        return self._highest(self.memory.phases)

    def _highest(self, parts: tuple[MeasuredPhase | RankFigures, ...]) -> int | None:
        if self.reserves:
            found = [part.reserved_bytes for part in parts]
        else:
            found = [*(part.process_bytes for part in parts), self.memory.process_peak_bytes]
        return max((size for size in found if size), default=None)


class TrainedRun(RunRecord):
    source: Source = "trained"
    config: RunConfig
    gpu: Gpu
    dtype: Dtype
    compiled: bool
    threads: int | None = None  # of a run on a CPU
    dataset: DatasetInfo
    skipped_checkpoints: tuple[str, ...] = ()  # of the last resume: newer ones that are damaged, and why
    shrunk_from: int | None = None  # the batch_size before memory ran out
    first_val_loss: float | None = None
    mfu: float | None = None
    data_wait_s: float | None = None  # waiting for batches, per step; a mean without the first three steps
    machine: MachineLoad | None = None  # of a run on a CPU: what other programs used of it
    world: int = 1  # ranks that trained; memory is the first one's
    ranks: tuple[RankFigures, ...] = ()  # of several
    worlds: tuple[tuple[int, int], ...] = ()  # (from which step, ranks), where a resume changed their number

    @property
    def device_name(self) -> str:
        return self.gpu.name

    @property
    def steps_asked(self) -> int | None:
        return self.config.max_iters

    @property
    def reserves(self) -> bool:
        return self.gpu.reserves

    @property
    def highest_bytes(self) -> int | None:
        return self._highest((*self.memory.phases, *self.ranks))

    @property
    def world_from(self) -> int:
        return self.worlds[-1][0] if self.worlds else 0

    @property
    def per_node(self) -> int:
        return sum(rank.host == self.ranks[0].host for rank in self.ranks) or self.world

    @property
    def devices(self) -> int:
        return max(1, self.world // self.per_node) if self.gpu.kind == "cpu" else self.world


class WatchedCard(Record):
    """One card over the run. `ours`: held by the command's processes; `others`: the rest that was in use. `by`: NVML's
    list of processes, or the level before the command began. `reasons`: the share of busy samples in which NVML named
    each reason for a lower clock. Clock, power and utilisation are means over busy samples."""

    index: int
    name: str
    driver: str = ""
    total_bytes: int | None = None
    before_bytes: int | None = None
    used_peak_bytes: int | None = None
    ours_peak_bytes: int | None = None
    used_by_others_peak_bytes: int | None = None
    by: Literal["processes", "rise", "nothing"] = "nothing"
    busy: float | None = None
    clock_ghz: float | None = None
    clock_max_ghz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_by: Literal["counter", "power", "nothing"] = "nothing"
    temperature_max_c: int | None = None
    reasons: dict[str, float] = Field(default_factory=dict)


class WatchedRun(RunRecord):
    """A command that `foretrain watch` measured. `exit_code` is the command's, 128 + signal where a signal ended it.
    `steps_done`: counted in its output; `last_step`: the number of the last one. `cpu_s`, `rss_peak_bytes`: of the
    command and its descendants; shared pages count for each. `sampling_s`: time spent on samples."""

    source: Source = "watched"
    command: tuple[str, ...]
    exit_code: int | None = None
    signal: str = ""
    interval_s: float
    samples: int = 0
    sampling_s: float = 0.0
    cpu_s: float | None = None
    rss_peak_bytes: int | None = None
    processes: int = 0
    cards: tuple[WatchedCard, ...] = ()
    nvml_problem: str = ""
    config: RunConfig | None = None
    log_format: str | None = None
    log_bytes: int = 0
    log_kept_bytes: int = 0
    last_step: int | None = None

    @property
    def busiest(self) -> WatchedCard | None:
        return max(self.cards, key=lambda one: one.ours_peak_bytes or 0, default=None)

    @property
    def device_name(self) -> str:
        return self.busiest.name if self.busiest and self.busiest.ours_peak_bytes else ""

    @property
    def steps_asked(self) -> int | None:
        return self.config.max_iters if self.config else None

    @property
    def highest_bytes(self) -> int | None:
        return (self.busiest.ours_peak_bytes if self.busiest else None) or self.rss_peak_bytes


class TrainerRun(RunRecord):
    """A run of a Trainer with ForetrainCallback, of `cards` processes on devices of `kind`. `seq_len`: the longest
    batch. `step_s` is without each start's first step, `tokens_per_s` counts padding."""

    source: Source = "trainer"
    trainer: str
    versions: dict[str, str] = Field(default_factory=dict)
    device: str
    kind: str
    cards: int = 1
    settings: dict[str, Setting] = Field(default_factory=dict)
    n_trained: int = 0
    seq_len: int | None = None
    max_steps: int | None = None
    tokens: int = 0
    first_step_s: float | None = None
    save_s: float | None = None
    first_loss: float | None = None
    forecast_problem: str = ""

    @property
    def device_name(self) -> str:
        return self.device

    @property
    def steps_asked(self) -> int | None:
        return self.max_steps

    @property
    def reserves(self) -> bool:
        return self.kind == "cuda"


KINDS: dict[Any, type[RunRecord]] = {"trained": TrainedRun, "watched": WatchedRun, "trainer": TrainerRun}


def folder_of(path: Path) -> Path:
    return path.parent if path.name == RECORD and not path.is_dir() else path


def source_of(folder: Path) -> Source | None:
    """Return who made the run in a folder; None where there is none. A damaged record counts as foretrain's own."""
    if not (folder / RECORD).is_file():
        return None
    try:
        return _kind_of(json.loads(read_text(folder / RECORD))).model_fields["source"].default
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return "trained"


def _kind_of(data: Any) -> type[RunRecord]:
    return KINDS.get(data.get("source"), TrainedRun)


def read(folder: Path) -> RunRecord:
    file = folder / RECORD
    try:
        text = read_text(file)
        return _kind_of(json.loads(text)).from_json(text)
    except (OSError, UnicodeDecodeError):
        raise UserError("data.no_run", path=str(folder)) from None
    except (ValidationError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError("data.bad_run", path=str(file), reason=str(error).splitlines()[0]) from None

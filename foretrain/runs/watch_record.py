"""What `foretrain watch` leaves behind: a directory with watch.json, and how it is read.

    watch.json      the record below, `"schema": "foretrain.watch/1"`; replaced as a whole, at the start and the end
    output.log      everything that the command wrote, both streams in the order in which they came, unchanged
    metrics.jsonl   a line for each step and evaluation that the output told of, with `elapsed_s`, when it came:
                    {"kind": "step", "step", "loss", "step_s", "tokens_per_s", "learning_rate", "elapsed_s"},
                    {"kind": "evaluation", "step", "val_loss", "elapsed_s"}; null where the line does not say;
                    "tokens_per_gpu_s" where the program prints those of one GPU
    samples.jsonl   {"elapsed_s", "cpu_s", "rss_bytes", "processes", "cards": [CardSample, …]}, each interval of an
                    hour's run, further apart in a longer one; peaks and means are of all samples all the same

Facts that only foretrain's own training knows (dataset, weights, measured phases) are in no such record, so it is no
foretrain.run/1. `config` is there where the command names one that can be read as data, as nanoGPT's does.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from foretrain.base.files import replace_text
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.runs.folder import RunDirectory, folders_with, record_in

SCHEMA = "foretrain.watch/1"
RECORD, LOG = "watch.json", "output.log"
Status = Literal["running", "finished", "failed", "stopped", "killed"]


class WatchedCard(Record):
    """One card over the run. `ours`: what the command's processes held; `others`: the rest that was in use.

    `by`: how ours and others were told apart: NVML's list of processes, or, where that says nothing, what was in use
    beyond what was before the command began. `reasons`: the share of the samples with work on the card in which NVML
    named each reason for a lower clock. Clock, power and utilisation are means over those samples.
    """

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


class WatchRecord(Record):
    """One watched command. `exit_code` is what the command's was, 128 + signal where a signal ended it.

    `cpu_s`, `rss_peak_bytes`: of the command and its descendants; pages that processes share count for each.
    `sampling_s`: time that taking the samples took; `nvml_problem`: the last thing that NVML did not answer.
    """

    id: str
    command: tuple[str, ...]
    status: Status
    exit_code: int | None = None
    signal: str = ""
    started_at: str
    ended_at: str | None = None
    wall_s: float = 0.0
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
    steps: int = 0
    last_step: int | None = None
    step_s: float | None = None
    last_loss: float | None = None
    last_val_loss: float | None = None


def write(directory: RunDirectory, record: WatchRecord) -> None:
    replace_text(directory.path / RECORD, json.dumps(record.to_json(schema=SCHEMA), indent=1) + "\n")


def is_watched(path: Path) -> bool:
    """Whether a directory is one that `foretrain watch` made."""
    return (path / RECORD).is_file()


def read(path: Path, directory: RunDirectory | None = None) -> WatchRecord:
    """The record of a directory; one that says running without its lock was killed. `directory`: one that looks at the
    lock in another way. Raises UserError."""
    record = record_in(path / RECORD, WatchRecord)
    if record.status == "running" and not (directory or RunDirectory(path)).is_locked():
        return record.model_copy(update={"status": "killed"})
    return record


def find(roots: list[Path]) -> list[Path]:
    """Every watched run in these directories and the two levels below them, by path."""
    return folders_with(RECORD, roots)

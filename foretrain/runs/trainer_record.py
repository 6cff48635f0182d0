"""What ForetrainCallback leaves of a Trainer's run: a directory with trainer.json, and how it is read. No torch.

    trainer.json    the record below, `"schema": "foretrain.trainer-run/1"`; replaced as a whole, at the start, at each
                    evaluation and save, and at the end
    plan.json       the forecast from before the first step, `"schema": "foretrain.finetune/1"`; missing where there
                    is none, and `forecast_problem` says why
    metrics.jsonl   {"kind": "step", "step", "step_s", "tokens", "elapsed_s", "memory_bytes"} of each optimizer step,
                    {"kind": "log", "step", "loss", "learning_rate", "grad_norm", "elapsed_s"} of each log line,
                    {"kind": "evaluation", "step", "val_loss", "evaluation_s", "elapsed_s"}; null where nobody said it
    events.jsonl    resumed, saved, out_of_memory, ended

Only the first process of several writes, and its figures are of its own card.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field

from foretrain.base.files import read_bytes, replace_text
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.runs.folder import MeasuredMemory, RunDirectory, folders_with, record_in

SCHEMA = "foretrain.trainer-run/1"
RECORD, PLAN = "trainer.json", "plan.json"
_MOST_BYTES = 512 * MIB
Status = Literal["running", "finished", "failed", "stopped", "killed"]
Setting = bool | int | float | str


class TrainerRunRecord(Record):
    """One run of a Trainer. `reason`: what ended it, where it did not finish.

    `settings`: the options as the forecast has them, and the learning rate; `seq_len`: the longest batch that came;
    `cards`: how many processes train. `step_s` is the median without the first step of each start, `tokens_per_s` of
    the same steps with padding; `first_step_s`: of the first step. Losses are means in nats a token.
    """

    id: str
    name: str
    status: Status
    reason: str = ""
    started_at: str
    ended_at: str | None = None
    wall_s: float = 0.0
    trainer: str
    versions: dict[str, str] = Field(default_factory=dict)
    device: str
    kind: str
    cards: int = 1
    settings: dict[str, Setting] = Field(default_factory=dict)
    n_params: int = 0
    n_trained: int = 0
    seq_len: int | None = None
    max_steps: int | None = None
    steps_done: int = 0
    resumed_from: tuple[int, ...] = ()
    tokens: int = 0
    first_step_s: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    evaluation_s: float | None = None
    save_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    last_val_loss: float | None = None
    best_val_loss: float | None = None
    memory: MeasuredMemory = MeasuredMemory(method="none")
    forecast_problem: str = ""
    problems: tuple[str, ...] = ()


def write(directory: RunDirectory, record: TrainerRunRecord) -> None:
    replace_text(directory.path / RECORD, json.dumps(record.to_json(schema=SCHEMA), indent=1) + "\n")


def is_one(path: Path) -> bool:
    """Whether a directory is one that the callback made."""
    return (path / RECORD).is_file()


def read(path: Path, directory: RunDirectory | None = None) -> TrainerRunRecord:
    """The record of a directory; one that says running without its lock was killed. `directory`: one that looks at the
    lock in another way. Raises UserError."""
    record = record_in(path / RECORD, TrainerRunRecord)
    if record.status == "running" and not (directory or RunDirectory(path)).is_locked():
        return _up_to_its_end(record, path).model_copy(update={"status": "killed"})
    return record


def _up_to_its_end(record: TrainerRunRecord, path: Path) -> TrainerRunRecord:
    """The record of a run that could not write its last one, with what its lines tell."""
    steps = lines(path, "step")
    times = [line["step_s"] for line in steps if isinstance(line.get("step_s"), int | float)]
    ended = [line["elapsed_s"] for line in steps if isinstance(line.get("elapsed_s"), int | float)]
    found = {
        "steps_done": max([record.steps_done, *(line["step"] for line in steps)]),
        "wall_s": float(max([record.wall_s, *ended])), "step_s": median(times[1:]) if times[1:] else record.step_s,
    }  # fmt: skip
    return record.model_copy(update=found)


def find(roots: list[Path]) -> list[Path]:
    """Every such run in these directories and the two levels below them, by path."""
    return folders_with(RECORD, roots)


def lines(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, of one kind where it is named; those that a crash has spoilt are left out."""
    return [line for line in _lines(path / "metrics.jsonl") if not kind or line["kind"] == kind]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    for text in read_bytes(file, _MOST_BYTES).decode("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
            if isinstance(line["kind"], str) and isinstance(line["step"], int):
                yield line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue


def drop_after(path: Path, step: int) -> None:
    """Forget what was written of later steps than this one, which a resumed run does again."""
    kept = [line for line in lines(path) if line["step"] <= step]
    replace_text(path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))

"""Made-up records of runs, as reports read them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from foretrain.app import run_report
from foretrain.config.resolve import resolve
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.reports.document import Document
from foretrain.reports.views import run as run_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import MeasuredMemory, MeasuredPhase, TrainedRun

HOSTILE = '</script><img src=x onerror=alert(1)> & "quotes" \x1b[31m {braces} ${dollar} $title'


def record(**changes: object) -> TrainedRun:
    config = resolve(["baby"]).config
    values = {
        "id": "out-baby", "name": "baby", "status": "finished", "started_at": "2026-11-21T04:00:00+00:00",
        "config": config, "gpu": cpu_device(), "dtype": "float32", "compiled": False, "n_params": 836_736,
        "dataset": DatasetInfo(name="x", path="nowhere", train_tokens=10, val_tokens=10), "steps_done": 1200,
        "first_val_loss": 5.3, "val_loss": 1.5, "step_s": 0.08, "tokens_per_s": 25_000.0, "mfu": 0.4, "wall_s": 99.0,
        "evaluation_s": 0.5,
        "memory": MeasuredMemory(
            method="test", weights_bytes=3_346_944, optimizer_bytes=6_693_996, saved_bytes=71_615_492,
            gradients_bytes=3_346_944,
            phases=(MeasuredPhase(phase="steady_step", allocated_bytes=85_850_748, process_bytes=4 * 10**8),),
        ),
        **changes,
    }  # fmt: skip
    return TrainedRun.model_validate(values)


def write_run(folder: Path, **changes: object) -> RunDirectory:
    folder.mkdir(parents=True, exist_ok=True)
    directory = RunDirectory(folder)
    directory.write_record(record(**changes))
    speed = {"grad_norm": 1.0, "learning_rate": 1e-3, "step_s": 0.08, "tokens_per_s": 25_000.0, "mfu": 0.4,
             "memory_bytes": 4 * 10**8, "eta_s": 0.0}  # fmt: skip
    evaluations = [
        {"kind": "evaluation", "step": step, "train_loss": train, "val_loss": val, "evaluation_s": 0.5, "best": True}
        for step, train, val in ((0, 5.31, 5.3), (2, 1.4, 1.5))
    ]
    steps = [
        {"kind": "step", "step": step, "loss": loss, "elapsed_s": 1.0 + step, **speed}
        for step, loss in enumerate((5.3, 4.9))
    ]
    for line in (evaluations[0], *steps, evaluations[1]):
        directory.append("metrics", line)
    return directory


def run_document(folder: Path, sample: str | None = "def f():", **changes: object) -> Document:
    return run_view.report(replace(run_report.gather(write_run(folder, **changes), sample), unigram=3.1))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


CARD = "RTX 4070"


def gpu_lines(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        hot = 300 <= i < 320 or i == 700
        yield {
            "elapsed_s": 1.0 + i, "tokens_per_s": 100.0, "mfu": 0.3, "power_w": 190.0, "temperature_c": 80 + hot,
            "clock_ghz": 2.1 if hot else 2.7, "clock_reasons": ["thermal"] if hot else ["idle"], "memory_bytes": 2**30,
        }  # fmt: skip


def write_long_run(folder: Path, steps: int, name: str = "long") -> Path:
    folder.mkdir()
    RunDirectory(folder).write_record(record(name=name, gpu=find(CARD), dtype="bfloat16", steps_done=steps))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step, vitals in enumerate(gpu_lines(steps)):
            if step % 50 == 0:
                line = {"kind": "evaluation", "step": step, "train_loss": 4.0, "val_loss": 4 + 1 / (step + 1),
                        "evaluation_s": 0.5, "best": True}  # fmt: skip
                file.write(json.dumps(line) + "\n")
            line = {"kind": "step", "step": step, "loss": 3 + 100 / (step + 100) + step % 7 / 50, "grad_norm": 1.0,
                    "learning_rate": 1e-3, "step_s": 0.9, "eta_s": 0.0, **vitals}  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return folder

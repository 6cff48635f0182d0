"""Fine-tuning plans against what others measured on a GPU: peak memory and tokens a second of transformers' Trainer.

The rows are foundation-model-stack/fms-acceleration's benchmarks on one A100 80GB (fine-tuning with TRL's trainer, flash
attention 2, checkpointing): each names its row there. Kernels that a row adds (`foak-fast-kernels`) are not planned,
and peft and transformers were older than those that the plans follow. `python benchmarks/finetune_measured.py`
"""

import json
import statistics
from pathlib import Path
from typing import Any

from common import arguments, report

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import estimated
from foretrain.predict.finetune.time import step_s

ROWS = Path(__file__).with_name("finetune_published.json")


def predicted(row: dict[str, Any]) -> float:
    """Allocated bytes at the peak, or tokens a second, whichever the row measured."""
    source, gpu = find_source(row["model"]), find_gpu(row["gpu"])
    assert source.facts is not None
    tune = FineTune.model_validate(row["options"])
    if row["kind"] == "peak_allocated_bytes":
        return estimated(source.facts, tune, gpu).memory.worst.allocated_bytes
    found = step_s(source.facts, tune, gpu)
    assert found is not None
    return tune.tokens_per_step / found[0].expected_s


def main() -> None:
    """The table, and the medians of the absolute errors."""
    args = arguments("finetune_measured", "fine-tuning plans against measurements on a GPU")
    errors: dict[str, list[float]] = {}
    shown, answers = [], []
    for row in json.loads(ROWS.read_text("utf-8"))["rows"]:
        value = predicted(row)
        error = value / row["measured"] - 1
        plain = "plain" if row["kernels"] == "none" else "other kernels"
        errors.setdefault(f"{row['kind']}, {plain}", []).append(error)
        t = row["options"]
        shown.append([
            row["id"], row["model"], t["method"], row["kernels"], f"{t['batch_size']} x {t['seq_len']}", row["kind"],
            f"{value:.4g}", f"{row['measured']:.4g}", f"{error:+.1%}",
        ])  # fmt: skip
        answers.append({"id": row["id"], "kind": row["kind"], "predicted": value, "measured": row["measured"]})
    medians = {name: statistics.median(map(abs, found)) for name, found in errors.items()}
    shown += [
        [name, "", "", "", "", "", "", f"{len(errors[name])} rows", f"{each:.1%}"] for name, each in medians.items()
    ]
    columns = ["row", "model", "method", "kernels", "batch", "what", "predicted", "measured", "error"]
    report(
        args.out,
        "Fine-tuning plans against what others measured on a GPU",
        columns,
        shown,
        {"rows": answers, "median_absolute_error": medians},
    )


if __name__ == "__main__":
    main()

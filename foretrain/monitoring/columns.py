"""What trackers and their users call the figures of a run: role -> names of columns, the surest first."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# A time is taken only where its unit is known.
NAMES: dict[str, tuple[str, ...]] = {
    "step": (  # wandb's own _step counts calls
        "train/global_step", "trainer/global_step", "iter", "_step", "step", "Step", "iteration", "global_step",
    ),
    "train_loss": (
        "train/loss", "train_loss", "loss", "loss/train", "training_loss", "train/train_loss", "train_loss_step",
        "train/loss_step",
    ),
    "val_loss": (
        "val/loss", "val_loss", "eval/loss", "eval_loss", "valid/loss", "valid_loss", "validation_loss",
        "validation/loss", "loss/val",
    ),
    "val_bpb": ("val/bpb", "val_bpb"),
    "step_s": ("step_s", "step_time_s", "train/dt", "train/step_time_s", "iter_time"),
    "step_ms": ("step_ms", "dt_ms", "step_time_ms", "time_ms", "iter_time_ms"),
    "tokens": ("tokens", "train/tokens", "total_tokens", "num_input_tokens_seen", "train/num_input_tokens_seen"),
    "tokens_per_s": (
        "tokens_per_s", "tokens_per_sec", "tok_per_sec", "train/tok_per_sec", "tokens_per_second",
        "train/tokens_per_second", "train/tokens_per_sec", "throughput/tokens_per_sec",
    ),
    "seconds": ("train/elapsed_s", "_runtime", "total_training_time", "elapsed_s", "Relative Time (Process)"),
    "timestamp": ("_timestamp", "timestamp", "Wall time"),
}  # fmt: skip


LOSSES = ("train_loss", "val_loss", "val_bpb")


def column_of(role: str, columns: Mapping[str, int], chosen: Mapping[str, str] | None = None) -> str | None:
    """The column of this role: the one that was chosen for it, else the first of NAMES that is there.

    `columns`: each with how many values it has. Of losses the one with most counts: the Trainer's mean over the whole
    run, a single value, has a name that others give to a curve.
    """
    if chosen and chosen.get(role) in columns:
        return chosen[role]
    found = [name for name in NAMES[role] if name in columns]
    return max(found, key=lambda name: columns[name] if role in LOSSES else 0, default=None)


def counts_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(name for row in rows for name in row))

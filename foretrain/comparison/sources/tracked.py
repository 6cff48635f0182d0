"""A run that a tracker has kept as a subject: its folder or file, read as its export would be; of ours with the config.

Values of TensorBoard's are float32, as its files have them; those of the others are what the run wrote.
"""

from dataclasses import replace
from pathlib import Path

from foretrain.analysis.log_config import of_tracked
from foretrain.base.errors import UserError
from foretrain.comparison.sources import tables
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.predicted import with_forecast
from foretrain.comparison.sources.table_file import wide
from foretrain.comparison.subject import Subject
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import device_named
from foretrain.runs import trackers
from foretrain.runs.columns import LOSSES, NAMES, column_of, counts_of
from foretrain.runs.record import folder_of, source_of
from foretrain.runs.trackers.tracker import Row, Tracked, without_undone


def claims(path: Path, head: bytes) -> bool:
    """What a tracker has written; a run's own directory says more. Raises UserError for damage."""
    return source_of(folder_of(path)) is None and trackers.keeper_of(path) is not None


def load(given: Given) -> Subject:
    """The run. Raises UserError where it is damaged, or its library is missing."""
    path = Path(given.path)
    kept = trackers.read(path, given.own.get("run"))
    step = column_of("step", counts_of(kept.rows), given.columns)
    rows = [_with_one_step(row, step) for row in without_undone(kept.rows, step)] if step else kept.rows
    roles = tables.by_step(wide(rows, path), path, given.columns)
    if not any(roles.get(role) for role in LOSSES):
        raise UserError("data.table_no_losses", path=given.path)
    given = given if given.label else replace(given, label=kept.name)
    return _with_config(tables.subject_of(given, roles), given, kept)


def _with_one_step(row: Row, step: str) -> Row:
    """The row with this step alone: a tracker counts its calls beside the run's own steps."""
    return {"step": row[step]} | {name: value for name, value in row.items() if name not in NAMES["step"]}


def _with_config(subject: Subject, given: Given, kept: Tracked) -> Subject:
    """With what the tracker knows of its config, where the user gave none."""
    config = of_tracked(kept) if given.resolved is None else None
    if config is None:
        return subject
    gpu = given.card or _gpu(kept)
    tokens = given.number("tokens_per_step", 1, 10**13)
    subject = replace(subject, gpu=gpu, tokens_per_step=int(tokens) if tokens else config.tokens_per_step)
    return with_forecast(subject, config, gpu, "foretrain" if kept.is_ours else "nanogpt")


def _gpu(kept: Tracked) -> Gpu | None:
    """The card that the run names, if it is in the catalogue."""
    try:
        return device_named(str(kept.config["gpu"])) if "gpu" in kept.config else None
    except UserError:
        return None

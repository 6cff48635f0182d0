"""A run that `foretrain watch` measured from outside, as a subject: its log, and the memory that was seen."""

from dataclasses import replace
from pathlib import Path

from foretrain.analysis.log_config import config_of, of_watched
from foretrain.base.errors import UserError
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.logs import of_log
from foretrain.comparison.sources.predicted import here
from foretrain.comparison.subject import Memory, Subject
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import device_named
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import LOG, WatchedCard, WatchedRun, folder_of, source_of
from foretrain.runs.training_log import read_log


def claims(path: Path, head: bytes) -> bool:
    """A directory that watch made, or the record in it."""
    return source_of(folder_of(path)) == "watched"


def load(given: Given) -> Subject:
    """The watched run. Raises UserError where its record is damaged, or its output is no training log."""
    path = folder_of(Path(given.path))
    record = RunDirectory(path).record_of(WatchedRun)
    log = read_log(path / LOG)
    config = None
    if log.program.has_config:
        config = config_of(given.resolved, log, here) or of_watched(record.config, log)
    used = record.busiest
    subject = of_log(given, log, config, _known(used))
    others = (
        used.used_by_others_peak_bytes
        if used and "used_by_others" not in given.own and not given.used_by_others_bytes
        else None
    )
    return replace(
        subject, memory=_memory(record, used) or subject.memory, wall_s=record.wall_s or subject.wall_s,
        used_by_others_bytes=subject.used_by_others_bytes if others is None else others,
    )  # fmt: skip


def _known(used: WatchedCard | None) -> Gpu | None:
    """The card that did the work, if it is in the catalogue."""
    try:
        return device_named(used.name) if used is not None and used.ours_peak_bytes else None
    except UserError:
        return None


def _memory(record: WatchedRun, used: WatchedCard | None) -> Memory | None:
    """What the processes held at most: on the card, or without one in the computer's memory."""
    held = (used.ours_peak_bytes if used is not None else None) or record.rss_peak_bytes
    if not held:
        return None
    return Memory(low_bytes=held, expected_bytes=held, high_bytes=held, source="measured", what="process")

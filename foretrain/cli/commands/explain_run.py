"""`foretrain explain` of what is more than a log: a run, a watched run, a memory snapshot, memory that ran out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.base import oom_message
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.base.safe_read import read_bytes
from foretrain.cli.common import OUT, print_json, working

if TYPE_CHECKING:
    from foretrain.advice.remedies import Remedy
    from foretrain.analysis.log_analysis import LogAnalysis
    from foretrain.analysis.run import OutOfMemory
    from foretrain.config.options import RunConfig
    from foretrain.hardware.catalogue import Gpu
    from foretrain.monitoring.record import WatchRecord

TAIL_BYTES = 1 << 18  # of a log; where memory ran out it says so at its end


def explained(path: Path, *, as_json: bool, with_config: bool) -> bool:
    """Explain a run directory or a snapshot; false where the path is neither, or a watched run. Raises UserError."""
    from foretrain.analysis import snapshot_file

    if (path / "run.json").is_file():
        _refuse_config(path, with_config)
        _run(path, as_json=as_json)
        return True
    if snapshot_file.looks_like_one(path):
        _refuse_config(path, with_config)
        _snapshot(path, as_json=as_json)
        return True
    return False


def _refuse_config(path: Path, with_config: bool) -> None:
    if with_config:
        raise UserError("usage.explain_config", path=str(path))


def _run(path: Path, *, as_json: bool) -> None:
    from foretrain.analysis.forecast import plan_of
    from foretrain.analysis.run import SCHEMA, explain_run
    from foretrain.predict.plan import plan
    from foretrain.reports import text
    from foretrain.reports.views import run_explain as run_explain_view
    from foretrain.training.store import RunDirectory

    directory = RunDirectory(path)
    record = directory.read_record()
    with working(say("working.explaining", path=str(path))):
        made = plan_of(path, record)
        if record.shrunk_from is not None:  # the forecast was of a micro-batch that did not last
            config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
            made = plan(config, record.gpu, name=record.name)
        found = explain_run(record, made, directory.read_lines("metrics"), directory.read_lines("events"))
    if as_json:
        print_json(found.to_json(schema=SCHEMA))
    else:
        text.render(run_explain_view.document(found), OUT)


def _snapshot(path: Path, *, as_json: bool) -> None:
    from foretrain.analysis import snapshot_file
    from foretrain.analysis.snapshot_analysis import SCHEMA
    from foretrain.reports import text
    from foretrain.reports.views import snapshot as snapshot_view

    with working(say("working.explaining", path=str(path))):
        found = snapshot_file.read(path)
    if as_json:
        print_json(found.to_json(schema=SCHEMA))
    else:
        text.render(snapshot_view.document(found), OUT)


# -- logs and watched runs -----------------------------------------------------------------------------------


def watched(path: Path) -> tuple[WatchRecord | None, Path]:
    """(the record, the log) of a directory that `foretrain watch` made; (None, the path) of anything else."""
    from foretrain.monitoring import record as watch_record

    if not watch_record.is_watched(path):
        return None, path
    return watch_record.read(path), path / watch_record.LOG


def ran_out(log: Path) -> oom_message.OutOfMemoryMessage | None:
    """What the end of a log says of memory that ran out."""
    try:
        return oom_message.parse(read_bytes(log, 2 * TAIL_BYTES, last_bytes=TAIL_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def failures(
    message: oom_message.OutOfMemoryMessage | None, config: RunConfig | None, gpu: Gpu | None
) -> tuple[tuple[OutOfMemory, ...], tuple[Remedy, ...]]:
    """(the failure, what would have saved it): the second where the config and the card are known."""
    from foretrain.advice.remedies import remedies
    from foretrain.analysis.run import failure_of

    if message is None:
        return (), ()
    values = {key: value for key, value in message.to_json().items() if value is not None}
    allocated, unused = values.get("allocated_bytes"), values.get("unused_bytes")
    if allocated is not None and unused is not None:
        values["reserved_bytes"] = allocated + unused
    if {"card_bytes", "free_bytes", "process_bytes"} <= set(values):
        held = values["card_bytes"] - values["free_bytes"] - values["process_bytes"]
        values["used_by_others_bytes"] = max(0, held)
    failure = failure_of(values).model_copy(update={"fatal": True})
    if config is None or gpu is None:
        return (failure,), ()
    others, over = failure.used_by_others_bytes or 0, failure.over_bytes or 0
    with working(say("working.searching")):
        found = remedies(config, gpu, used_by_others_bytes=others, over_bytes=over, step="nanogpt")
    return (failure,), found


def show(
    found: LogAnalysis | None, record: WatchRecord | None,
    ended: tuple[tuple[OutOfMemory, ...], tuple[Remedy, ...]], *, as_json: bool,
) -> None:  # fmt: skip
    """A log, a watched run with or without steps in its log, or a log that says no more than that memory ran out."""
    from foretrain.analysis.log_analysis import SCHEMA
    from foretrain.reports import text
    from foretrain.reports.views import run_explain as run_explain_view

    out, changes = ended
    if as_json:
        extra: dict[str, Any] = {"watch": record.to_json() if record else None} if record or not found else {}
        if out:
            extra["out_of_memory"] = out[-1].to_json()
            extra["remedies"] = [remedy.to_json() for remedy in changes]
        print_json({**(found.to_json(schema=SCHEMA) if found else {"schema": SCHEMA}), **extra})
    else:
        text.render(run_explain_view.of_log(found, record, out, changes), OUT)

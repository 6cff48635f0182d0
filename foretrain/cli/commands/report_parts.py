"""What `foretrain report` makes a document of: one function for each kind of source, and how the file is written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.base.errors import UserError
from foretrain.base.safe_read import head, read_text
from foretrain.cli.commands.plan_exact import Depth, deepen, trace_of
from foretrain.cli.common import print_notes
from foretrain.cli.old_options import typed
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware import devices
from foretrain.hardware.catalogue import stated_bytes

if TYPE_CHECKING:
    from foretrain.comparison.sources.given import Given
    from foretrain.predict.memory import StepName
    from foretrain.predict.plan import Plan
    from foretrain.predict.step_moments import StepMoments
    from foretrain.reports.document import Document
    from foretrain.tuning.record import Tuning

OURS = '<meta name="generator" content="foretrain">'
HEAD_BYTES = 4096


@dataclass(frozen=True)
class Asked:
    """What the user typed. `knobs`: `--key=value` over the config of a plan or a log."""

    sources: list[str]
    knobs: list[str]
    gpu: str
    others: str
    price: str | None
    exact: bool
    quiet: bool


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(sources, knobs) of the words; `--key value` is one knob, as in plan."""
    sources: list[str] = []
    knobs: list[str] = []
    waiting = False
    for word in words:
        if waiting and not word.startswith("--"):
            knobs.append(word)
            waiting = False
        elif word.startswith("--"):
            knobs.append(word)
            knob = OPTIONS.get(word[2:].replace("-", "_"))
            waiting = "=" not in word and (knob is None or knob.type != "bool")
        else:
            sources.append(word)
    return sources, knobs


# -- documents -----------------------------------------------------------------------------------------------


def run(path: Path, sample: str | None = None) -> "Document":
    """Of a run directory. Raises UserError."""
    from foretrain.app.run_report import gather
    from foretrain.reports.views import run_report

    return run_report.document(gather(path, sample))


def plan(resolved: ResolvedConfig, asked: Asked, one: "Given", now: datetime) -> "Document":
    """Of a config on one card. Raises UserError."""
    from foretrain.app.plan import targets
    from foretrain.cli.commands.plan import make_plans
    from foretrain.cli.commands.plan_limits import Limits, priced

    limits = Limits(price=asked.price, given=frozenset(resolved.sources))
    resolved = priced(resolved, limits)
    others = one.own.get("used_by_others", asked.others)
    found = targets(one.own.get("gpu", asked.gpu), others, resolved.config, typed("--used-by-others"))
    if len(found) > 1:
        raise UserError("usage.report_cards", count=len(found))
    made = make_plans(resolved, found, limits, None, None)[0]
    tuning = _tuning(resolved.files[-1].with_suffix(".json")) if resolved.files else None
    return _of_plan(made, made.step, asked, now, tuning)


def plan_file(path: Path, asked: Asked, now: datetime) -> "Document":
    """Of what `foretrain plan --json` wrote. Raises UserError."""
    from foretrain.comparison.sources.plans import read

    made = read(path)
    return _of_plan(made, made.step, asked, now, None)


def _of_plan(made: "Plan", step: "StepName", asked: Asked, now: datetime, tuning: "Tuning | None") -> "Document":
    from foretrain.advice.advisor import short_list
    from foretrain.advice.outlook import outlook
    from foretrain.reports.views import plan_report

    traced = None
    if asked.exact:
        depth = Depth(exact=True, quiet=asked.quiet)
        made = deepen(made, depth)
        traced = _traced(made, step, depth)
    advice = short_list(made, step)
    return plan_report.document(made, outlook(made, step, traced=traced, tuning=tuning), now, advice)


def _traced(made: "Plan", step: "StepName", depth: Depth) -> "StepMoments | None":
    from foretrain.predict.step_moments import traced_moments

    trace = trace_of(made, step, depth)
    return traced_moments(trace, step, min(2, made.config.gradient_accumulation_steps)) if trace else None


def _tuning(path: Path) -> "Tuning | None":
    """What `foretrain tune --write` left beside the config; anything else there is not its business."""
    from pydantic import ValidationError

    from foretrain.tuning.record import SCHEMA, Tuning

    try:
        text = read_text(path)
        if json.loads(text).get("schema") == SCHEMA:
            return Tuning.from_json(text)
    except (OSError, ValueError, ValidationError, AttributeError, RecursionError):
        return None
    return None


def snapshot(path: Path) -> "Document":
    """Of a memory snapshot, as `foretrain explain` tells it. Raises UserError."""
    from foretrain.analysis import snapshot_file
    from foretrain.reports.views import snapshot as snapshot_view

    return snapshot_view.document(snapshot_file.read(path))


def log(path: Path, one: "Given", asked: Asked) -> "Document":
    """Of a log, or a watched run. Raises UserError where there is nothing in it that can be told."""
    from foretrain.app.explain import log_of
    from foretrain.app.log_report import gather
    from foretrain.reports.views import log_report

    explained = log_of(
        path, [*one.words, *asked.knobs] or None, one.own.get("gpu", asked.gpu),
        tell=lambda note: print_notes((note,), quiet=asked.quiet),
    )  # fmt: skip
    found = explained.explanation
    facts = gather(path, explained)
    return log_report.document(found.log, found.watched, found.out_of_memory, found.remedies, facts)


def comparison(asked: Asked) -> "Document":
    """Of several sources, as `foretrain compare` reads them. Raises UserError."""
    from foretrain.cli.commands.compare import with_rents
    from foretrain.comparison.compare import compare
    from foretrain.comparison.pictures import gather
    from foretrain.comparison.sources import subjects_of
    from foretrain.reports.views import compare_report

    card = devices.found(asked.gpu)
    held = stated_bytes(asked.others, typed("--used-by-others")) if asked.others else 0
    tell = partial(print_notes, quiet=asked.quiet)
    subjects = with_rents(subjects_of(asked.sources, tell, gpu=card, used_by_others_bytes=held), asked.price)
    found = compare(subjects)
    facts = gather(subjects, found)
    return compare_report.document(found, facts.losses, dict(facts.verdicts), facts.checks, facts.sources)


# -- what a path is -------------------------------------------------------------------------------------------


def is_watched(path: Path) -> bool:
    """A directory that `foretrain watch` made."""
    from foretrain.monitoring import record as watch_record

    return watch_record.is_watched(path)


def is_plan(path: Path) -> bool:
    """A file that `foretrain plan --json` wrote, or a run's plan.json."""
    from foretrain.comparison.sources import plans

    return plans.claims(path, head(path, HEAD_BYTES))


def is_snapshot(path: Path) -> bool:
    """A memory snapshot of PyTorch."""
    from foretrain.analysis import snapshot_file

    return snapshot_file.looks_like_one(path)


# -- the file -------------------------------------------------------------------------------------------------


def checked_target(path: Path) -> Path:
    """The path, if a report may be written there: only a report is ever written over. Raises UserError."""
    try:
        if path.is_dir():
            reason = "it is a folder"
        elif path.exists() and not _is_report(path):
            reason = "there is a file already that is no report of foretrain"
        elif not path.resolve().parent.is_dir():
            reason = "its folder is not there"
        else:
            return path
    except (OSError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no usable path"
    raise UserError("usage.cannot_write_file", path=str(path), reason=reason)


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return str(path) == "/dev/null"
    text = head(path, HEAD_BYTES).decode("utf-8", "replace")
    return not text or OURS in text or (text.startswith("<!doctype html>") and "Content-Security-Policy" in text)


def write(document: "Document", path: Path) -> Path:
    """Write a document as one HTML file; returns its path. Raises UserError."""
    import errno

    from foretrain.reports import html

    try:
        path.write_text(html.render(document), "utf-8")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError("disk.full_output") from None
        raise UserError("environment.cannot_write", path=str(path), reason=error.strerror or "") from None
    return path

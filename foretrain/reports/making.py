"""A report of whatever a run can be read from: one document, and its file. `foretrain.report` for Python."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from foretrain.advice.advisor import short_list
from foretrain.advice.outlook import outlook
from foretrain.analysis import snapshot_file
from foretrain.analysis.run import explain_directory
from foretrain.app import exact, run_report
from foretrain.app.compare import compared
from foretrain.app.explain import is_tracked, log_of
from foretrain.app.limits import Limits
from foretrain.app.plan import Cards
from foretrain.app.planning import kind_of, request_of
from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes, not_written, read_text
from foretrain.comparison.loss_axes import gather, loss_curves
from foretrain.comparison.sources import plans, runs
from foretrain.comparison.sources.request import SourceRequest, take_apart
from foretrain.measure.tune_record import SCHEMA as TUNING_SCHEMA
from foretrain.measure.tune_record import Tuning
from foretrain.predict.forecast import Forecast
from foretrain.predict.plan import Plan
from foretrain.predict.pretraining import of_plan
from foretrain.reports import html
from foretrain.reports.document import Document
from foretrain.reports.shown import whole
from foretrain.reports.views import compare, document_of
from foretrain.reports.views import run as run_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RECORD, folder_of, source_of

OURS = '<meta name="generator" content="foretrain">'
HEAD_BYTES = 4096

Tell = Callable[[tuple[UserError, ...]], None]


@dataclass(frozen=True)
class Asked:
    """What a report is of. `sources`: as `compare` takes them; `options`: `--key=value` over a config."""

    sources: Sequence[str]
    options: Sequence[str] = ()
    cards: Cards = field(default_factory=Cards)
    price: str | None = None
    exact: bool = False
    tell: Tell = lambda notes: None
    listen: Callable[[str], None] = lambda state: None


def report(
    *sources: str | Path,
    out: str | Path | None = None,
    gpu: str = "auto",
    gpus: str = "",
    used_by_others: str = "",
    price: str | None = None,
    exact: bool = False,
) -> Path:
    """The path of one offline HTML file about a run, a plan, a log, what a tracker keeps, a snapshot, or two and
    more of them compared.

    `sources`, `gpu`, `used_by_others`, `price`: as in `compare`. `gpus`: cards that train one model together.
    `out`: the file; None: report.html in a run's folder,
    else report-NAME.html here; only an earlier report is overwritten. `exact`: a plan's step is traced.
    Raises UserError for what cannot be read or written.
    """
    asked = Asked([str(source) for source in sources], (), Cards(gpus, gpu, others=used_by_others), price, exact)
    target = checked_target(Path(out) if out is not None else default_target(asked.sources))
    return write(document(asked)[1], target)


def default_target(sources: Sequence[str]) -> Path:
    if len(sources) == 1 and Path(sources[0]).is_dir() and not is_tracked(Path(sources[0])):
        return Path(sources[0]) / "report.html"
    names = [take_apart(source).name for source in sources[:3]]
    word = "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in name) for name in names)
    return Path(f"report-{word[:60] or 'run'}.html")


def document(asked: Asked) -> tuple[str, Document]:
    if not asked.sources:
        raise UserError("usage.report_nothing")
    one = take_apart(asked.sources[0])
    path = Path(one.path)
    planned = len(asked.sources) == 1 and is_planned(path)
    if asked.cards.gpus and not planned:
        raise UserError("usage.report_unused", option="--gpus", path=one.path)
    if len(asked.sources) > 1:
        if asked.options:
            raise UserError("usage.report_knobs", option=asked.options[0].partition("=")[0])
        return "comparison", _comparison(asked)
    source = source_of(folder_of(path))
    if source in ("trained", "trainer") or (source is None and path.name == RECORD):
        _no_config(asked, one)
        _unused(asked, one, "price", "others", "exact")
        return "run", run(folder_of(path))
    tracked = is_tracked(path)
    if path.is_dir() and not tracked and source != "watched":
        raise UserError("data.no_run", path=str(path))
    if planned:
        return "plan", _plan(asked, one)
    if plans.claims(path, first_bytes(path, HEAD_BYTES)):  # of `foretrain plan --json`, or a run's plan.json
        _no_config(asked, one)
        made = plans.read(path)
        if isinstance(made, Plan):
            return "plan", _of_plan(of_plan(made), asked, None)
        _unused(asked, one, "exact")
        return "plan", whole(made)
    if snapshot_file.looks_like_one(path):
        _no_config(asked, one)
        _unused(asked, one, "price", "others", "exact")
        return "snapshot", document_of(snapshot_file.read(path))
    _unused(asked, one, "price", "others", "exact")
    words = [*one.words, *asked.options]
    if tracked and "run" in one.own:
        path = Path(f"{path}+run={one.own['run']}")
    return "log", _log(path, words, one.own.get("gpu", asked.cards.gpu), asked.tell)


def is_planned(path: Path) -> bool:
    """Return whether a source is a config or the name of a preset or model."""
    return path.suffix in (".toml", ".py") or not path.exists()


def _unused(asked: Asked, one: SourceRequest, *options: str) -> None:
    """Options that such a report has no use for, right or wrong, are refused. Raises UserError."""
    for option in options:
        given = asked.cards.others if option == "others" else getattr(asked, option)
        if given if option != "price" else given is not None:
            spelled = "--used-by-others" if option == "others" else f"--{option}"
            raise UserError("usage.report_unused", option=spelled, path=one.path)


def _no_config(asked: Asked, one: SourceRequest) -> None:
    if asked.options or one.words or one.own:
        raise UserError("usage.report_config", path=one.path)


def run(run: Path | RunDirectory, sample: str | None = None) -> Document:
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    if source_of(directory.path) != "trainer":
        return run_view.report(run_report.gather(directory, sample))
    subject = runs.of(SourceRequest(path=str(directory.path)), directory)
    return document_of(explain_directory(directory), loss_curves([subject]))


def _log(path: Path, words: Sequence[str], gpu: str, tell: Callable[[tuple[UserError, ...]], None]) -> Document:
    explained = log_of(path, list(words) or None, gpu, tell=lambda note: tell((note,)))
    return document_of(explained.explanation, run_report.gather_log(path, explained))


def _plan(asked: Asked, one: SourceRequest) -> Document:
    words = [one.path, *one.words, *asked.options]
    gpu, others = one.own.get("gpu", asked.cards.gpu), one.own.get("used_by_others", asked.cards.others)
    cards = replace(asked.cards, gpu=gpu, others=others)
    request = request_of(kind_of(words, cards), words, cards)
    asked.tell(tuple(note for note in request.notes if isinstance(note, UserError)))
    made, *more = request.forecasts(Limits(asked.price))
    if more:
        raise UserError("usage.report_cards", count=1 + len(more))
    if isinstance(made.plan, Plan):
        return _of_plan(made, asked, _tuning(request.files[-1].with_suffix(".json")) if request.files else None)
    return whole((exact.traced(made, asked.listen) if asked.exact else made).plan)


def _of_plan(found: Forecast, asked: Asked, tuning: Tuning | None) -> Document:
    moments = None
    if asked.exact:
        found = exact.traced(found, asked.listen)
        moments = exact.moments_of(found, asked.listen)
    made = found.plan
    assert isinstance(made, Plan)
    around = outlook(made, made.step, traced=moments, tuning=tuning)
    return document_of(made, short_list(made, made.step), datetime.now(), around)


def _tuning(path: Path) -> Tuning | None:
    try:
        text = read_text(path)
        if json.loads(text).get("schema") == TUNING_SCHEMA:
            return Tuning.from_json(text)
    except (OSError, ValueError, ValidationError, AttributeError, RecursionError):
        return None
    return None


def _comparison(asked: Asked) -> Document:
    made = compared(
        asked.sources, gpu=asked.cards.gpu, used_by_others=asked.cards.others, price=asked.price, tell=asked.tell,
        option="--used-by-others",
    )  # fmt: skip
    found, facts = made.comparison, gather(made.subjects, made.comparison)
    return compare.report(found, facts.losses, dict(facts.verdicts), facts.checks, facts.sources)


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
    text = first_bytes(path, HEAD_BYTES).decode("utf-8", "replace")
    return not text or OURS in text or (text.startswith("<!doctype html>") and "Content-Security-Policy" in text)


def write(document: "Document", path: Path) -> Path:
    """Write a document as one HTML file, as a whole or not at all; returns its path. Raises UserError."""
    text, target = html.render(document), path.resolve()
    whole = not target.exists() or target.is_file()  # else a device, which nothing can stand beside
    staged = target.with_name(f".{target.name}.{os.getpid()}") if whole else target
    try:
        staged.write_text(text, "utf-8")
        if whole:
            staged.replace(target)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        if whole:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
    return path

"""`foretrain runs` and `report`: what was trained, and how it went against the forecast."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from foretrain.cli.common import ERR, OUT, Json, Quiet, noted, print_json
from foretrain.errors import UserError

RUNS_EPILOG = """Examples:

foretrain runs

foretrain runs ~/experiments --json"""
REPORT_EPILOG = """Examples:

foretrain report out-baby

foretrain report out-baby --out baby.html --open"""

RunPath = Annotated[Path, typer.Argument(help="A run directory; `foretrain runs` lists them.", metavar="RUN")]


def add_to(app: typer.Typer) -> None:
    app.command("runs", epilog=RUNS_EPILOG)(runs_command)
    app.command("report", epilog=REPORT_EPILOG)(report_command)


def runs_command(
    folders: Annotated[list[Path] | None, typer.Argument(help="Where to look; two levels deep.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, watched ones too: status, steps, loss, speed."""
    from foretrain.report.document import Document
    from foretrain.run import store, watch_record

    for folder in folders or []:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    found, unreadable = [], []
    for directory in store.find_runs(folders or [Path()]):
        try:
            found.append((directory, directory.read_record()))
        except UserError as error:
            unreadable.append(error)
    seen = []
    for path in watch_record.find(folders or [Path()]):
        try:
            seen.append((path, watch_record.read(path)))
        except UserError as error:
            unreadable.append(error)
    for error in unreadable:
        ERR.print(noted(error), soft_wrap=True)
    if as_json:
        runs = [{"path": str(d.path), **r.to_json(schema=store.SCHEMA)} for d, r in found]
        print_json(
            {
                "schema": "foretrain.runs/1", "runs": runs,
                "watched": [{"path": str(p), **r.to_json(schema=watch_record.SCHEMA)} for p, r in seen],
            }
        )  # fmt: skip
        return
    from foretrain.report import run_view, text, watch_view

    document = run_view.runs_document(found)
    if seen:
        watched = [watch_view.list_section(seen)]
        document = Document(document.title, document.subtitle, [*(document.sections if found else []), *watched])
    text.render(document, OUT)


def report_command(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The file to write; RUN/report.html without it.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One HTML file that opens offline: loss, memory and time, predicted against measured."""
    path = write_report(run, out or run / "report.html")
    if as_json:
        print_json({"schema": "foretrain.report/1", "path": str(path)})
    elif not quiet:
        OUT.print(Text(str(path)), soft_wrap=True)
    if open_it:
        typer.launch(path.resolve().as_uri())


def load(run: Path) -> tuple[Any, Any]:
    """(plan, comparison) of a run; the plan that was made before it, or the same plan made now."""
    from foretrain.advise.forecast import plan_of
    from foretrain.advise.forecast_check import compare
    from foretrain.run.store import RunDirectory

    record = RunDirectory(run).read_record()
    plan = plan_of(run, record)
    return plan, compare(plan, record)


def write_report(run: Path, out: Path, sample: str | None = None) -> Path:
    """Write the report of a run as one HTML file; returns its path. Raises UserError."""
    from foretrain.lm.statistics import unigram_entropy
    from foretrain.report import html, run_view
    from foretrain.run.store import RunDirectory

    directory = RunDirectory(run)
    record = directory.read_record()
    plan, comparison = load(run)
    unigram = unigram_entropy(record.dataset)
    metrics = directory.read_lines("metrics")
    if sample is None and (run / "sample.txt").is_file():
        sample = (run / "sample.txt").read_text("utf-8", "replace")
    document = run_view.report_document(record, metrics, plan, comparison, sample, unigram)
    try:
        out.write_text(html.render(document), "utf-8")
    except OSError as error:
        raise UserError("usage.cannot_write_file", path=str(out), reason=error.strerror or "") from None
    return out

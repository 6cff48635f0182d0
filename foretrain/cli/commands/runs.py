"""`foretrain runs`: what was trained; and a run against its forecast, for other commands."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foretrain.analysis.forecast_check import of_directory
from foretrain.analysis.measured_step import with_measured_step
from foretrain.base.errors import UserError
from foretrain.cli.common import ERR, OUT, Json, noted, print_json
from foretrain.monitoring import record as watch_record
from foretrain.monitoring import trainer_record
from foretrain.reports import text
from foretrain.reports.document import Document
from foretrain.reports.views import run as run_view
from foretrain.reports.views import watch as watch_view
from foretrain.reports.views.finetune import run as trainer_view
from foretrain.training import store
from foretrain.training.store import RunDirectory

RUNS_EPILOG = """Examples:

foretrain runs

foretrain runs ~/experiments --json"""
RunPath = Annotated[Path, typer.Argument(help="A run directory; `foretrain runs` lists them.", metavar="RUN")]


def add_to(app: typer.Typer) -> None:
    app.command("runs", epilog=RUNS_EPILOG)(runs_command)


def runs_command(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders to search, two levels deep.")] = None,
    as_json: Json = False,
) -> None:
    """List runs and watched runs: status, steps, loss, speed."""

    for folder in folders or []:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    found, unreadable = [], []
    for directory in store.find_runs(folders or [Path()]):
        try:
            found.append((directory, with_measured_step(directory, directory.read_record())))
        except UserError as error:
            unreadable.append(error)
    seen = []
    for path in watch_record.find(folders or [Path()]):
        try:
            seen.append((path, watch_record.read(path)))
        except UserError as error:
            unreadable.append(error)
    trainers = []
    for path in trainer_record.find(folders or [Path()]):
        try:
            trainers.append((path, trainer_record.read(path)))
        except UserError as error:
            unreadable.append(error)
    for error in unreadable:
        ERR.print(noted(error), soft_wrap=True)
    if as_json:
        runs = [
            {"path": str(d.path), **r.to_json(schema=store.SCHEMA), "scores": [each.to_json() for each in d.scores()]}
            for d, r in found
        ]
        print_json(
            {
                "schema": "foretrain.runs/1", "runs": runs,
                "watched": [{"path": str(p), **r.to_json(schema=watch_record.SCHEMA)} for p, r in seen],
                "trainers": [{"path": str(p), **r.to_json(schema=trainer_record.SCHEMA)} for p, r in trainers],
            }
        )  # fmt: skip
        return

    document = run_view.runs_document(found)
    if seen or trainers:
        others = [watch_view.list_section(seen)] if seen else []
        others += [trainer_view.list_section(trainers)] if trainers else []
        document = Document(document.title, document.subtitle, [*(document.sections if found else []), *others])
    text.render(document, OUT)


def load(run: Path) -> tuple[Any, Any]:
    """(plan, comparison) of a run; the plan that was made before it, or the same plan made now."""

    _, plan, comparison = of_directory(RunDirectory(run))
    return plan, comparison

"""`foretrain runs`: what was trained, and what its user says of it; and a run against its forecast."""

from pathlib import Path
from typing import Any

from foretrain.analysis.forecast_check import of_directory
from foretrain.analysis.listed import is_run, listed
from foretrain.base.errors import UserError
from foretrain.cli.command import argument, command, json_option, option
from foretrain.cli.common import ERR, OUT, noted, print_json
from foretrain.reports import text
from foretrain.reports.views.listed import runs as listed_view
from foretrain.runs import folder as store
from foretrain.runs import state, trainer_record, watch_record
from foretrain.runs.folder import RunDirectory

EPILOG = """Examples:

foretrain runs

foretrain runs ~/experiments --json

foretrain runs --tag sweep                       (only runs with this tag)

foretrain runs out-3 --name "wider MLP" --add-tag sweep --note "twice the width"        (say what a run is)"""
run_argument = argument("run RUN", "A run directory; `foretrain runs` lists them.", type=Path)


@command("runs", EPILOG)
@argument("folders", "Folders to search, two levels deep.", nargs=-1, type=Path)
@option("--tag", "List only runs with this tag; with several, with all.", multiple=True)
@option("--name", "Call the run this; '' takes the name away.")
@option("--note", "Keep this note with the run; '' takes it away.")
@option("--add-tag", "Give the runs this tag.", multiple=True)
@option("--remove-tag", "Take this tag from the runs.", multiple=True)
@json_option
def runs_command(
    folders: list[Path],
    tag: list[str],
    name: str | None,
    note: str | None,
    add_tag: list[str],
    remove_tag: list[str],
    as_json: bool,
) -> None:
    """List runs and watched runs: status, steps, loss, speed. Or give a run a name, a note, tags."""

    for folder in folders:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    if name is not None or note is not None or add_tag or remove_tag:
        _say(folders, name, note, add_tag, remove_tag)
    found = listed(folders or [Path()], tag)
    for error in found.unreadable:
        ERR.print(noted(error), soft_wrap=True)
    if as_json:
        own = _rows(found.runs, store.SCHEMA)
        for row, (path, _) in zip(own, found.runs, strict=True):
            row["scores"] = [each.to_json() for each in RunDirectory(path).scores()]
        print_json(
            {
                "schema": "foretrain.runs/1", "runs": own,
                "watched": _rows(found.watched, watch_record.SCHEMA),
                "trainers": _rows(found.trainers, trainer_record.SCHEMA),
            }
        )  # fmt: skip
        return
    labels = {path: state.read_label(path) for path, _ in (*found.runs, *found.watched, *found.trainers)}
    text.render(listed_view.document(found, labels, tag), OUT)


def _rows(found: list[tuple[Path, Any]], schema: str) -> list[dict[str, Any]]:
    return [
        {"path": str(path), "label": state.read_label(path).to_json(), **record.to_json(schema=schema)}
        for path, record in found
    ]


def _say(runs: list[Path], name: str | None, note: str | None, add: list[str], remove: list[str]) -> None:
    """Give these runs a name, a note, tags. Raises UserError before anything is written where one is no run."""
    if not runs:
        raise UserError("usage.label_no_run")
    if name and len(runs) > 1:
        raise UserError("usage.label_one_name", count=len(runs))
    for run in runs:
        if not is_run(run):
            raise UserError("data.no_run", path=str(run))
    made = [state.changed(state.read_label(run), name=name, note=note, tags=add, without=remove) for run in runs]
    for run, each in zip(runs, made, strict=True):
        state.write(run, each)


def load(run: Path) -> tuple[Any, Any]:
    """(plan, comparison) of a run; the plan that was made before it, or the same plan made now."""

    _, plan, comparison = of_directory(RunDirectory(run))
    return plan, comparison

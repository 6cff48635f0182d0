"""`foretrain runs`: what was trained, and what its user says of it; and a run against its forecast."""

from pathlib import Path
from typing import Any

from foretrain.analysis.forecast_check import of_directory
from foretrain.analysis.live import listed
from foretrain.base.errors import UserError
from foretrain.cli.command import argument, command, json_option, option
from foretrain.cli.common import ERR, OUT, noted, print_json
from foretrain.reports import text
from foretrain.reports.views import runs as listed_view
from foretrain.runs import state
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import SCHEMA, RunRecord, source_of

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
        print_json({"schema": "foretrain.run/1#runs", "runs": [_row(path, record) for path, record in found.runs]})
        return
    labels = {path: state.read_label(path) for path, _ in found.runs}
    text.render(listed_view.document(found.runs, labels, tag or ()), OUT)


def _row(path: Path, record: RunRecord) -> dict[str, Any]:
    scores = [each.to_json() for each in RunDirectory(path).scores()]
    known = {"path": str(path), "label": state.read_label(path).to_json(), "scores": scores}
    return {**known, **record.to_json(schema=SCHEMA)}


def _say(runs: list[Path], name: str | None, note: str | None, add: list[str], remove: list[str]) -> None:
    """Give these runs a name, a note, tags. Raises UserError before anything is written where one is not a run."""
    if not runs:
        raise UserError("usage.label_no_run")
    if name and len(runs) > 1:
        raise UserError("usage.label_one_name", count=len(runs))
    for run in runs:
        if source_of(run) is None:
            raise UserError("data.no_run", path=str(run))
    made = [state.changed(state.read_label(run), name=name, note=note, tags=add, without=remove) for run in runs]
    for run, each in zip(runs, made, strict=True):
        state.write(run, each)


def load(run: Path) -> tuple[Any, Any]:
    _, plan, comparison = of_directory(RunDirectory(run))
    return plan, comparison

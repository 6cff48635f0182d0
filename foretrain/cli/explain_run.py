"""`foretrain explain` of what is no log: a run of foretrain's, a watched run, a memory snapshot."""

from pathlib import Path

from foretrain.cli.common import OUT, print_json
from foretrain.errors import UserError


def explained(path: Path, *, as_json: bool, with_config: bool) -> bool:
    """Explain a run directory or a snapshot; false where the path is neither, or a watched run. Raises UserError."""
    from foretrain.advise import snapshot_file

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
    from foretrain.advise.run_explain import SCHEMA, explain_run
    from foretrain.cli.runs import plan_of
    from foretrain.report import run_explain_view, text
    from foretrain.run.store import RunDirectory

    directory = RunDirectory(path)
    record = directory.read_record()
    found = explain_run(
        record, plan_of(path, record), directory.read_lines("metrics"), directory.read_lines("events")
    )
    if as_json:
        print_json(found.to_json(schema=SCHEMA))
    else:
        text.render(run_explain_view.document(found), OUT)


def _snapshot(path: Path, *, as_json: bool) -> None:
    from foretrain.advise import snapshot_file
    from foretrain.advise.snapshot_analysis import SCHEMA
    from foretrain.report import snapshot_view, text

    found = snapshot_file.read(path)
    if as_json:
        print_json(found.to_json(schema=SCHEMA))
    else:
        text.render(snapshot_view.document(found), OUT)

"""`foretrain report`: one HTML file of a run, a plan, a log or a comparison; it opens offline."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foretrain.base.errors import UserError
from foretrain.cli.commands import report_parts as parts
from foretrain.cli.common import CONFIG_CONTEXT, OUT, Json, Quiet, print_json, print_notes
from foretrain.cli.old_options import spellings
from foretrain.config.resolve import resolve

if TYPE_CHECKING:
    from foretrain.comparison.sources.given import Given
    from foretrain.reports.document import Document

SCHEMA = "foretrain.report/1"
EPILOG = """Examples:

foretrain report out-baby --open                        (a run, or a watched run)

foretrain report gpt2-124m --gpu "RTX 4070" --batch_size=8   (a plan)

foretrain report train.log+config.py --gpu 4070         (a log with the config of its run)

foretrain report out-a out-b --out ab.html              (a comparison)

foretrain report b1.log+b1.py b2.log+b2.py --gpu 4070 --open"""

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]SOURCE... [--KEY=VALUE]...",
        help="A run, a watched run, a plan (JSON), a config or preset, a log, or a snapshot; two or more are "
        "compared. After a +: the config of a log, or options such as batch_size=8.",
        show_default=False,
    ),
]
GpuOption = Annotated[
    str, typer.Option("--gpu", help="Card for configs and logs; auto: the one the log names, or this machine's.")
]
OthersOption = Annotated[
    str, typer.Option(*spellings("--used-by-others"), help="Memory used by other programs on the card, such as 2GB.")
]
Price = Annotated[str | None, typer.Option("--price", help="Rent per hour, such as 0.35/h.", metavar="PRICE")]
Exact = Annotated[bool, typer.Option("--exact", help="For a plan: trace the step instead of estimating it.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="File to write. Default: report.html in a run's folder, else report-NAME.html here."),
]
Open = Annotated[bool, typer.Option("--open", help="Open the report in the browser.")]


def add_to(app: typer.Typer) -> None:
    app.command("report", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(report_command)


def report_command(
    sources: Sources,
    gpu: GpuOption = "auto",
    others: OthersOption = "",
    price: Price = None,
    exact: Exact = False,
    out: Out = None,
    open_it: Open = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one offline HTML file about a run, a plan, a log or a comparison, with charts and their numbers."""
    asked = parts.Asked(*parts.split(sources), gpu, others, price, exact, quiet or as_json)
    if not asked.sources:
        raise UserError("usage.report_nothing")
    target = parts.checked_target(out or _default(asked.sources))
    kind, document = _document(asked)
    path = parts.write(document, target)
    if as_json:
        print_json({"schema": SCHEMA, "path": str(path), "kind": kind, "size_bytes": path.stat().st_size})
    elif not quiet:
        OUT.print(Text(str(path)), soft_wrap=True)
    if open_it:
        typer.launch(path.resolve().as_uri())


def _default(sources: list[str]) -> Path:
    """Beside a run's own files; all else in this folder, by its name."""
    if len(sources) == 1 and Path(sources[0]).is_dir():
        return Path(sources[0]) / "report.html"
    from foretrain.comparison.sources.given import take_apart

    names = [take_apart(source).name for source in sources[:3]]
    word = "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in name) for name in names)
    return Path(f"report-{word[:60] or 'run'}.html")


def _document(asked: parts.Asked) -> "tuple[str, Document]":
    """(kind, document) of what was asked for. Raises UserError."""
    from foretrain.comparison.sources.given import take_apart

    if len(asked.sources) > 1:
        if asked.knobs:
            raise UserError("usage.report_knobs", option=asked.knobs[0].partition("=")[0])
        return "comparison", parts.comparison(asked)
    source = asked.sources[0]
    one = take_apart(source)
    path = Path(one.path)
    if (path / "run.json").is_file() or path.name == "run.json":
        _no_config(asked, one)
        _unused(asked, one, "price", "others", "exact")
        return "run", parts.run(path if path.is_dir() else path.parent)
    if path.is_dir() and not parts.is_watched(path):
        raise UserError("data.no_run", path=str(path))
    if path.suffix in (".toml", ".py") or not path.exists():
        resolved = resolve([one.path, *one.words, *asked.knobs])
        print_notes(resolved.notes, quiet=asked.quiet)
        return "plan", parts.plan(resolved, asked, one, datetime.now())
    if parts.is_plan(path):
        _no_config(asked, one)
        return "plan", parts.plan_file(path, asked, datetime.now())
    if parts.is_snapshot(path):
        _no_config(asked, one)
        _unused(asked, one, "price", "others", "exact")
        return "snapshot", parts.snapshot(path)
    _unused(asked, one, "price", "others", "exact")
    return "log", parts.log(path, one, asked)


_SPELLED = {"others": "--used-by-others"}


def _unused(asked: parts.Asked, one: "Given", *options: str) -> None:
    """Options that such a report has no use for, right or wrong, are refused. Raises UserError."""
    for option in options:
        given = getattr(asked, option)
        if given if option != "price" else given is not None:
            raise UserError("usage.report_unused", option=_SPELLED.get(option, f"--{option}"), path=one.path)


def _no_config(asked: parts.Asked, one: "Given") -> None:
    if asked.knobs or one.words or one.own:
        raise UserError("usage.report_config", path=one.path)

"""`foretrain report`: one HTML file of a run, a plan, a log or a comparison; it opens offline."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foretrain.base.errors import UserError
from foretrain.cli.common import CONFIG_CONTEXT, OUT, Json, Quiet, print_json, print_notes
from foretrain.cli.planning.exact import progress
from foretrain.config.options import OPTIONS
from foretrain.reports import making

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
        help="A run, a watched run, a plan (JSON), a config or preset, a log, a snapshot, or what a tracker "
        "keeps; two or more are compared. After a +: the config of a log, or options such as batch_size=8.",
        show_default=False,
    ),
]
GpuOption = Annotated[
    str, typer.Option("--gpu", help="Card for configs and logs; auto: the one the log names, or this machine's.")
]
OthersOption = Annotated[
    str, typer.Option("--used-by-others", help="Memory used by other programs on the card, such as 2GB.")
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
    named, options = split(sources)
    if not named:
        raise UserError("usage.report_nothing")
    target = making.checked_target(out or making.default_target(named))
    silent = quiet or as_json
    with progress(silent or not exact) as listen:
        kind, document = making.document(
            making.Asked(
                named, options, gpu, others, price, exact, partial(print_notes, quiet=silent), listen,
            )
        )  # fmt: skip
    path = making.write(document, target)
    if as_json:
        print_json({"schema": SCHEMA, "path": str(path), "kind": kind, "size_bytes": path.stat().st_size})
    elif not quiet:
        OUT.print(Text(str(path)), soft_wrap=True)
    if open_it:
        typer.launch(path.resolve().as_uri())


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

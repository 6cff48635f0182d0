"""`foretrain report`: one HTML file of a run, a plan, a log or a comparison; it opens offline."""

from functools import partial
from pathlib import Path

import click
from rich.text import Text

from foretrain.app.plan import Cards
from foretrain.base.errors import UserError
from foretrain.cli.command import OF_CONFIG, argument, command, flag, gpus_option, json_option, option, quiet_option
from foretrain.cli.common import OUT, print_json, print_notes
from foretrain.cli.reading import check_cards, progress
from foretrain.config.resolve import WORDS
from foretrain.reports import making

SCHEMA = "foretrain.report/1"
EPILOG = """Examples:
foretrain report out-baby --open                        (a run, or a watched run)
foretrain report gpt2-124m --gpu "RTX 4070" --batch_size=8   (a plan)
foretrain report train.log+config.py --gpu 4070         (a log with the config of its run)
foretrain report out-a out-b --out ab.html              (a comparison)
foretrain report b1.log+b1.py b2.log+b2.py --gpu 4070 --open
foretrain report gpt2-124m --gpus "2 x RTX 4090"        (a plan for several cards)
foretrain report llama-3.1-8b --inference --gpu 3060    (a plan of generating text)"""


@command("report", EPILOG, **OF_CONFIG)
@argument(
    "sources [NAME=]SOURCE... [--KEY=VALUE]...",
    "A run, a watched run, a plan (JSON), a config or preset, a log, a snapshot, or what a tracker "
    "keeps; two or more are compared. After a +: the config of a log, or options such as batch_size=8.",
    nargs=-1,
    required=True,
)
@gpus_option
@option("--gpu", "Card for configs and logs; auto: the one the log names, or this machine's.", default="auto")
@option("--used-by-others", "Memory used by other programs on the card, such as 2GB.", name="others", default="")
@option("--price PRICE", "Rent per hour, such as 0.35/h.")
@flag("--exact", "For a plan: trace the step instead of estimating it.")
@option("--out", "File to write. Default: report.html in a run's folder, else report-NAME.html here.", type=Path)
@flag("--open", "Open the report in the browser.", name="open_it")
@json_option
@quiet_option
@click.pass_context
def report_command(
    context: click.Context,
    sources: list[str],
    gpus: str,
    gpu: str,
    others: str,
    price: str | None,
    exact: bool,
    out: Path | None,
    open_it: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write one offline HTML file about a run, a plan, a log or a comparison, with charts and their numbers."""
    check_cards(context)
    typed = WORDS.split(sources)
    named = [word.typed[0] for word in typed if not word.key]
    options = [each for word in typed if word.key for each in word.typed]
    if not named:
        raise UserError("usage.report_nothing")
    target = making.checked_target(out or making.default_target(named))
    silent = quiet or as_json
    with progress(silent or not exact) as listen:
        given = (named, options, Cards(gpus, gpu, others=others), price, exact, partial(print_notes, quiet=silent))
        kind, document = making.document(making.Asked(*given, listen))
    path = making.write(document, target)
    if as_json:
        print_json({"schema": SCHEMA, "path": str(path), "kind": kind, "size_bytes": path.stat().st_size})
    elif not quiet:
        OUT.print(Text(str(path)), soft_wrap=True)
    if open_it:
        click.launch(path.resolve().as_uri())

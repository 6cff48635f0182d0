"""`foretrain compare`: runs, plans, logs and trackers' exports side by side; one run: its forecast too."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.base.errors import UserError
from foretrain.cli.common import OUT, Json, print_json, print_notes
from foretrain.cli.old_options import spellings, typed
from foretrain.hardware import devices
from foretrain.hardware.catalogue import stated_bytes

if TYPE_CHECKING:
    from foretrain.comparison.subject import Subject

EPILOG = """Examples:

foretrain compare out-baby   (one run: its forecast against what it measured)

foretrain compare out-a out-b

foretrain compare b1.log+b1.py b2.log+b2.py --gpu "RTX 4070"   (logs, each with the config of its run)

foretrain compare before=out-a after=plan.json faster=my.toml+batch_size=8 --gpu 4070

foretrain compare a.csv+my.toml b.csv+my.toml+learning_rate=1e-3 --column train_loss=my/loss --json

foretrain compare home=my.toml+gpu=4070 cloud=my.toml+gpu=A100-SXM4-80GB --price "A100-SXM4-80GB=1.2" """

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]SOURCE...",
        help="A run directory, a plan (JSON), a config or preset, a log of nanoGPT, nanochat, build-nanogpt or "
        "llm.c, or an export of wandb, TensorBoard, MLflow or trackio (CSV, JSON). After a +: the config of "
        "the run, options such as batch_size=8, and gpu=, used_by_others=, tokens_per_step=, "
        "bytes_per_token=, run=.",
        show_default=False,
    ),
]
GpuOption = Annotated[
    str,
    typer.Option("--gpu", help="Card for logs, exports and configs; auto: the one the log names, or this machine's."),
]
OthersOption = Annotated[
    str, typer.Option(*spellings("--used-by-others"), help="Memory used by other programs on the card, such as 2GB.")
]
PriceOption = Annotated[
    str | None,
    typer.Option("--price", help="Rent per hour, such as 0.35/h, or per card: '4090=0.35,A100=1.2'.", metavar="PRICE"),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        help="Name of a column in an export: train_loss=my/loss; also step, val_loss, val_bpb, step_s, step_ms, "
        "tokens, tokens_per_s, seconds, timestamp.",
        metavar="ROLE=NAME",
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command("compare", epilog=EPILOG)(compare_command)


def compare_command(
    sources: Sources,
    gpu: GpuOption = "auto",
    others: OthersOption = "",
    price: PriceOption = None,
    column: ColumnOption = None,
    as_json: Json = False,
) -> None:
    """Compare runs: what differs, which is better beyond noise, and whether one setting explains it."""
    if len(sources) == 1 and Path(sources[0]).is_dir():
        _forecast_check(Path(sources[0]), as_json)
        return
    from foretrain.comparison.compare import SCHEMA, compare
    from foretrain.comparison.sources import subjects_of

    card, held, columns = (
        devices.found(gpu),
        stated_bytes(others, typed("--used-by-others")) if others else 0,
        _columns(column or []),
    )
    tell = partial(print_notes, quiet=as_json)
    subjects = subjects_of(sources, tell, gpu=card, used_by_others_bytes=held, columns=columns)
    found = compare(with_rents(subjects, price))
    if as_json:
        print_json(found.to_json(schema=SCHEMA))
        return
    from foretrain.reports import text
    from foretrain.reports.views import compare as compare_view

    text.render(compare_view.document(found), OUT)


def _forecast_check(run: Path, as_json: bool) -> None:
    """Predicted against measured for one run."""
    from foretrain.analysis.forecast_check import SCHEMA
    from foretrain.cli.commands.runs import load

    _, comparison = load(run)
    if as_json:
        errors = {row.id: row.error for row in comparison.rows}
        print_json({**comparison.to_json(schema=SCHEMA), "errors": errors})
        return
    from foretrain.reports import text
    from foretrain.reports.views import run as run_view

    text.render(run_view.comparison_document(comparison), OUT)


def _columns(words: list[str]) -> dict[str, str]:
    """{role: column} of --column. Raises UserError for a role that there is not."""
    from foretrain.comparison.sources.tables import NAMES

    found = {}
    for word in words:
        role, equals, name = word.partition("=")
        if not equals or role not in NAMES or not name:
            raise UserError("usage.bad_column", value=word[:80], roles=list(NAMES))
        found[role] = name
    return found


def with_rents(subjects: "list[Subject]", price: str | None) -> "list[Subject]":
    """The subjects with the rent of their cards, so that money can be compared."""
    if price is None:
        return subjects
    from foretrain.cli.commands.plan_limits import Limits, priced, prices_of
    from foretrain.config.options import RunConfig
    from foretrain.config.resolve import ResolvedConfig

    cards = {subject.gpu.name: subject.gpu for subject in subjects if subject.gpu is not None}
    limits = Limits(price=price)
    base = priced(ResolvedConfig(RunConfig(), {}), limits).config
    rents = dict(zip(cards, prices_of(limits, base, list(cards.values())), strict=True))
    return [replace(s, rent_per_hour=rents[s.gpu.name]) if s.gpu and rents[s.gpu.name] else s for s in subjects]

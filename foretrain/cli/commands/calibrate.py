"""`foretrain calibrate`: measure this device, so that plans for it stand on measured speeds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, get_args

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from foretrain.app.calibrate import calibrate, calibration_of, gpu_of
from foretrain.base.errors import UserError
from foretrain.cli.common import ERR, OUT, Json, Quiet, need_one_of, print_json
from foretrain.hardware.calibration import SCHEMA, load
from foretrain.hardware.catalogue import Dtype
from foretrain.reports import text
from foretrain.reports.views import calibration as calibration_view

EPILOG = """Examples:

foretrain calibrate

foretrain calibrate --quick   (a third of the time: fp32 only, not compiled)

foretrain calibrate --show --json"""


def add_to(app: typer.Typer) -> None:
    app.command("calibrate", epilog=EPILOG)(calibrate_command)


def calibrate_command(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Measure only the usual dtype and no compiled step.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show the stored calibration of this device; measure nothing.")
    ] = False,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="DTYPE", help="Measure only this dtype; may be repeated.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this device for one to two minutes; later plans use the result. Keep it idle meanwhile."""

    gpu_of(device)  # a device that is not there is said before a bar begins
    for name in dtype or []:
        need_one_of("--dtype", name, get_args(Dtype))
    if show:
        kept = calibration_of(device)
    else:
        with progress(quiet=quiet or as_json) as listen:
            kept = calibrate(device, quick=quick, dtypes=dtype, listen=listen, not_kept=_not_kept)
    if as_json:
        print_json(kept.to_json(schema=SCHEMA))
    elif show or not quiet:
        gpu = gpu_of(device)
        text.render(calibration_view.document(kept, gpu, load(kept.device, kept.driver) is not None), OUT)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that takes what is measured, and the share that is done."""
    columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=ERR, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _not_kept(problem: UserError) -> None:
    ERR.print(Text(str(problem), style="yellow"), soft_wrap=True)

"""`foretrain calibrate`: measure this device, so that plans for it stand on measured speeds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from foretrain.app.calibrate import calibrate, calibration_of, gpu_of
from foretrain.base.errors import UserError
from foretrain.cli.command import command, flag, json_option, option, quiet_option
from foretrain.cli.common import ERR, OUT, need_one_of, print_json
from foretrain.hardware.calibration import SCHEMA, load
from foretrain.hardware.catalogue import Dtype
from foretrain.reports import text
from foretrain.reports.views import agreement as calibration_view

EPILOG = """Examples:
foretrain calibrate
foretrain calibrate --quick   (a third of the time: fp32 only, not compiled)
foretrain calibrate --show --json"""


@command("calibrate", EPILOG)
@option("--device", "auto, cpu, cuda or cuda:N.", default="auto")
@flag("--quick", "Measure only the usual dtype and no compiled step.")
@flag("--show", "Show the stored calibration of this device; measure nothing.")
@option("--dtype DTYPE", "Measure only this dtype; may be repeated.", multiple=True)
@json_option
@quiet_option
def calibrate_command(device: str, quick: bool, show: bool, dtype: list[str], as_json: bool, quiet: bool) -> None:
    """Measure this device for one to two minutes; later plans use the result. Keep it idle meanwhile."""

    gpu_of(device)  # a missing device is reported before the bar begins
    for name in dtype:
        need_one_of("--dtype", name, get_args(Dtype))
    if show:
        kept = calibration_of(device)
    else:
        with progress(quiet=quiet or as_json) as listen:
            kept = calibrate(device, quick=quick, dtypes=dtype or None, listen=listen, not_kept=_not_kept)
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

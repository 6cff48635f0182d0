"""`foretrain calibrate`: measure this device, so that plans for it stand on measured speeds."""

from typing import Annotated, Any, get_args

import typer
from rich.text import Text

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.cli.common import ERR, OUT, Json, Quiet, need_one_of, print_json
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.calibration import SCHEMA, load, save
from foretrain.hardware.catalogue import Dtype
from foretrain.reports import text
from foretrain.reports.views import calibration as calibration_view
from foretrain.training.host_memory import give_back, keep_memory

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

    need_torch()
    from foretrain.training.device import place

    config: RunConfig = resolve([f"--device={device}"]).config
    placement = place(config)
    if show:
        kept = placement.gpu.calibration
        if kept is None:
            raise UserError("environment.not_calibrated", device=placement.gpu.name)
    else:
        for name in dtype or []:
            need_one_of("--dtype", name, get_args(Dtype))
        kept = measure(placement, quick=quick, quiet=quiet or as_json, dtypes=dtype)
    if as_json:
        print_json(kept.to_json(schema=SCHEMA))
    elif show or not quiet:
        text.render(calibration_view.document(kept, placement.gpu, load(kept.device, kept.driver) is not None), OUT)


def measure(placement: Any, *, quick: bool, quiet: bool, dtypes: list[str] | None = None) -> Any:
    """Measure a device and keep the result. `dtypes`: others than the usual ones. Raises UserError; what is kept is
    whole or not there."""
    from rich.progress import BarColumn, Progress, TextColumn

    from foretrain.tuning.calibrate import calibrate, modes_for, usual_dtypes

    if placement.device.type == "cpu":
        keep_memory()  # as the trainer does
    dtypes = dtypes or usual_dtypes(placement.device, quick=quick)
    modes = [False] if quick else modes_for(placement)
    with Progress(
        TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"), console=ERR, transient=True,
        disable=quiet,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0)
        try:
            found = calibrate(
                placement, dtypes, modes, lambda what, share: bar.update(task, description=what, completed=share)
            )
        except (RuntimeError, MemoryError) as error:  # torch.AcceleratorError and OutOfMemoryError are RuntimeErrors
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError("environment.calibration_failed", device=placement.gpu.name, reason=reason) from None
    give_back()
    try:
        save(found)
    except OSError as error:
        ERR.print(Text(str(UserError("disk.calibration", reason=error.strerror or "")), style="yellow"), soft_wrap=True)
    return found

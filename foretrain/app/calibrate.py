"""Measure a device, so that plans for it stand on measured speeds. `foretrain.calibrate` for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.config.resolve import resolve
from foretrain.hardware.calibration import Calibration, save
from foretrain.hardware.catalogue import Gpu
from foretrain.training.device import give_back, keep_memory

if TYPE_CHECKING:
    from foretrain.training.device import Placement


def calibrate(
    device: str = "auto",
    *,
    quick: bool = False,
    dtypes: Sequence[str] | None = None,
    listen: Callable[[str, float], None] = lambda what, share: None,
    not_kept: Callable[[UserError], None] = lambda problem: None,
) -> Calibration:
    """The speeds of a device, measured in one to two minutes and kept for later plans: `foretrain.calibrate("cpu")`.

    `device`: "auto", "cpu", "cuda" or "cuda:N"; keep it idle meanwhile. `quick`: only the usual dtype and no compiled
    step. `dtypes`: others than the usual ones. Times in the record are in seconds. `listen` hears what is measured and
    the share that is done; `not_kept` why the result could not be kept. It is kept whole or not at all.
    Raises UserError: no torch, no such device or a measurement that fails 4.
    """
    placement = _placed(device)
    from foretrain.measure.peaks import calibrated, calibrating

    if placement.device.type == "cpu":
        keep_memory()  # as the trainer does
    wanted = list(dtypes or calibrating.usual_dtypes(placement.device, quick=quick))
    modes = [False] if quick else calibrating.modes_for(placement)
    try:
        found = calibrated(placement, wanted, modes, listen)
    except (RuntimeError, MemoryError) as error:  # torch.AcceleratorError and OutOfMemoryError are RuntimeErrors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError("environment.calibration_failed", device=placement.gpu.name, reason=reason) from None
    give_back()
    try:
        save(found)
    except OSError as error:
        not_kept(UserError("disk.calibration", reason=error.strerror or ""))
    return found


def calibration_of(device: str = "auto") -> Calibration:
    gpu = gpu_of(device)
    if gpu.calibration is None:
        raise UserError("environment.not_calibrated", device=gpu.name)
    return gpu.calibration


def gpu_of(device: str = "auto") -> Gpu:
    """Return the device as plans know it, with its calibration if there is one. Raises UserError."""
    return _placed(device).gpu


def _placed(device: str) -> Placement:
    need_torch()
    from foretrain.training.device import place

    placement = place(resolve([f"--device={device}"]).config)
    if placement.gpu.kind == "mps":
        raise UserError("environment.not_on_mps", command="calibrate")
    return placement

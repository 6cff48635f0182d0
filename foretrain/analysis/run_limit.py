"""What share of the machine's limit a run's step reaches (predict/speed/limit.py), where its device was calibrated."""

from foretrain.base.records import Record
from foretrain.hardware import devices
from foretrain.hardware.calibration import Calibration
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import StepLimit, limit_of, peaks_of, with_kernels
from foretrain.training.store import RunRecord


class RunLimit(Record):
    """A run's steady step beside its limit on the device that it ran on. `rest_s`: what its kernels do not account for:
    launching, Python, fresh pages, caches; None where they were not calibrated."""

    step_s: float
    share: float
    rest_s: float | None
    step: StepLimit
    calibrated: str  # when


def calibration_here(gpu: Gpu) -> Calibration | None:
    """The calibration of a run's device, if that is this machine's."""
    here = devices.named(devices.CPU) if gpu.kind == "cpu" else devices.found(devices.HERE)
    return here.calibration if here and here.name == gpu.name else None


def limit_of_run(record: RunRecord, step_s: float, calibration: Calibration) -> RunLimit | None:
    """The share of its limit that a run of this steady step reaches; None where a peak for it was not measured, or
    where several ranks shared the step."""
    if record.world > 1:
        return None
    gpu = record.gpu.model_copy(update={"calibration": calibration})
    spec = StepSpec.of(record.config, gpu, dtype=record.dtype, compiled=record.compiled)
    limit = limit_of(spec, peaks_of(calibration))
    if limit is None or not step_s:
        return None
    limit = with_kernels(limit, spec)
    kernels = [group.kernels_s for group in limit.groups]
    known = None not in kernels
    return RunLimit(
        step_s=step_s, share=limit.limit_s / step_s, step=limit, calibrated=calibration.date,
        rest_s=step_s - sum(each or 0.0 for each in kernels) if known else None,
    )  # fmt: skip

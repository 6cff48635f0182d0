"""Where an estimated time comes from, in words."""

from foretrain.predict import software
from foretrain.predict.plan import Plan
from foretrain.reports.document import Message


def uncalibrated(plan: Plan) -> Message:
    """The sentence for a time that nobody measured on this device: of a CPU, or of the catalogue and a torch."""
    if plan.gpu.kind == "cpu":
        return Message("source.cpu")
    return Message("source.catalogue", {"torch": str(software.of(plan.config.torch_version))})

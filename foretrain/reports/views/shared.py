"""What several views say alike: what a plan assumed, where its times come from, why a larger micro-batch needs less."""

from collections.abc import Iterable
from itertools import pairwise

from foretrain.predict import software
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Message, Paragraph

TONES = {"fits": "good", "tight": "warn", "does_not_fit": "bad", None: "plain"}


def assumed(plan: Plan) -> tuple[Block, ...]:
    """A sentence for each assumption."""
    return tuple(Paragraph(Message(f"assumed.{note.id}", note.values), "warn") for note in plan.assumptions)


def uncalibrated(plan: Plan) -> Message:
    """The sentence for a time that nobody measured on this device: of a CPU, or of the catalogue and a torch."""
    if plan.gpu.kind == "cpu":
        return Message("source.cpu")
    return Message("source.catalogue", {"torch": str(software.of(plan.config.torch_version))})


def uneven(points: Iterable[tuple[int, int | None]]) -> tuple[Paragraph, ...]:
    """One sentence where a larger micro-batch needs less than a smaller one, else nothing.

    `points`: (batch_size, bytes) of settings that differ in nothing else that takes memory.
    """
    known = sorted({(size, needed) for size, needed in points if needed is not None})
    falls = any(small < large and after < before for (small, before), (large, after) in pairwise(known))
    return (Paragraph(Message("largest.uneven")),) if falls else ()

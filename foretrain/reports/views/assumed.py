"""What a plan took without knowing it, as blocks; every answer that rests on a plan shows them at its top."""

from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Message, Paragraph


def assumed(plan: Plan) -> tuple[Block, ...]:
    """A sentence for each assumption."""
    return tuple(Paragraph(Message(f"assumed.{note.id}", note.values), "warn") for note in plan.assumptions)

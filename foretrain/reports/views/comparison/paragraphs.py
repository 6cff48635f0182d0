"""What a comparison says below its verdicts: of more cards, and of what repeats told."""

from foretrain.base.messages import listed
from foretrain.comparison.compare import Scaling
from foretrain.comparison.repeats import Scatter
from foretrain.reports.document import Message, Paragraph


def scaling(found: Scaling) -> Paragraph:
    """What more cards brought, or why that is not told; and what of the two may be compared all the same."""
    id = found.why or ("forecast" if found.predicted else "measured")
    said = Message(f"scaling.{id}", found.model_dump()).text()
    tokens = Message("scaling.same_tokens" if found.same_tokens else "scaling.other_tokens")
    return Paragraph(Message("first.two", {"one": said, "other": tokens}), "warn" if found.why else "plain")


def learned(scatter: Scatter) -> Paragraph:
    """What repeats told of the scatter from start to start."""
    values = {
        "runs": "; ".join(listed(labels) for labels in scatter.runs),
        "device": scatter.device,
        **{name: getattr(scatter, name) * 100 for name in ("seen", "assumed", "counted")},
    }
    return Paragraph(Message("side.learned", values))

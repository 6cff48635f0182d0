"""What the page draws of a fine-tuning plan beside the document: the model's sizes, and the bar of each phase."""

from dataclasses import replace

from foretrain.advice.asked import Asked
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports.document import Message, Row, StackedBars
from foretrain.reports.views.finetune.screen import method_of, screen
from foretrain.reports.views.finetune.whole import phase_bars


def name(plan: FineTunePlan) -> Message:
    """How the model is trained, with the rank."""
    return method_of(plan)


def lines(plan: FineTunePlan) -> tuple[Row, ...]:
    """The lines of the terminal's first screen, but for what to change and where the rest is."""
    return screen(plan, (), Asked(quiet=True)).rows


def sizes(plan: FineTunePlan) -> Message:
    """What the config.json says of the model, so that one sees which was read."""
    facts = plan.facts
    values = {
        "layers": facts.n_layer, "width": facts.n_embd, "heads": facts.n_head, "kv_heads": facts.n_kv_head,
        "mlp": facts.mlp_width, "vocabulary": facts.vocab_size, "dtype": facts.dtype, "family": facts.model_type,
    }  # fmt: skip
    return Message("finetune.sizes", values)


def bars(plan: FineTunePlan) -> StackedBars:
    """Each phase by component against what is free, with its source and all that the card has."""
    memory = plan.memory
    card = plan.gpu.memory_bytes if plan.gpu.memory_bytes != plan.available_bytes else None
    context = Message(f"context_from.{memory.context.source}")
    source = Message("report.source_phases", {"source": memory.source, "context": context})
    return replace(phase_bars(plan), title=Message("picture.phases"), card_bytes=card, source=source)

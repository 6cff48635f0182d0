"""What of a fine-tuning run fits in a limit, and the largest value of an option that fits on the card."""

from foretrain.advice.asked import Asked
from foretrain.base.units import format_bytes
from foretrain.predict.finetune.largest import FineTuneLargest
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.finetune.within import FineTuneWithin
from foretrain.predict.memory import REFUSED
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Row, Screen, Section
from foretrain.reports.views.finetune import whole
from foretrain.reports.views.finetune.screen import assumed_rows, batch_rows, command_of, time_rows, title, verdict_of


def screen(found: FineTuneWithin, asked: Asked, searched: FineTuneLargest | None = None) -> Screen:
    """`--within`, `--tokens`: what fits first."""
    plan = found.plan
    lead = [*_answer(found), verdict_of(plan)]
    if plan.verdict in REFUSED:
        lead.reverse()
    if searched is not None:
        lead.append(Paragraph(largest(plan, searched)))
    rows = [*batch_rows(plan), _data(found), *time_rows(plan), *_asked(found)]
    whole = found.asked_steps is not None and found.asked_steps <= found.steps
    if not asked.quiet and not whole and plan.verdict not in REFUSED:
        rows.append(Row(Message("first.label.next"), Message("finetune.within_next", {"steps": found.steps})))
    if not asked.quiet and plan.verdict in REFUSED:
        command = (*command_of("advise", asked), *asked.options("advise"))
        rows.append(Row(Message("first.label.next"), command=command))
    return Screen(title(plan), tuple(lead), None, (*rows, *assumed_rows(plan)))


def _answer(found: FineTuneWithin) -> list[Paragraph]:
    """The steps that fit, and how sure that is."""
    exact = found.steps_cautious == found.steps == found.steps_optimistic
    of_tokens = "within_tokens" if found.limit.kind == "tokens" else "within_exact"
    id = of_tokens if exact else "within" if found.steps_cautious else "within_not_sure"
    values = {
        "text": found.limit.text, "steps": found.steps, "tokens": found.tokens, "cautious": found.steps_cautious,
        "optimistic": found.steps_optimistic,
    }  # fmt: skip
    fits = found.plan.verdict not in REFUSED
    return [Paragraph(Message(f"first.{id}", values), "good" if fits else "plain")]


def _epochs(found: FineTuneWithin) -> Message:
    values = {"epochs": found.epochs or 0.0, "tokens": found.plan.tune.dataset_tokens}
    return Message("finetune.epochs" if found.epochs is not None else "finetune.epochs_unknown", values)


def _data(found: FineTuneWithin) -> Row:
    return Row(Message("finetune.label.data"), _epochs(found))


def _run(found: FineTuneWithin) -> list[Message]:
    """What of the run as it was given fits, where its length is known."""
    if found.asked_steps is None:
        return []
    share = found.steps / found.asked_steps
    id = "finetune.within_whole" if share >= 1 else "finetune.within_part"
    return [Message(id, {"steps": found.asked_steps, "share": share})]


def _asked(found: FineTuneWithin) -> list[Row]:
    return [Row(Message("first.label.note"), each) for each in _run(found)]


def document(found: FineTuneWithin, searched: FineTuneLargest | None = None) -> Document:
    """The same with everything that it takes."""
    plan = found.plan
    said: list[Block] = [*_answer(found), verdict_of(plan), *(Paragraph(each) for each in _run(found))]
    if searched is not None:
        said.append(Paragraph(largest(plan, searched)))
    tokens = {"tokens": found.tokens, "steps": found.steps}
    rows: tuple[tuple[Cell, ...], ...] = (
        (Message("row.tokens"), Message("value.tokens", tokens)), (Message("row.epochs"), _epochs(found)),
    )  # fmt: skip
    answer = Section(Message("within.section"), tuple(said))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan), where, [answer, *whole.sections(plan, more=rows)])


def largest(plan: FineTunePlan, found: FineTuneLargest) -> Message:
    """The largest value of an option that fits on the card."""
    values = {
        "option": found.option, "value": found.value, "gpu": plan.gpu.name, "next": found.next_value,
        "needed": found.plan.needed_bytes if found.plan else 0, "beyond": found.next_needed_bytes or 0,
        "available": plan.available_bytes or 0, "positions": found.positions or 0,
    }  # fmt: skip
    beyond, room = found.next_needed_bytes, plan.available_bytes
    tight = beyond is not None and room is not None and (beyond <= room or format_bytes(beyond) == format_bytes(room))
    if not found.plan:
        return Message("finetune.largest_none_tight" if tight else "finetune.largest_none", values)
    if found.positions is not None:
        trained = "finetune.largest_trained" if found.beyond_fits else "finetune.largest_trained_all"
        return Message("finetune.largest_learned" if plan.facts.positions == "learned" else trained, values)
    if beyond is None:
        return Message("finetune.largest_all", values)
    return Message("finetune.largest_tight" if tight else "finetune.largest", values)

"""What of a fine-tuning run fits in a limit, and the largest value of an option that fits on the card."""

from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import finetune_command
from foretrain.base.units import format_bytes
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.largest import Largest
from foretrain.predict.memory import REFUSED
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Row, Screen, Section
from foretrain.reports.views.finetune import whole
from foretrain.reports.views.finetune.screen import batch_rows, time_rows
from foretrain.reports.views.lead import assumed_rows, lead_of, title
from foretrain.reports.views.shared import within_answer


def screen(found: Within, asked: Asked, searched: Largest | None = None) -> Screen:
    """`--within`, `--tokens`: what fits first."""
    plan = found.plan
    assert isinstance(plan, FineTunePlan)
    lead = [*_answer(found), *lead_of(plan)]
    if plan.verdict in REFUSED:
        lead.reverse()
    if searched is not None:
        lead.append(Paragraph(largest(plan, searched)))
    rows = [
        *batch_rows(plan),
        Row(Message("finetune.label.data"), _epochs(plan, found)),
        *time_rows(plan),
        *_asked(found),
    ]
    whole = found.asked_steps is not None and found.asked_steps <= found.steps
    if not asked.quiet and not whole and plan.verdict not in REFUSED:
        rows.append(Row(Message("first.label.next"), Message("finetune.within_next", {"steps": found.steps})))
    if not asked.quiet and plan.verdict in REFUSED:
        command = (*finetune_command("advise", asked), *asked.options("advise"))
        rows.append(Row(Message("first.label.next"), command=command))
    return Screen(title(plan, asked), tuple(lead), None, (*rows, *assumed_rows(plan)))


def _answer(found: Within) -> list[Paragraph]:
    return [Paragraph(within_answer(found), "good" if found.plan.verdict not in REFUSED else "plain")]


def _epochs(plan: FineTunePlan, found: Within) -> Message:
    values = {"epochs": found.epochs or 0.0, "tokens": plan.tune.dataset_tokens}
    return Message("finetune.epochs" if found.epochs is not None else "finetune.epochs_unknown", values)


def _run(found: Within) -> list[Message]:
    if found.asked_steps is None:
        return []
    share = found.steps / found.asked_steps
    id = "finetune.within_whole" if share >= 1 else "finetune.within_part"
    return [Message(id, {"steps": found.asked_steps, "share": share})]


def _asked(found: Within) -> list[Row]:
    return [Row(Message("first.label.note"), each) for each in _run(found)]


def document(found: Within, searched: Largest | None = None) -> Document:
    plan = found.plan
    assert isinstance(plan, FineTunePlan)
    said: list[Block] = [*_answer(found), *lead_of(plan), *(Paragraph(each) for each in _run(found))]
    if searched is not None:
        said.append(Paragraph(largest(plan, searched)))
    tokens = {"tokens": found.tokens, "steps": found.steps}
    rows: tuple[tuple[Cell, ...], ...] = (
        (Message("row.tokens"), Message("value.tokens", tokens)), (Message("row.epochs"), _epochs(plan, found)),
    )  # fmt: skip
    answer = Section(Message("within.section"), tuple(said))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan, Asked()), where, [answer, *whole.sections(plan, more=rows)])


def largest(plan: FineTunePlan, found: Largest) -> Message:
    beyond, room = found.beyond, found.available_bytes
    needed = beyond.needed_expected_bytes if beyond else 0
    values = {
        "option": found.option, "value": found.value, "gpu": plan.gpu.name, "available": room, "beyond": needed,
        "needed": found.found.needed_expected_bytes if found.found else 0, "next": beyond.value if beyond else 0,
        "positions": plan.facts.max_positions if plan.facts else 0,
    }  # fmt: skip
    tight = beyond is not None and (needed <= room or format_bytes(needed) == format_bytes(room))
    if not found.value:
        return Message("finetune.largest_none_tight" if tight else "finetune.largest_none", values)
    if plan.facts and found.option == "seq_len" and found.value == plan.facts.max_positions:
        trained = "finetune.largest_trained" if beyond and beyond.fits else "finetune.largest_trained_all"
        return Message("finetune.largest_learned" if plan.facts.positions == "learned" else trained, values)
    if beyond is None:
        return Message("finetune.largest_all", values)
    return Message("finetune.largest_tight" if tight else "finetune.largest", values)

"""A fine-tuning plan: does it fit, how fast, what takes the memory, what to change; or all of it, each phase."""

from pathlib import Path
from typing import Any

from foretrain.advice.asked import QUIET, Asked
from foretrain.advice.record import Advice
from foretrain.base.messages import has, listed
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports.document import Document, Message, Only, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.advice import change_rows, change_text
from foretrain.reports.views.explain import sums_table
from foretrain.reports.views.lead import assumed_rows, lead_of, more_rows, title, what
from foretrain.reports.views.memory import phase_bars, phase_table
from foretrain.reports.views.shared import Page, card_memory, grouped
from foretrain.reports.views.takes import no_time, of_plan, speed_source, takes_rows, time_rows

LARGEST = 4  # groups of memory that are named


def screen(plan: FineTunePlan, asked: Asked, changes: tuple[Advice, ...] = ()) -> Screen:
    rows = [
        *read_rows(plan),
        *batch_rows(plan),
        _trained(plan),
        *takes_rows(plan, plan.timing),
        _memory(plan),
        *change_rows(plan, changes, asked),
    ]
    rows += [*assumed_rows(plan), *more_rows(plan, asked)]
    return Screen(title(plan, asked), tuple(lead_of(plan)), None, tuple(rows))


def read_rows(plan: FineTunePlan) -> list[Row]:
    read = [note.values for note in plan.notes if note.id == "finetune_read_as"]
    shown = [{**values, "where": Path(str(values["where"])).name} for values in read]
    return [Row(Message("finetune.label.read_as"), Message("finetune.read_as", values)) for values in shown]


def bound_rows(plan: FineTunePlan) -> list[Row]:
    if plan.bound == "exact":
        return []
    return [Row(Message("first.label.note"), Message(f"finetune.bound.{plan.bound}", {"keys": plan.bounded_by}))]


def batch_rows(plan: FineTunePlan) -> list[Row]:
    t = plan.tune
    values = {"batch": t.sequences, "seq_len": t.seq_len, "accum": t.grad_accum, "tokens": t.tokens_per_step}
    id = "finetune.batch" if t.grad_accum == 1 else "finetune.batch_accum"
    if t.world > 1:
        id, values = "finetune.batch_cards", values | {"world": t.world}
    rows = [Row(Message("first.label.batch"), Message(id, values))]
    rows += [Row(Message("first.label.note"), Message("finetune.full_rows"))] if t.fills_rows else []
    if plan.facts and t.seq_len > plan.facts.max_positions:
        beyond = {"seq_len": t.seq_len, "most": plan.facts.max_positions}
        rows.append(Row(Message("first.label.note"), Message("finetune.beyond_trained", beyond)))
    return rows


def _trained(plan: FineTunePlan) -> Row:
    return Row(Message("finetune.label.trains"), trained_text(plan), short=trained_text(plan, brief=True))


def trained_text(plan: FineTunePlan, *, brief: bool = False) -> Message:
    c, t = plan.counts, plan.tune
    share = c.n_trained / c.n_params
    values: dict[str, Any] = {
        "trained": c.n_trained, "params": c.n_params, "share": share, "dtype": t.dtype, "optim": t.optim,
        "bits": 8 if t.load_in_8bit else 4,
    }  # fmt: skip
    id = "finetune.trained_quantized" if t.quantized else "finetune.trained" if t.adapters else "finetune.trained_all"
    return Message("finetune.trained_short" if brief and t.adapters else id, values)


def _memory(plan: FineTunePlan) -> Row:
    parts = sorted(grouped(plan.memory.neediest.components), key=lambda part: -part[1])[:LARGEST]
    named = [f"{Message(f'group.{group}').text()} {Quantity(size, 'bytes').text()}" for group, size in parts]
    return Row(Message("finetune.label.memory"), listed(named), short=listed(named[:2]))


# -- the whole plan --------------------------------------------------------------------------------------------------


def document(plan: FineTunePlan, changes: tuple[Advice, ...] = ()) -> Document:
    lead = Section(Message("finetune.verdict"), (*lead_of(plan), *card_memory(plan.gpu)))
    where = Message("finetune.subtitle", {"where": plan.where})
    return Document(title(plan, Asked()), where, [lead, *sections(plan, changes)])


def page(plan: FineTunePlan) -> Page:
    made, needs = document(plan), [(what(plan), plan.memory, plan.verdict)]
    sentences, pictures = (made.title, sizes(plan)), [phase_bars(plan, plan.memory)]
    return Page(made, needs, sentences, of_plan(plan), pictures, screen(plan, QUIET))


def sections(plan: FineTunePlan, changes: tuple[Advice, ...]) -> list[Section]:
    """What it takes, each phase, the components of the worst one with their formulas, all changes, all notes."""
    memory = plan.memory
    table = phase_table(memory, Message("column.phase"), reserved=True)
    phases = Section(Message("finetune.phases"), (table, Only("page", phase_bars(plan, memory))))
    where = Message("finetune.components", {"phase": Message(f"phase.{memory.neediest.phase}")})
    parts = sums_table(memory.neediest.components, plan)
    sections = [section(plan), phases, Section(where, (parts,))]
    if changes:
        listed_changes = tuple(Paragraph(Message("first.said", {"text": change_text(plan, each)})) for each in changes)
        sections.append(Section(Message("finetune.changes"), listed_changes))
    notes = [Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes if has(f"note.{note.id}")]
    if notes:
        sections.append(Section(Message("finetune.notes"), tuple(notes)))
    return sections


def sizes(plan: FineTunePlan) -> Message:
    facts = plan.facts
    if facts is None:
        return Message("finetune.sizes_traced", {"family": str((plan.config or {}).get("model_type"))})
    values = {
        "layers": facts.n_layer, "width": facts.n_embd, "heads": facts.n_head, "kv_heads": facts.n_kv_head,
        "mlp": facts.mlp_width, "vocabulary": facts.vocab_size, "dtype": facts.dtype, "family": facts.model_type,
    }  # fmt: skip
    return Message("finetune.sizes", values)


def section(plan: FineTunePlan) -> Section:
    """All that the first screen has of it, with ranges."""
    rows = [(row.label, row.text) for row in batch_rows(plan)]
    rows.append((Message("finetune.label.trains"), trained_text(plan)))
    timing = plan.timing
    if timing is None:
        unknown = Paragraph(Message("first.said", {"text": no_time(plan)}))
        return Section(Message("finetune.takes"), (Table((), tuple(rows)), unknown))
    if timing.steps is not None:
        tokens = {"tokens": timing.steps * plan.tune.tokens_per_step, "steps": timing.steps}
        rows.append((Message("row.tokens"), Message("value.tokens", tokens)))
    rows += time_rows(plan, timing)
    source = Paragraph(Message("source.power" if timing.total_s else "finetune.no_length"))
    return Section(Message("finetune.takes"), (Table((), tuple(rows)), Paragraph(speed_source(plan, timing)), source))

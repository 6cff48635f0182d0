"""What `foretrain verify` found, as a document: how far off first, then every case, and those without figures."""

from foretrain.base.messages import format_value, listed, say
from foretrain.measure.verify_record import CONTRIBUTED, Outcome, Verification
from foretrain.measure.verify_record import Quantity as What
from foretrain.reports.document import Block, Document, Message, Paragraph, Quantity, Section, Table

ERRORS: tuple[What, ...] = ("allocated", "reserved", "process", "time")
FEW: tuple[What, ...] = ("allocated", "reserved", "time")  # what a line about one case has


def document(found: Verification, path: str = "") -> Document:
    """The whole answer. `path`: the file to contribute, of one's own."""
    measured = found.of("measured")
    values = {
        "measured": len(measured), "count": len(found.outcomes), "torch": found.versions.torch, "date": found.date
    }  # fmt: skip
    sections = [Section(Message("verify.errors"), _errors(found))]
    if measured:
        sections.append(Section(Message("verify.cases"), (_cases(measured),)))
    if without := found.of("out_of_memory", "failed", "skipped", "waiting"):
        sections.append(Section(Message("verify.without"), (_without(without), *_again(found))))
    if path and measured:
        told = Message("verify.contribute", {"path": path, "folder": CONTRIBUTED})
        sections.append(Section(Message("verify.file"), (Paragraph(told),)))
    return Document(
        Message("verify.title", {"device": found.machine.device}), Message("verify.subtitle", values), sections
    )


def _errors(found: Verification) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if ran_out := len(found.of("out_of_memory")):
        blocks.append(Paragraph(Message("verify.ran_out", {"count": ran_out}), "bad"))
    if not found.by_quantity:
        return (*blocks, Paragraph(Message("verify.none"), "warn"))
    rows = []
    for each in found.by_quantity:
        inside = "" if each.inside is None else f"{each.inside} / {each.cases}"
        middle, worst = Quantity(each.median, "small_percent"), Quantity(each.worst, "small_signed_percent")
        name = Message(f"verify.quantity.{each.quantity}")
        rows.append((name, str(each.cases), middle, worst, inside, each.worst_case))
    names = ("quantity", "count", "median", "worst", "inside", "worst_case")
    heads = tuple(Message(f"column.{name}") for name in names)
    blocks.append(Table(heads, tuple(rows), frozenset({1, 2, 3, 4}), optional=(5,)))
    blocks.append(Paragraph(Message("verify.errors_are")))
    if busy := sum(each.busy for each in found.of("measured")):
        blocks.append(Paragraph(Message("verify.busy_cases", {"count": busy}), "warn"))
    estimated = [each for each in found.of("measured") if each.predicted and each.predicted.source == "estimated"]
    if estimated and found.machine.kind == "cuda":
        blocks.append(Paragraph(Message("verify.not_traced", {"count": len(estimated)}), "warn"))
    return tuple(blocks)


def _cases(measured: list[Outcome]) -> Table:
    """Errors under the name of their quantity; beside them the measured peak and step, where there is room."""
    shown: list[What] = [each for each in ERRORS if any(outcome.error(each) is not None for outcome in measured)]
    peak: What = "allocated" if "allocated" in shown else "process"
    heads = ["case", "batch", "peak", "step", *("time_error" if each == "time" else each for each in shown)]
    rows = []
    for outcome in measured:
        config, taken = outcome.case.config, outcome.measured
        most, step = outcome.pair(peak), taken.step_s if taken else None
        figures = [Quantity(most[1] if most else None, "bytes"), Quantity(step, "duration")]
        errors = [Quantity(outcome.error(each), "small_signed_percent") for each in shown]
        batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
        rows.append((outcome.case.label, batch, *figures, *errors))
    columns = tuple(Message(f"column.{head}") for head in heads)
    return Table(columns, tuple(rows), frozenset(range(1, len(heads))), optional=(1, 2, 3))


def _without(outcomes: list[Outcome]) -> Table:
    rows = tuple((outcome.case.label, why(outcome)) for outcome in outcomes)
    tones = tuple("bad" if outcome.status in ("out_of_memory", "failed") else "plain" for outcome in outcomes)
    return Table((Message("column.case"), Message("column.why")), rows, tones=tones)


def _again(found: Verification) -> tuple[Block, ...]:
    failed = found.of("failed")
    return (Paragraph(Message("verify.again", {"count": len(failed)})),) if failed else ()


def why(outcome: Outcome) -> Message:
    if outcome.reason is None:
        return Message("verify.why.waiting")
    return Message(f"verify.why.{outcome.reason.id}", dict(outcome.reason.values))


def errors_of(outcome: Outcome) -> str:
    """'allocated +0.01 %, reserved 0 %, time -4.1 %'."""
    parts = []
    for quantity in FEW if outcome.error("allocated") is not None else ERRORS[2:]:
        error = outcome.error(quantity)
        if error is not None:
            parts.append(f"{say(f'verify.short.{quantity}')} {format_value(error, 'small_signed_percent')}")
    return listed(parts)

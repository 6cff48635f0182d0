"""Memory that ran out: where, what was there, and what would have saved the run."""

from foretrain.advice.remedies import Remedy
from foretrain.analysis.run import OutOfMemory
from foretrain.reports.document import Block, Cell, Message, Paragraph, Quantity, Section, Table

Rows = list[tuple[Cell, ...]]
_ROWS = (
    "weights", "gradients", "optimizer", "rest", "allocated", "unused", "reserved", "used_by_others", "card"
)  # fmt: skip


def sections(
    failures: tuple[OutOfMemory, ...], remedies: tuple[Remedy, ...], exact: str = "oom.exact"
) -> list[Section]:
    """The last failure in full, how many there were, and what would have saved the run; `exact`: in which sense."""
    last = failures[-1]
    tone = "bad" if last.fatal else "warn"
    blocks: list[Block] = [Paragraph(_where(last), tone)]
    survived = sum(not failure.fatal for failure in failures)
    if survived:
        blocks.append(Paragraph(Message("oom.survived", {"count": survived})))
    values = last.model_dump()
    if last.asked_bytes is not None and last.over_bytes is not None:
        blocks.append(Paragraph(Message("oom.asked" if last.over_bytes else "oom.asked_within", values)))
    elif last.asked_bytes is not None:
        blocks.append(Paragraph(Message("oom.asked_only", values)))
    rows: Rows = [
        (Message(f"oom_row.{name}"), Quantity(values[f"{name}_bytes"], "bytes"))
        for name in _ROWS
        if values[f"{name}_bytes"] is not None
    ]
    if rows:
        blocks.append(Table((), tuple(rows), frozenset({1})))
    if last.unused_bytes is not None and last.asked_bytes is not None and last.free_bytes is not None:
        id = "oom.fragmented" if last.fragmented else "oom.not_fragmented"
        blocks.append(Paragraph(Message(id, values), "warn" if last.fragmented else "plain"))
    found = [Section(Message("oom.section"), tuple(blocks))]
    if last.fatal:
        found.append(Section(Message("oom.saved"), remedy_blocks(remedies, exact)))
    return found


def _where(failure: OutOfMemory) -> Message:
    if not failure.phase and not failure.moment:
        return Message("oom.in_log")
    phase = Message(f"phase.{failure.phase}") if failure.phase else Message("oom.outside")
    values = {"phase": phase, "moment": Message(f"oom_moment.{failure.moment or 'other'}"), "step": failure.step}
    if failure.micro_step and failure.accumulation:
        return Message("oom.in_micro_step", values | {"micro": failure.micro_step, "of": failure.accumulation})
    return Message("oom.in_step", values)


def remedy_blocks(remedies: tuple[Remedy, ...], exact: str = "oom.exact") -> tuple[Block, ...]:
    """Changes that fit, as a table; or that none does."""
    if not remedies:
        return (Paragraph(Message("oom.no_remedy")),)
    columns = tuple(Message(f"remedy_column.{name}") for name in ("change", "saves", "needs", "slower"))
    rows = tuple(
        (
            " ".join(f"--{name}={_value(value)}" for name, value in r.changes.items()) or Message("oom.foretrain"),
            Quantity(r.saves_bytes, "bytes"), Quantity(r.needed_bytes, "bytes"), Quantity(r.slower, "signed_percent"),
        )
        for r in remedies
    )  # fmt: skip
    return Table(columns, rows, frozenset({1, 2, 3})), Paragraph(Message(exact))


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

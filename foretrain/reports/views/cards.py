"""Several cards beside each other: what fits in one table, what it takes in a second, so that 80 columns do."""

from foretrain.advice.cards import Choice
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan, Timing
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.shared import TONES, assumed, uncalibrated, verdict_word


def document(plans: list[Plan], choice: Choice) -> Document:
    """`--gpu a,b,c`: does it fit and where is it highest; hours, energy and money; the best of those that fit."""
    sections = [
        Section(Message("cards.memory"), (_memory(plans), *assumed(plans[0]))),
        Section(Message("cards.takes"), (_takes(plans, choice), *_best(plans, choice), *_sources(plans))),
    ]
    return Document(Message("plan.title", {"name": plans[0].name}), Message("cards.subtitle"), sections)


def _sources(plans: list[Plan]) -> list[Block]:
    return [Paragraph(uncalibrated(plans[0])), Paragraph(Message("source.power"))] if plans else []


def _memory(plans: list[Plan]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for plan in plans:
        neediest = plan.memory_of(plan.step).neediest
        rows.append(
            (
                plan.gpu.name,
                Quantity(plan.gpu.memory_bytes, "bytes"),
                Quantity(neediest.needed_expected_bytes, "bytes"),
                Message(f"phase.{neediest.phase}"),
                verdict_word(plan.verdict),
                verdict_word(plan.verdict_of("nanogpt" if plan.step == "foretrain" else "foretrain")),
                plan.dtype,
            )
        )
    verdicts = (
        ("verdict", "nanogpt_verdict") if plans[0].step == "foretrain" else ("nanogpt_verdict", "foretrain_verdict")
    )
    names = ("gpu", "memory", "needed_short", "highest_in", *verdicts, "dtype")
    tones = tuple(TONES[verdict] if verdict in REFUSED else "plain" for verdict in (plan.verdict for plan in plans))
    return Table(tuple(Message(f"column.{n}") for n in names), tuple(rows), frozenset({1, 2}), tones, optional=(6, 1))


def _takes(plans: list[Plan], choice: Choice) -> Table:
    rented = any(plan.config.price_per_hour for plan in plans)
    with_co2 = any(plan.config.co2_per_kwh for plan in plans)
    all_rented = all(plan.config.price_per_hour for plan in plans)  # whoever rents pays no electricity
    rows = []
    for plan in plans:
        timing = plan.timing_of(plan.step)
        marks = " ".join(Message(f"mark.{mark}").text() for mark in choice.marks(plan.gpu.name))
        row: list[Cell] = [plan.gpu.name, Quantity(timing.length_s.expected_s if timing else None, "duration")]
        row += [_span(timing), Quantity(timing.mfu if timing else None, "percent")]
        row += [Quantity(timing.energy_expected_j if timing else None, "energy")]
        if not all_rented:
            row += [Quantity(timing.cost_expected if timing else None, "money")]
        if rented:
            row += [Quantity(timing.rent_expected if timing else None, "money")]
        if with_co2:
            row += [Quantity(timing.co2_expected_g if timing else None, "mass")]
        rows.append((*row, marks))
    names = ["gpu", "hours", "range", "mfu", "energy"]
    names += ["cost"] * (not all_rented) + ["rent"] * rented + ["co2"] * with_co2 + ["best"]
    heads = tuple(Message(f"column.{name}", {"currency": plans[0].config.currency}) for name in names)
    return Table(heads, tuple(rows), frozenset(range(1, len(names) - 1)), optional=(3, 4))


def _span(timing: Timing | None) -> Cell:
    if timing is None:
        return "–"
    return Message("value.range_only", {"low": timing.length_s.low_s, "high": timing.length_s.high_s})


def _best(plans: list[Plan], choice: Choice) -> list[Block]:
    if choice.fastest is None:
        return [Paragraph(Message("cards.none_fits"), "warn")]
    blocks: list[Block] = [
        Paragraph(Message(f"cards.{field}", {"name": getattr(choice, field)}), "good")
        for field in ("cheapest", "fastest", "least_energy")
        if getattr(choice, field)
    ]
    if choice.mixed_prices:
        blocks.append(Paragraph(Message("cards.mixed"), "warn"))
    return blocks

"""The whole plan for several cards: each strategy, its memory by phase, what it sends, time, energy and money."""

from foretrain.predict.ranks import ClusterPlan, RankPlan, notes_of_ranks
from foretrain.predict.speed.time import Range
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.cluster import screen
from foretrain.reports.views.plan import duration
from foretrain.reports.views.shared import TONES, uncalibrated, verdict_word, within_answer


def document(plan: ClusterPlan, within: Within | None = None) -> Document:
    """`within`: what fits in a limit, which the plan is of."""
    cluster, one = plan.cluster, plan.one_card
    subtitle = Message("cluster.subtitle", {
        "cluster": cluster.text, "memory": cluster.gpu.memory_bytes or 0, "dtype": one.dtype, "world": cluster.world,
    })  # fmt: skip
    answer = [] if within is None else [Section(Message("within.section"), (Paragraph(within_answer(within), "good"),))]
    sections = [
        *answer,
        Section(Message("plan.verdict"), tuple(_verdict(plan))),
        Section(Message("cluster.section.strategies"), (_strategies(plan), *map(Paragraph, screen.refused(plan)))),
        Section(Message("plan.memory"), tuple(_phases(plan))),
        Section(Message("cluster.section.communication"), tuple(_communication(plan))),
        Section(Message("plan.time"), tuple(_time(plan))),
        Section(Message("plan.notes"), tuple(_notes(plan))),
    ]
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def _verdict(plan: ClusterPlan) -> list[Block]:
    blocks: list[Block] = [Paragraph(screen.verdict(plan), TONES[plan.verdict])]
    said = screen.pays(plan)
    if said is not None:
        blocks.append(Paragraph(said))
    blocks += [Paragraph(Message("cluster.helps", {"change": screen.change(plan, one)})) for one in plan.pays.changes]
    return blocks


def _strategies(plan: ClusterPlan) -> Table:
    names = ("strategy", "verdict", "needed", "range", "step", "rate", "speed_up", "efficiency", "hours", "money_of")
    heads = tuple(Message(f"column.{name}", {"currency": plan.config.currency}) for name in names)
    tones = tuple("strong" if rank.id == plan.chosen else "plain" for rank in plan.ranks)
    numeric = frozenset(range(2, len(names)))
    return Table(heads, tuple(_strategy(rank) for rank in plan.ranks), numeric, tones, optional=(3, 7, 5))


def _strategy(rank: RankPlan) -> tuple[Cell, ...]:
    low, expected, high = rank.memory.neediest.needed_span
    first = (
        screen.strategy(rank),
        verdict_word(rank.verdict),
        Quantity(expected, "bytes"),
        Quantity((low, high), "bytes_range"),
    )
    if rank.time is None or rank.timing is None:
        return *first, *("–",) * 6
    money, factor = rank.timing.money(), rank.speed_up
    return (
        *first,
        Quantity(rank.time.step_s.expected_s, "duration"),
        Quantity(rank.timing.tokens_per_s, "count"),
        Quantity(factor.expected if factor else None, "factor"),
        Quantity(rank.efficiency, "percent"),
        Quantity(rank.timing.length_s.expected_s, "duration"),
        Quantity(money[1] if money else None, "money"),
    )


def _phases(plan: ClusterPlan) -> list[Block]:
    names = ("strategy", "phase", "allocated", "needed", "range", "verdict")
    heads = tuple(Message(f"column.{name}") for name in names)
    rows: list[tuple[Cell, ...]] = []
    for rank in plan.ranks:
        for i, phase in enumerate(rank.memory.phases):
            low, expected, high = phase.needed_span
            rows.append((
                screen.strategy(rank) if i == 0 else "", Message(f"phase.{phase.phase}"),
                Quantity(phase.allocated_bytes, "bytes"), Quantity(expected, "bytes"),
                Quantity((low, high), "bytes_range"), verdict_word(phase.verdict),
            ))  # fmt: skip
    traced = [str(number) for number in sorted({number for rank in plan.ranks for number in rank.traced_ranks})]
    return [
        Table(heads, tuple(rows), frozenset({2, 3, 4}), optional=(4,)),
        Paragraph(Message("cluster.needs_source", _nccl(plan))),
        *([Paragraph(Message("cluster.traced_ranks", {"ranks": traced}))] if traced else []),
    ]


def _nccl(plan: ClusterPlan) -> dict[str, object]:
    nccl = (plan.best or plan.least).nccl
    return {"sizes": (nccl.low_bytes, nccl.high_bytes)}


def _communication(plan: ClusterPlan) -> list[Block]:
    names = ("strategy", "sent", "collective", "calls", "bytes", "took", "waits_for")
    heads = tuple(Message(f"column.{name}") for name in names)
    rows: list[tuple[Cell, ...]] = []
    for rank in plan.ranks:
        for i, sent in enumerate(rank.time.communication if rank.time else ()):
            rows.append((
                screen.strategy(rank) if i == 0 else "", Message(f"cluster.sent.{sent.what}"),
                sent.collective.replace("_", "-"), f"{sent.calls:,}", Quantity(sent.size_bytes, "bytes"),
                Quantity(sent.busy_s, "duration"),
                Quantity(rank.time.waits_s.expected_s, "duration") if i == 0 and rank.time else "",
            ))  # fmt: skip
    said: list[Block] = [Paragraph(screen.links(plan)), Paragraph(Message("cluster.communication_source"))]
    return [Table(heads, tuple(rows), frozenset({3, 4, 5, 6}), optional=(3,)), *said] if rows else said


def _time(plan: ClusterPlan) -> list[Block]:
    rank, one = plan.best or plan.least, plan.one_card
    timing = rank.timing
    if timing is None or rank.time is None:
        id = "plan.no_time_of_recipe" if one.of_untimed_recipe else "plan.no_time"
        return [Paragraph(Message(id, {"gpu": plan.cluster.gpu.name, "recipe": plan.config.recipe}))]
    total, own, waits = timing.length_s, rank.time.compute_s, rank.time.waits_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), duration(*_span(timing.step_s))),
        (Message("cluster.row.own"), duration(*_span(own))),
        (Message("cluster.row.waits"), duration(*_span(waits))),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.total_time"), duration(*_span(total))),
    ]
    if timing.mfu is not None:
        rows.insert(4, (Message("cluster.row.mfu"), Quantity(timing.mfu, "percent")))
    if one.timing is not None:
        rows.append((Message("cluster.row.one_card"), duration(*_span(one.timing.length_s))))
    if timing.power is not None:
        values = {
            "expected": timing.energy_expected_j, "low": timing.energy_low_j, "high": timing.energy_high_j,
            "watts": timing.power.expected_w, "count": plan.cluster.world,
        }  # fmt: skip
        rows.append((Message("row.energy"), Message("cluster.energy", values)))
    money = timing.money()
    if money is not None:
        values = {"low": money[0], "expected": money[1], "high": money[2], "currency": plan.config.currency}
        label = "row.rent" if timing.rent_expected is not None else "row.electricity"
        rows.append((Message(label), Message("cluster.money", values)))
    source = uncalibrated(one) if timing.source == "estimated" else Message("source.calibrated")
    return [Table((), tuple(rows)), Paragraph(source)]


def _span(found: Range) -> tuple[float, float, float]:
    return found.low_s, found.expected_s, found.high_s


def _notes(plan: ClusterPlan) -> list[Block]:
    taken = [Paragraph(Message("cluster.taken", {"what": message})) for message in screen.assumptions(plan)]
    return [*taken, *(Paragraph(Message(f"note.{note.id}", note.values)) for note in notes_of_ranks(plan.one_card))]

"""A plan for several cards: which strategies fit, the best one, time and money, whether it pays; or all of it."""

from collections.abc import Sequence

from foretrain.advice.asked import QUIET, Asked
from foretrain.hardware.cluster import Cluster
from foretrain.predict.memory import REFUSED
from foretrain.predict.ranks import Change, ClusterPlan, Factor, RankPlan, notes_of_ranks
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Row, Screen, Section, Table
from foretrain.reports.views.lead import assumed_rows, assumptions, lead_of, link, strategy, title
from foretrain.reports.views.shared import TONES, Page, needs_of_free, verdict_word
from foretrain.reports.views.takes import no_time, speed_source, takes_rows, time_rows

MOST_LINES = 17


def screen(plan: ClusterPlan, asked: Asked) -> Screen:
    rows = [*_pays(plan), *takes_rows(plan, plan.timing), Row(Message("cluster.label.link"), links(plan))]
    rows += [Row(Message("first.label.note"), each) for each in refused(plan)]
    rows += [*next_rows(plan, asked), *assumed_rows(plan)]
    if not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("cluster.more"), optional=3))
    return Screen(title(plan, asked), tuple(lead_of(plan)), _table(plan), tuple(rows), most_lines=MOST_LINES)


def shown(plan: ClusterPlan) -> list[RankPlan]:
    """Return a row for each strategy: of its two ways with gradients the meant, else the quicker or smaller one."""
    found: dict[str, RankPlan] = {}
    for rank in plan.ranks:
        other = found.get(rank.strategy)
        if other is None or rank.id == plan.chosen:
            found[rank.strategy] = rank
        elif other.id != plan.chosen:
            found[rank.strategy] = min((other, rank), key=_worth)
    return list(found.values())


def _worth(rank: RankPlan) -> tuple[int, float]:
    order = ("fits", "tight", None, "may_not_fit", "does_not_fit")
    time_s = rank.time.step_s.expected_s if rank.time else 0.0
    return order.index(rank.verdict), rank.memory.needed_bytes if rank.verdict == "does_not_fit" else time_s


def _table(plan: ClusterPlan) -> Table:
    names = ("strategy", "verdict", "needs_of_free", "step", "waits", "hours", "money_of")
    heads = tuple(Message(f"column.{name}", {"currency": plan.config.currency}) for name in names)
    ranks = shown(plan)
    tones = tuple("strong" if rank.id == plan.chosen else _tone(rank) for rank in ranks)
    return Table(heads, tuple(_row(plan, rank) for rank in ranks), frozenset({2, 3, 4, 5, 6}), tones, optional=(6, 4))


def _tone(rank: RankPlan) -> str:
    return "plain" if rank.verdict == "fits" else TONES[rank.verdict]


def _row(plan: ClusterPlan, rank: RankPlan) -> tuple[Cell, ...]:
    needs = needs_of_free(rank.memory.needed_bytes, rank.verdict, plan.one_card.available_bytes)
    first = strategy(rank), verdict_word(rank.verdict), needs
    if rank.time is None or rank.timing is None:
        return *first, "–", "–", "–", "–"
    total, money = rank.timing.length_s, rank.timing.money()
    span = Quantity((total.low_s, total.expected_s, total.high_s), "duration_span")
    step = Quantity(rank.time.step_s.expected_s, "duration"), Quantity(rank.time.waiting_share, "percent")
    return *first, *step, span, Quantity(money[1] if money else None, "money")


def _pays(plan: ClusterPlan) -> list[Row]:
    answer = pays(plan)
    rows = [] if answer is None else [Row(Message("cluster.label.pays"), answer)]
    helps = [Row(Message("cluster.label.helps"), change(plan, made)) for made in plan.pays.changes]
    return rows + helps


def next_rows(plan: ClusterPlan, asked: Asked, changed: Sequence[str] = ()) -> list[Row]:
    """Return the command that runs it, writes a job, or looks for a micro-batch."""
    if asked.quiet:
        return []
    label = Message("first.label.next")
    if plan.verdict in REFUSED:
        if plan.config.batch_size == 1:
            return []
        command = ("foretrain", "plan", *asked.words, "--batch_size=auto", *changed, *asked.card_options())
        return [Row(label, Message("cluster.smaller"), command)]
    if plan.cluster.nodes > 1:
        words = (*asked.words, *changed, *asked.card_options(), "--write-job", "slurm")
        return [Row(label, command=("foretrain", "plan", *words))]
    best = plan.best
    how = plan.options_of(best) if best else ()
    return [Row(label, command=("foretrain", "train", *asked.words, *changed, *how, "--gpus", str(plan.cluster.world)))]


GB = 1e9


def refused(plan: ClusterPlan) -> list[Message]:
    return [*(Message(f"error.{note.id}", note.values) for note in plan.refused), *untraced(plan)]


def untraced(plan: ClusterPlan) -> list[Message]:
    reasons: dict[str, dict[str, None]] = {}
    for rank in plan.ranks:
        if rank.untraced:
            name = Message(f"cluster.strategy.{rank.strategy}").text()
            reasons.setdefault(rank.untraced, {})[name] = None
    return [Message("cluster.untraced", {"strategies": [*names], "reason": why}) for why, names in reasons.items()]


def times(factor: Factor) -> Message:
    return Message("cluster.times", factor.model_dump())


def pays(plan: ClusterPlan) -> Message | None:
    best, found = plan.best, plan.pays
    if found.word == "unknown" or best is None:
        return None
    values = {"count": plan.cluster.world, "gpu": plan.cluster.gpu.name, "saved": "", "money": ""}
    if best.speed_up is None or found.saved_s is None:
        return Message("cluster.pays.needed", values)
    values |= {"times": times(best.speed_up), "saved": _saved(found.saved_s), "money": _money(plan)}
    return Message(f"cluster.{'pays_two' if plan.cluster.world == 2 else 'pays'}.{found.word}", values)


def _saved(seconds: float) -> Message:
    return Message("cluster.sooner" if seconds >= 0 else "cluster.later", {"seconds": abs(seconds)})


def _money(plan: ClusterPlan) -> Message:
    more = plan.pays.more_money
    if more is None:
        return Message("cluster.no_money")
    values = {"amount": abs(more), "currency": plan.config.currency}
    return Message("cluster.dearer" if more >= 0 else "cluster.cheaper", values)


def change(plan: ClusterPlan, made: Change) -> Message:
    values = {**made.model_dump(), "times": times(made.speed_up), "before": plan.config.tokens_per_step}
    return Message(f"cluster.change.{made.what}", values)


def links(plan: ClusterPlan) -> Message:
    cluster, best = plan.cluster, plan.best or plan.least
    waits = best.time.waiting_share if best.time else 0.0
    values = {"waits": waits, "inside": _inside(cluster), "between": _between(cluster)}
    return Message("cluster.links" if cluster.nodes == 1 else "cluster.links_between", values)


def _inside(cluster: Cluster) -> Cell:
    if cluster.per_node == 1:
        return Message("cluster.alone_in_node")
    found = cluster.link
    values = {"link": link(found), "rate": found.bytes_per_s / GB, "least": found.least_bytes_per_s / GB}
    how = "host" if found.through_host else "direct"
    return Message(f"cluster.{'link' if found.least_share else 'link_alike'}.{how}", values)


def _between(cluster: Cluster) -> Cell:
    if cluster.network is None:
        return ""
    rate = cluster.network.bytes_per_s * cluster.nics_per_node / GB
    return Message("cluster.network", {"network": link(cluster.network), "nics": cluster.nics_per_node, "rate": rate})


# -- the whole plan ------------------------------------------------------------------------------------------------


def document(plan: ClusterPlan) -> Document:
    cluster, one = plan.cluster, plan.one_card
    subtitle = Message("cluster.subtitle", {
        "cluster": cluster.text, "memory": cluster.gpu.memory_bytes or 0, "dtype": one.dtype, "world": cluster.world,
    })  # fmt: skip
    sections = [
        Section(Message("plan.verdict"), tuple(_verdict(plan))),
        Section(Message("cluster.section.strategies"), (_strategies(plan), *map(Paragraph, refused(plan)))),
        Section(Message("plan.memory"), tuple(_phases(plan))),
        Section(Message("cluster.section.communication"), tuple(_communication(plan))),
        Section(Message("plan.time"), tuple(_time(plan))),
        Section(Message("plan.notes"), tuple(_notes(plan))),
    ]
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def page(plan: ClusterPlan) -> Page:
    made = document(plan)
    needs = [(strategy(rank), rank.memory, rank.verdict) for rank in shown(plan)]
    return Page(made, needs, (made.subtitle,), screen=screen(plan, QUIET))


def _verdict(plan: ClusterPlan) -> list[Block]:
    blocks: list[Block] = [*lead_of(plan)]
    answer = pays(plan)
    if answer is not None:
        blocks.append(Paragraph(answer))
    blocks += [Paragraph(Message("cluster.helps", {"change": change(plan, one)})) for one in plan.pays.changes]
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
        strategy(rank),
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
                strategy(rank) if i == 0 else "", Message(f"phase.{phase.phase}"),
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
                strategy(rank) if i == 0 else "", Message(f"cluster.sent.{sent.what}"),
                sent.collective.replace("_", "-"), f"{sent.calls:,}", Quantity(sent.size_bytes, "bytes"),
                Quantity(sent.busy_s, "duration"),
                Quantity(rank.time.waits_s.expected_s, "duration") if i == 0 and rank.time else "",
            ))  # fmt: skip
    blocks: list[Block] = [Paragraph(links(plan)), Paragraph(Message("cluster.communication_source"))]
    return [Table(heads, tuple(rows), frozenset({3, 4, 5, 6}), optional=(3,)), *blocks] if rows else blocks


def _time(plan: ClusterPlan) -> list[Block]:
    timing = plan.timing
    if timing is None:
        return [Paragraph(no_time(plan, "plan"))]
    return [Table((), tuple(time_rows(plan, timing))), Paragraph(speed_source(plan, timing))]


def _notes(plan: ClusterPlan) -> list[Block]:
    taken = [Paragraph(Message("cluster.taken", {"what": message})) for message in assumptions(plan)]
    return [*taken, *(Paragraph(Message(f"note.{note.id}", note.values)) for note in notes_of_ranks(plan.one_card))]

"""The first screen of a plan for several cards: which strategies fit, the best one, hours, money, whether it pays."""

from collections.abc import Sequence

from foretrain.advice.asked import Asked
from foretrain.base.messages import has, listed
from foretrain.config.sharing import StrategyName, of_one_strategy
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.links import Link
from foretrain.predict.memory import REFUSED, PhaseMemory
from foretrain.predict.ranks import Change, ClusterPlan, Factor, RankPlan
from foretrain.predict.within import Within
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Row, Screen, Table
from foretrain.reports.views.shared import TONES, cost_of, needs_of_free, verdict_id, verdict_word, within_answer

MOST_LINES = 17


def screen(plan: ClusterPlan, asked: Asked, within: Within | None = None) -> Screen:
    """`within`: what fits in a limit, which the plan is of."""
    lead = [Paragraph(Message("first.said", {"text": verdict(plan)}), TONES[plan.verdict])]
    changed: tuple[str, ...] = ()
    if within is not None:
        lead.insert(1 if plan.verdict in REFUSED else 0, Paragraph(within_answer(within), "good"))
        changed = () if asked.wrote else tuple(f"--{name}={getattr(plan.config, name)}" for name in within.changed)
    rows = [*_pays(plan), *_takes(plan), Row(Message("cluster.label.link"), links(plan))]
    rows += [Row(Message("first.label.note"), each) for each in refused(plan)]
    rows += [*_next(plan, asked, changed), *_assumed(plan)]
    if not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("cluster.more"), optional=3))
    return Screen(_title(plan), tuple(lead), _table(plan), tuple(rows), most_lines=MOST_LINES)


def _title(plan: ClusterPlan) -> Message:
    rank = plan.best or plan.least
    memory, time = rank.memory.source, rank.timing.source if rank.timing else rank.memory.source
    sources = Message("first.source", {"source": memory})
    if time != memory:
        sources = Message("first.sources", {"memory": memory, "time": time})
    values = {"name": plan.name, "gpu": plan.cluster.text, "params": plan.one_card.counts.n_params}
    return Message("first.title", {**values, "sources": sources})


def shown(plan: ClusterPlan) -> list[RankPlan]:
    """A row for each strategy: of one with gradients summed each time or held back the one that is meant, else the
    quicker of those that fit best; where none fits, the one that needs less."""
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
    said = pays(plan)
    rows = [] if said is None else [Row(Message("cluster.label.pays"), said)]
    helps = [Row(Message("cluster.label.helps"), change(plan, made)) for made in plan.pays.changes]
    return rows + helps


def _takes(plan: ClusterPlan) -> list[Row]:
    rank = plan.best or plan.least
    timing = rank.timing
    if timing is None:
        why = Message("first.no_time", {"gpu": plan.cluster.gpu.name})
        if plan.one_card.of_untimed_recipe:
            why = Message("first.no_time_of_recipe", {"recipe": plan.config.recipe})
        return [Row(Message("first.label.time"), why)]
    total, work = timing.length_s, plan.one_card.work
    values = {
        "total": (total.low_s, total.expected_s, total.high_s), "steps": work.steps, "step": timing.step_s.expected_s,
        "micro_batches": plan.micro_batches, "batch_size": plan.config.batch_size,
    }  # fmt: skip
    said = Message("cluster.time", values), cost_of(plan.config, timing, plan.gpu, plan.cluster.world)
    if plan.verdict in REFUSED:
        said = tuple(Message("first.if_fitted", {"text": each}) for each in said)
    return [Row(Message(f"first.label.{label}"), text) for label, text in zip(("time", "cost"), said, strict=True)]


def _next(plan: ClusterPlan, asked: Asked, changed: Sequence[str]) -> list[Row]:
    """The command that runs it, of several machines the one that writes a job for them; where nothing fits, the one
    that looks for a micro-batch."""
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


def _assumed(plan: ClusterPlan) -> list[Row]:
    said = [message.text() for message in assumptions(plan)]
    notes = [*plan.one_card.assumptions, *plan.one_card.notes]
    brief = list(said)
    for note in notes:
        if has(f"first.assumed.{note.id}"):
            said.append(Message(f"first.assumed.{note.id}", note.values).text())
            short = f"first.assumed_short.{note.id}"
            brief.append(Message(short if has(short) else f"first.assumed.{note.id}", note.values).text())
    return [Row(Message("first.label.assumed"), listed(said), short=listed(brief))]


GB = 1e9


def strategy(rank: RankPlan) -> Message:
    return way(rank.strategy, held=not rank.syncs_each)


def way(strategy: StrategyName, *, held: bool) -> Message:
    name = Message(f"cluster.strategy.{strategy}")
    return Message("cluster.held", {"strategy": name}) if held else name


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


def where(phase: PhaseMemory) -> Message:
    part = phase.moment.partition(".")[0]
    return Message(f"first.where.{'evaluation' if phase.phase.startswith('evaluate') else part}")


def verdict(plan: ClusterPlan) -> Message:
    best = plan.best
    rank = best or plan.least
    phase, available = rank.memory.neediest, plan.one_card.available_bytes
    values = {
        "strategy": strategy(rank), "peak": phase.needed_span, "where": where(phase),
        "available": available or 0, "count": len(plan.ranks), "others": "",
    }  # fmt: skip
    if best is None:
        return Message("cluster.verdict.none", values)
    said = Message(f"cluster.verdict.{verdict_id(best.verdict, rank.memory.needed_bytes, available)}", values).text()
    return Message("first.two", {"one": said, "other": _why(plan, best)})


def _why(plan: ClusterPlan, best: RankPlan) -> Message:
    if of_one_strategy(plan.ways):
        return Message("cluster.why.asked")
    fitting = [rank for rank in plan.ranks if rank.verdict == best.verdict and rank.time]
    if len({rank.strategy for rank in fitting}) < 2:
        others = any(rank.verdict != best.verdict for rank in plan.ranks)
        return Message("cluster.why.only" if others else "cluster.why.one")
    quickest = min(fitting, key=lambda rank: rank.time.step_s.expected_s if rank.time else 0.0)
    if quickest.id == best.id:
        return Message("cluster.why.fastest")
    return Message("cluster.why.plainest", {"other": strategy(quickest)})


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


def link(found: Link) -> str:
    return found.aliases[0] if found.aliases else found.name


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


def assumptions(plan: ClusterPlan) -> list[Message]:
    cluster = plan.cluster
    others = [name for name in cluster.choices if name != cluster.gpu.name]
    values = {
        "link": link(cluster.link), "network": link(cluster.network) if cluster.network else "",
        "meant": cluster.meant, "gpu": cluster.gpu.name, "choices": others, "nodes": cluster.nodes,
        "per_node": cluster.per_node,
    }  # fmt: skip
    found = [Message(f"cluster.assumed.{id}", values) for id in cluster.assumed]
    nccl = (plan.best or plan.least).nccl
    found.append(Message("cluster.assumed.nccl", {"sizes": (nccl.low_bytes, nccl.high_bytes)}))
    return found

"""The first screen of a plan for several cards: which strategies fit, the best one, hours, money, whether it pays."""

from collections.abc import Sequence

from foretrain.advice.asked import Asked
from foretrain.base.messages import has, listed
from foretrain.predict.memory import REFUSED
from foretrain.predict.ranks.record import ClusterPlan, RankPlan
from foretrain.predict.within import Within
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Row, Screen, Table
from foretrain.reports.views.cluster import words
from foretrain.reports.views.shared import TONES, cost_of, needs_of_free, verdict_id, verdict_word, within_answer

MOST_LINES = 17


def screen(plan: ClusterPlan, asked: Asked, within: Within | None = None) -> Screen:
    """`within`: what fits in a limit, which the plan is of."""
    lead = [Paragraph(Message("first.said", {"text": words.verdict(plan)}), TONES[plan.verdict])]
    changed: tuple[str, ...] = ()
    if within is not None:
        lead.insert(1 if plan.verdict in REFUSED else 0, Paragraph(within_answer(within), "good"))
        changed = () if asked.wrote else tuple(f"--{name}={getattr(plan.config, name)}" for name in within.changed)
    rows = [*_pays(plan), *_takes(plan), Row(Message("cluster.label.link"), words.links(plan))]
    rows += [Row(Message("first.label.note"), each) for each in words.refused(plan)]
    rows += [*_next(plan, asked, changed), *_assumed(plan)]
    if not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("cluster.more"), optional=3))
    return Screen(_title(plan), tuple(lead), _table(plan), tuple(rows), most_lines=MOST_LINES)


def line(plan: ClusterPlan, version: str) -> Message:
    """The whole answer in one line, to be pasted."""
    best = plan.best
    rank = best or plan.least
    needed, available = rank.memory.needed_bytes, plan.one_card.available_bytes
    memory = Message(
        f"first.line_memory.{verdict_id(rank.verdict, needed, available)}",
        {"needed": needed, "available": available or 0},
    )
    parts = [words.strategy(rank).text(), memory.text()]
    if best is not None and best.timing is not None and best.speed_up is not None:
        total, money = best.timing.length_s, best.timing.money()
        parts.append(Quantity((total.low_s, total.expected_s, total.high_s), "rough_duration_span").text())
        if money is not None and money[1]:
            parts.append(Message("value.amount_rough", {"amount": money[1], "currency": plan.config.currency}).text())
        parts.append(Message("cluster.line_times", {"expected": best.speed_up.expected}).text())
    values = {"name": plan.name, "gpu": plan.cluster.text, "parts": listed(parts), "version": version}
    return Message("first.line", {**values, "source": rank.memory.source})


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
    first = words.strategy(rank), verdict_word(rank.verdict), needs
    if rank.time is None or rank.timing is None:
        return *first, "–", "–", "–", "–"
    total, money = rank.timing.length_s, rank.timing.money()
    span = Quantity((total.low_s, total.expected_s, total.high_s), "duration_span")
    step = Quantity(rank.time.step_s.expected_s, "duration"), Quantity(rank.time.waiting_share, "percent")
    return *first, *step, span, Quantity(money[1] if money else None, "money")


def _pays(plan: ClusterPlan) -> list[Row]:
    said = words.pays(plan)
    rows = [] if said is None else [Row(Message("cluster.label.pays"), said)]
    helps = [Row(Message("cluster.label.helps"), words.change(plan, made)) for made in plan.pays.changes]
    return rows + helps


def _takes(plan: ClusterPlan) -> list[Row]:
    """Hours and money of all cards, with the strategy that is meant; else of the one that needs least, if it fitted."""
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
    said = Message("cluster.time", values), _cost(plan, rank)
    if plan.verdict in REFUSED:
        said = tuple(Message("first.if_fitted", {"text": each}) for each in said)
    return [Row(Message(f"first.label.{label}"), text) for label, text in zip(("time", "cost"), said, strict=True)]


def _cost(plan: ClusterPlan, rank: RankPlan) -> Message:
    assert rank.timing is not None
    if rank.timing.rent_expected is None:
        return cost_of(plan.config, rank.timing, plan.cluster.gpu)
    money = (rank.timing.rent_low, rank.timing.rent_expected, rank.timing.rent_high, plan.config.currency)
    price = {"price_hour": plan.config.price_per_hour, "currency": plan.config.currency, "count": plan.cluster.world}
    return Message("cluster.rent", {"money": money, **price})


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
    """What was taken without knowing it: of the cluster, and what the plan of one card takes."""
    said = [message.text() for message in words.assumptions(plan)]
    notes = [*plan.one_card.assumptions, *plan.one_card.notes]
    brief = list(said)
    for note in notes:
        if has(f"first.assumed.{note.id}"):
            said.append(Message(f"first.assumed.{note.id}", note.values).text())
            short = f"first.assumed_short.{note.id}"
            brief.append(Message(short if has(short) else f"first.assumed.{note.id}", note.values).text())
    return [Row(Message("first.label.assumed"), listed(said), short=listed(brief))]

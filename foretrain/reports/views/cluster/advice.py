"""What to change on several cards: whether one would do, what others would give, and a row for each change."""

import shlex
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.cluster import options_of
from foretrain.advice.record import Advice, Advices, CardCount, Cards, Idle, Way, with_settings
from foretrain.base.messages import has, listed
from foretrain.config.resolve import WORDS
from foretrain.config.words import as_word
from foretrain.hardware.links import find_link
from foretrain.predict.memory import FAILING
from foretrain.predict.ranks import ClusterPlan
from foretrain.reports.document import (
    Block,
    Cell,
    Document,
    Message,
    Paragraph,
    Quantity,
    Row,
    Screen,
    Section,
    Table,
    Verbatim,
)
from foretrain.reports.views.advice import EXACTNESS_ID, detail
from foretrain.reports.views.cluster import screen as screen_view
from foretrain.reports.views.shared import TONES, taken_bytes, verdict_word

LINES = 17
MOST = 4  # changes of the first screen


def screen(plan: ClusterPlan, found: Advices, asked: Asked, count: int | None = None) -> Screen:
    """The best changes. `count`: how many were asked for."""
    advised = found.advised[: count or MOST]
    partial = found.partial[: max(0, 2 - len(advised))]
    sources = Message("first.source", {"source": found.now.source})
    values = {"name": found.name, "gpu": plan.cluster.text, "goal": Message(f"goal.{found.goal}"), "sources": sources}
    lead = [Paragraph(Message("first.said", {"text": screen_view.verdict(plan)}), TONES[plan.verdict]), *_alone(found)]
    lead += _nothing(found, advised)
    rows = [Row(Message("cluster_advice.label.counts"), _counts(found))]
    if not asked.quiet:
        commands = [command(plan, found, change, asked) for change in advised[:1]]
        rows += [Row(Message("first.label.next"), command=each) for each in commands]
        hidden = len(found.advised) - len(advised)
        more = Message("cluster_advice.more" if hidden else "cluster_advice.all", {"count": hidden})
        rows.append(Row(Message("first.label.more"), more, optional=2))
    table = _table(plan, found, advised, partial) if advised or partial else None
    return Screen(Message("advice.screen_title", values), tuple(lead), table, tuple(rows), LINES)


def document(plan: ClusterPlan, found: Advices, hidden: int = 0) -> Document:
    """All advice; `hidden`: how many changes were cut off."""
    listed_blocks: list[Block] = [_table(plan, found, found.advised)] if found.advised else []
    listed_blocks += _nothing(found, found.advised)
    if hidden:
        listed_blocks.append(Paragraph(Message("advice.more", {"count": hidden, "all": hidden + len(found.advised)})))
    sections = [
        Section(Message("advice.now"), (Paragraph(screen_view.verdict(plan), TONES[plan.verdict]),)),
        Section(Message("cluster_advice.section.counts"), (*_alone(found), _count_table(found))),
        Section(Message("advice.list"), tuple(listed_blocks)),
    ]
    if found.partial:
        sections.append(Section(Message("advice.partial"), (_table(plan, found, found.partial),)))
    if found.useless:
        sections.append(Section(Message("advice.useless"), tuple(_useless(found.useless))))
    sections.append(Section(Message("advice.explained"), (Paragraph(Message("cluster_advice.how")),)))
    subtitle = {
        "gpu": plan.cluster.text, "goal": Message(f"goal.{found.goal}"), "source": Message("plan.source")
    }  # fmt: skip
    return Document(Message("advice.title", {"name": found.name}), Message("advice.subtitle", subtitle), sections)


def way_name(way: Way) -> Message:
    return screen_view.way(way.strategy, held=way.holds_gradients)


def short(plan: ClusterPlan, found: Advices, change: Advice) -> str:
    """A change in a few words: its rules with their values, and how the cards share a step then, if otherwise."""
    told = " + ".join(_short(plan, change, rule).text() for rule in change.rules)
    ways = {"strategy", "resharding", "hold_gradients"} & set(change.rules)
    if _cards_of(change).way == found.way or ways:
        return told
    return Message("cluster_advice.with_way", {"change": told, "way": way_name(_cards_of(change).way)}).text()


def _cards_of(change: Advice) -> Cards:
    assert change.shared is not None
    return change.shared


def _short(plan: ClusterPlan, change: Advice, rule: str) -> Message:
    own = f"cluster_advice.rule.{rule}"
    id = own if has(own) else f"rule.{rule}.short" if has(f"rule.{rule}.short") else "rule.untold.short"
    config = with_settings(plan.config, change.settings)
    cards = _cards_of(change)
    shown = {"cluster": cards.text, "way": way_name(cards.way), "link": _link(cards.link), "rule": rule}
    shown |= {"checkpointed": config.checkpointed, "tokens_per_step": change.tokens_per_step}
    return Message(id, {**config.model_dump(), **shown})


def _link(name: str) -> str:
    found = find_link(name)
    return screen_view.link(found) if found else name


def _named(rule: str) -> str:
    for id in (f"cluster_advice.rule_name.{rule}", f"rule_name.{rule}"):
        if has(id):
            return Message(id).text()
    return rule


def _alone(found: Advices) -> list[Paragraph]:
    alone, gpu = found.counts[0].effect, found.gpu
    if alone is None or alone.verdict is None:
        return []
    values = {"gpu": gpu, "needed": alone.needed_bytes, "available": alone.available_bytes or 0}
    values |= {"total": alone.total_s or 0.0, "now": found.now.total_s or 0.0}
    if alone.total_s and found.now.total_s:
        return [Paragraph(Message(f"cluster_advice.alone.{alone.verdict}", values))]
    return [Paragraph(Message(f"cluster_advice.alone_untimed.{alone.verdict}", values))]


def _nothing(found: Advices, advised: tuple[Advice, ...]) -> list[Paragraph]:
    if advised:
        return []
    return [Paragraph(Message("advice.nothing" if found.nothing_fits else "advice.nothing_better"), "warn")]


def _counts(found: Advices) -> str:
    return listed([_count(each) for each in found.counts if each.cards > 1])


def _count(each: CardCount) -> str:
    values: dict[str, Any] = {"cards": each.cards}
    if each.effect is None:
        return Message("cluster_advice.count.indivisible", values).text()
    if each.effect.total_s is None or each.speed_up is None or each.effect.verdict in FAILING:
        verdict = verdict_word(each.effect.verdict)
        return Message("cluster_advice.count.untimed", {**values, "verdict": verdict}).text()
    values |= {"total": each.effect.total_s, "expected": each.speed_up.expected}
    return Message(
        "cluster_advice.count.fits" if each.effect.verdict == "fits" else "cluster_advice.count.tight", values
    ).text()


def _count_table(found: Advices) -> Table:
    names = ("cards", "strategy", "verdict", "needed", "step", "speed_up", "efficiency", "hours", "sum")
    heads = tuple(Message(f"cluster_advice.column.{name}" if name == "cards" else f"column.{name}") for name in names)
    rows = tuple(_count_row(each) for each in found.counts)
    tones = tuple("strong" if found.cluster and each.text == found.cluster.text else "plain" for each in found.counts)
    return Table(heads, rows, frozenset({0, 3, 4, 5, 6, 7, 8}), tones, optional=(6, 8))


def _count_row(each: CardCount) -> tuple[Cell, ...]:
    effect, cards = each.effect, f"{each.cards:,}"
    if effect is None:
        return (cards, "–", Message("cluster_advice.indivisible"), *("–",) * 6)
    return (
        cards, way_name(each.way) if each.way else "–", verdict_word(effect.verdict),
        Quantity(effect.needed_bytes, "bytes"), Quantity(effect.step_s, "duration"),
        Quantity(each.speed_up.expected if each.speed_up else None, "factor"), Quantity(each.efficiency, "percent"),
        Quantity(effect.total_s, "duration"), Quantity(effect.money, "money"),
    )  # fmt: skip


def _table(plan: ClusterPlan, found: Advices, changes: tuple[Advice, ...], partial: tuple[Advice, ...] = ()) -> Table:
    names = ["number", "change", "verdict", "needed", "saves", "token_time", *(["sum"] if found.goal == "cost" else [])]
    heads = [Message(f"cluster_advice.column.{name}" if name == "token_time" else f"column.{name}") for name in names]
    heads.append(Message("column.learning"))
    numbered = [*((str(i), each) for i, each in enumerate(changes, 1)), *(("–", each) for each in partial)]
    tones = tuple("warn" if each.effect.verdict != "fits" else "plain" for _, each in numbered)
    rows = tuple(_row(plan, found, number, each) for number, each in numbered)
    return Table(tuple(heads), rows, frozenset(range(3, len(names))), tones, optional=(4,))


def _row(plan: ClusterPlan, found: Advices, number: str, change: Advice) -> tuple[Cell, ...]:
    effect = change.effect
    learned = Message(f"exactness.{EXACTNESS_ID[change.exactness]}")
    money = [Quantity(effect.money, "money")] if found.goal == "cost" else []
    return (
        number, short(plan, found, change), verdict_word(effect.verdict),
        Quantity(taken_bytes(effect.needed_bytes, effect.verdict, effect.available_bytes), "bytes"),
        Quantity(effect.saved_bytes, "bytes"), Quantity(effect.slower, "signed_percent"), *money, learned,
    )  # fmt: skip


def _useless(idle: tuple[Idle, ...]) -> list[Block]:
    together: dict[str, list[str]] = {}
    own = [each for each in idle if each.values and has(f"cluster_advice.own.{each.reason}")]
    said: list[Block] = [Paragraph(Message(f"cluster_advice.own.{each.reason}", each.values)) for each in own]
    for each in (each for each in idle if each not in own):
        together.setdefault(each.reason, []).append(_named(each.rule))
    ids = {reason: f"cluster_advice.idle.{reason}" for reason in together}
    return said + [
        Paragraph(Message(ids[reason] if has(ids[reason]) else f"idle.{reason}", {"rules": listed(rules)}))
        for reason, rules in together.items()
    ]


def one(plan: ClusterPlan, found: Advices, number: int, asked: Asked) -> Document:
    """Change `number` (from 1) in full, and the whole command of the run with it."""
    change = found.advised[number - 1]
    do = [Verbatim(shlex.join(command(plan, found, change, asked)))]
    return detail(found, number, short(plan, found, change), (), do)


def command(plan: ClusterPlan, found: Advices, change: Advice, asked: Asked) -> tuple[str, ...]:
    """Return the command that plans the run with a change."""
    changed = options_of(plan, change)
    told = tuple(as_word(name, value) for name, value in changed.items())
    cards = asked.cards if found.keeps_cards(change) else _cards(found, change, asked)
    gpu = ("--gpu", asked.gpu) if asked.gpu != "auto" and cards is asked.cards else ()
    others = ("--used-by-others", asked.others) if asked.others else ()
    words = "foretrain", "plan", *WORDS.without(asked.words, list(changed)), *told, *gpu, *cards, *others
    return (*words, *asked.options(rent=plan.config.price_per_hour))


def _cards(found: Advices, change: Advice, asked: Asked) -> tuple[str, ...]:
    """The options that name the cards of a change; a link or network that was named stays."""
    given = dict(zip(asked.cards[::2], asked.cards[1::2], strict=True))
    cards, now = _cards_of(change), found.cluster
    link = ("--link", cards.link) if "--link" in given or (now and cards.link != now.link.name) else ()
    network = ("--network", given["--network"]) if "--network" in given and cards.nodes > 1 else ()
    return ("--gpus", cards.text, *link, *network)

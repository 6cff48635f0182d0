"""Advice on any kind of run: the first screen, the ranked list with what each change saves and costs, one in full."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import command_of, words_of
from foretrain.advice.record import Advice, Advices, CardCount, Effect, Idle, Way, to_set, with_settings
from foretrain.advice.rules import BY_ID
from foretrain.base.messages import has, listed
from foretrain.base.units import rounds_to_zero
from foretrain.config.options import RunConfig
from foretrain.hardware.links import find_link
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import FAILING
from foretrain.predict.plan import Plan
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
from foretrain.reports.views.lead import assumed_rows, lead_of, link, name_of, sources_of, way
from foretrain.reports.views.shared import TONES, assumed, taken_bytes, uncalibrated, uneven, verdict_id, verdict_word

EXACTNESS_ID = {
    "exact": "exact", "rounding": "rounding", "other tokens": "tokens", "other optimizer": "optimizer",
    "other model": "model",
}  # fmt: skip
# Reasons of which each rule has its own sentence, with its own numbers; the others are listed for all rules together.
ONE_BY_ONE = (
    "not_the_peak", "not_enough", "trace_denies", "trace_tight", "traced_short", "no_peak",
    "bucket_view", "bucket_view_same", "bucket_size", "bucket_size_same",
)  # fmt: skip
LINES = 15
LEAST, MOST = 3, 5  # changes of the first screen; what is not enough alone fills up where few are
ROOM, WIDE = 8, 24  # lines for them, and about how many columns one has for its name
COMMAND = 68  # columns of a line of the command
MUCH_LONGER = 0.5  # of the time: from here on it is a factor
ASSUMED = 2  # lines of what had to be guessed, which always stand there


def screen(plan: AnyPlan, found: Advices, asked: Asked, count: int | None = None) -> Screen:
    """Where the run stands, the best changes, and the command that comes next. `count`: how many were asked for."""
    advised = found.advised[: count or MOST]
    partial = found.partial[: max(0, LEAST - len(advised))]
    following = [Row(Message("first.label.next"), command=command_of(plan, each, asked)) for each in advised[:1]]
    guessed = isinstance(plan, Plan) and bool(plan.assumptions)
    alone = _alone(found)
    if count is None:
        taken = ASSUMED * guessed + bool(plan_of(plan).used_by_others_bytes) + 2 * len(alone)
        taken += sum(len(" ".join(row.command)) // COMMAND for row in following)
        advised = _that_fit_the_screen(plan, advised, ROOM - taken)
    notes = [*_notes(plan, [*advised, *partial]), *([Message("finetune.better_how")] if _published(found) else [])]
    rows = [Row(Message("advice.label.counts"), listed(_counts(found)))] if found.counts else []
    rows += [] if asked.quiet else following
    rows += [Row(Message("first.label.note"), each, optional=1) for each in notes]
    rows += [] if asked.quiet else _more(len(found.advised) - len(advised), advised)
    rows += [replace(row, optional=0 if guessed else 1) for row in assumed_rows(plan)]
    lead = (*lead_of(plan, asked)[:1], *alone, *_nothing(found))
    table = _table(plan, found, advised, partial) if advised or partial else None
    return Screen(_title("advice.screen_title", plan, found), lead, table, tuple(rows), LINES + 2 * bool(found.counts))


def document(plan: AnyPlan, found: Advices, hidden: int = 0) -> Document:
    """All advice; `hidden`: how many were cut off."""
    blocks: list[Block] = [*_nothing(found)]
    blocks += [_table(plan, found, found.advised)] if found.advised else []
    blocks += _uneven(plan, found)
    if hidden:
        blocks.append(Paragraph(Message("advice.more", {"count": hidden, "all": len(found.advised) + hidden})))
    counts = (*_alone(found), _count_table(found)) if found.counts else ()
    sections = [
        Section(Message("advice.now"), _now(plan, found)),
        *([Section(Message("advice.section_counts"), counts)] if counts else []),
        Section(Message("advice.list"), tuple(blocks)),
    ]
    if found.partial:
        sections.append(Section(Message("advice.partial"), (_table(plan, found, (), found.partial),)))
    if found.useless:
        sections.append(Section(Message("advice.useless"), tuple(_useless(found.useless))))
    sections.append(Section(Message("advice.explained"), _explained(plan, found)))
    return Document(_title("advice.title", plan, found), Message("advice.subtitle", _subtitle(plan, found)), sections)


def section(plan: Plan, found: Advices) -> Section:
    title = Message(
        "advice.plan_section", {"step": Message(f"step.{found.step}"), "goal": Message(f"goal.{found.goal}")}
    )
    table = _table(plan, found, found.advised)
    return Section(title, (table, *_uneven(plan, found), Paragraph(Message("advice.plan_more"))))


def plan_of(plan: AnyPlan) -> Plan | FineTunePlan | InferencePlan:
    return plan.one_card if isinstance(plan, ClusterPlan) else plan


def _title(id: str, plan: AnyPlan, found: Advices) -> Message:
    return Message(id, {"name": name_of(plan), "sources": sources_of(plan), **_subtitle(plan, found)})


def _subtitle(plan: AnyPlan, found: Advices) -> dict[str, Any]:
    source = Message("plan.source_trace" if found.now_confirmation else "plan.source")
    return {"gpu": plan.place, "goal": Message(f"goal.{found.goal}"), "source": source}


def _that_fit_the_screen(plan: AnyPlan, advised: tuple[Advice, ...], room: int) -> tuple[Advice, ...]:
    lines = [1 + len(short(plan, advice)) // WIDE for advice in advised]
    while len(lines) > 1 and sum(lines) > room:
        lines.pop()
    return advised[: len(lines)]


def _more(hidden: int, advised: Sequence[Advice]) -> list[Row]:
    if not advised:
        return [Row(Message("first.label.more"), Message("first.more_full"), optional=3)]
    id = "advice.screen_more" if hidden else "advice.screen_all"
    return [Row(Message("first.label.more"), Message(id, {"count": hidden}), optional=3)]


def _now(plan: AnyPlan, found: Advices) -> tuple[Block, ...]:
    now, blocks = found.now, list[Block](lead_of(plan))
    if found.goal == "cost" and now.money is not None and isinstance(plan, Plan):
        blocks.append(Paragraph(Message("advice.cost_now", {"sum": now.money, "currency": plan.config.currency})))
    traced = found.now_confirmation
    if traced is not None:
        values_now = {"verdict": verdict_word(traced.verdict), "needed": traced.needed_bytes}
        blocks.append(Paragraph(Message("advice.traced_now", values_now), TONES[traced.verdict]))
    return (*blocks, *(assumed(plan) if isinstance(plan, Plan) else ()))


def _nothing(found: Advices) -> list[Paragraph]:
    if not found.advised:
        id = "advice.nothing" if found.nothing_fits else "advice.nothing_better"
        return [Paragraph(Message("finetune.better_nothing" if _published(found) else id), "warn")]
    together = found.goal == "fit" and all(len(each.rules) > 1 for each in found.advised)
    return [Paragraph(Message("advice.together"))] if together else []


def _published(found: Advices) -> bool:
    return found.goal == "quality" and found.step is None


def _uneven(plan: AnyPlan, found: Advices) -> tuple[Block, ...]:
    if not isinstance(plan, Plan):
        return ()
    alone = {"batch_size", "gradient_accumulation_steps"}
    changes = [(advice.options, advice.effect.needed_bytes) for advice in found.advised if advice.gpu == found.gpu]
    points = [
        (changed["batch_size"], needed)
        for changed, needed in changes
        if "batch_size" in changed and alone >= set(changed)
    ]
    return uneven([(plan.config.batch_size, found.now.needed_bytes), *points])


# -- a change in a few words -----------------------------------------------------------------------------------------


def short(plan: AnyPlan | None, change: Advice) -> str:
    """Return its rules with their values, how cards share a step, or what to type."""
    if plan is None or isinstance(plan, FineTunePlan | InferencePlan):
        return " ".join(words_of(change))
    text = " + ".join(_short(plan, change, rule).text() for rule in change.rules)
    ways = {"strategy", "resharding", "hold_gradients"} & set(change.rules)
    if not isinstance(plan, ClusterPlan) or change.shared is None or ways:
        return text
    if change.shared.way == Way.of(plan.best or plan.least):
        return text
    return Message("advice.with_way", {"change": text, "way": way_name(change.shared.way)}).text()


def _short(plan: Plan | ClusterPlan, advice: Advice, rule: str) -> Message:
    config, one = with_settings(plan.config, advice.settings), plan_of(plan)
    freed = one.used_by_others_bytes - advice.used_by_others_bytes
    values = {
        **config.model_dump(), "checkpointed": config.checkpointed, "gpu": advice.gpu, "rule": rule, "freed": freed,
        "tokens_per_step": advice.tokens_per_step, "used": one.used_by_others_bytes,
    }  # fmt: skip
    if advice.shared is not None:
        found = find_link(advice.shared.link)
        values |= {"way": way_name(advice.shared.way), "link": link(found) if found else advice.shared.link}
        values |= {"cluster": advice.shared.text}
    part = rule == "free_others" and advice.used_by_others_bytes  # not all that they use is needed
    id = f"rule.{rule}.short_part" if part else f"rule.{rule}.short"
    return Message(id if has(id) else "rule.untold.short", values)


def way_name(found: Way) -> Message:
    return way(found.strategy, held=found.holds_gradients)


def change_text(
    plan: AnyPlan | None, change: Advice, needed: tuple[int, ...] | None = None, *, brief: bool = False
) -> str:
    """A change with what planning it says: what it needs, whether it fits, and unless `brief` what time it takes."""
    effect = change.effect
    text = f"{short(plan, change)} *" if change.step is None and change.learns_otherwise else short(plan, change)
    values = {"change": text, "needed": needed or (effect.needed_bytes,) * 3, "available": effect.available_bytes or 0}
    id = verdict_id(effect.verdict, effect.needed_bytes, effect.available_bytes)
    parts, slower = [Message(f"first.changed.{id}", values).text()], effect.slower
    if slower is not None and not rounds_to_zero(slower) and not brief:
        unit = "token" if change.step is None else "step"
        more = "slower" if slower > MUCH_LONGER else "more_time" if slower > 0 else "less_time"
        parts.append(Message(f"first.{more}.{unit}", {"share": abs(slower), "factor": 1 + slower}).text())
    return listed(parts)


def _notes(plan: AnyPlan, changes: Sequence[Advice]) -> list[Message]:
    ids = {id for change in changes for id in change.rules}
    known = {"loss_alone": "finetune.loss_alone", "precomputed": "note.finetune_reference_precomputed"}
    assumed_now = [Message(text) for id, text in known.items() if id in ids]
    more = four_bits_more(plan, changes)
    return assumed_now if more is None else [*assumed_now, more]


def four_bits_more(plan: AnyPlan, changes: Sequence[Advice]) -> Message | None:
    """Why QLoRA needs more than LoRA, where the change to LoRA shows it."""
    lora = next((change for change in changes if change.rules == ("sixteen_bits",)), None)
    if lora is None or lora.effect.saved_bytes <= 0:
        return None
    return Message("finetune.four_bits_more", {"four_bits": plan.needed_bytes, "lora": lora.effect.needed_bytes})


MOST_CHANGES = 3  # on the first screen of a plan


def change_rows(plan: FineTunePlan | InferencePlan, changes: tuple[Advice, ...], asked: Asked) -> list[Row]:
    """What to change, for the first screen of a plan that does not fit."""
    if plan.verdict == "fits" or not changes:
        return []
    fitting = [change for change in changes if change.effect.verdict == "fits"]
    if not fitting:
        nearest = Message("finetune.none_fits", {"change": change_text(plan, changes[0])})
        return [Row(Message("first.label.change"), nearest)]
    labels = [Message("first.label.change"), *[Message("finetune.label.or")] * MOST_CHANGES]
    shown = tuple(zip(labels, fitting[:MOST_CHANGES], range(MOST_CHANGES), strict=False))
    rows = [
        Row(label, change_text(plan, each), optional=2 if number else 0, short=change_text(plan, each, brief=True))
        for label, each, number in shown
    ]
    rows += [] if asked.quiet else [Row(Message("first.label.next"), command=command_of(plan, fitting[0], asked))]
    notes = _notes(plan, changes)
    if any(each.learns_otherwise for _, each, _ in shown):
        tuned = isinstance(plan, FineTunePlan)
        notes.insert(0, Message("finetune.learns_otherwise" if tuned else "inference.answers_otherwise"))
    return [*rows, *(Row(Message("first.label.note"), each, optional=1) for each in notes)]


# -- the list --------------------------------------------------------------------------------------------------------


def _table(plan: AnyPlan, found: Advices, advised: Sequence[Advice], partial: Sequence[Advice] = ()) -> Table:
    numbered = [*((str(number), each) for number, each in enumerate(advised, 1)), *(("–", each) for each in partial)]
    traced = ["traced"] * any(each.confirmation for _, each in numbered)
    saves = ["saves"] * (found.goal == "fit" or not advised)
    times = ["token_time"] if found.is_for_a_token else ["step_change"]
    times += ["run_change"] * (not found.is_for_a_token and not saves)
    if found.goal == "quality" and not _published(found):
        times = ["estimate"]
    names = ["number", "change", "verdict", "needed", *traced, *saves, *times]
    names += ["sum"] * (found.goal == "cost" and found.now.money is not None)
    names.append("answers" if isinstance(plan, InferencePlan) else "learning")
    rows = tuple(tuple(_cells(plan, found, number, each)[name] for name in names) for number, each in numbered)
    text = {"number", "change", "learning", "answers", "verdict", "estimate"}
    numeric = frozenset(i for i, name in enumerate(names) if name not in text)
    tones = tuple("warn" if number == "–" or each.effect.verdict != "fits" else "plain" for number, each in numbered)
    optional = tuple(names.index(name) for name in ("saves", "step_change") if name in names and (times[1:] or saves))
    return Table(tuple(Message(f"column.{name}") for name in names), rows, numeric, tones, optional)


def _cells(plan: AnyPlan, found: Advices, number: str, advice: Advice) -> dict[str, Cell]:
    effect, estimate, traced = advice.effect, advice.estimate, advice.confirmation
    verdict = traced.verdict if traced and traced.verdict else effect.verdict
    barely = number == "–" and verdict == "fits"
    learned = Message(f"exactness.{EXACTNESS_ID[advice.exactness]}")
    cells: dict[str, Cell] = {
        "number": number, "change": short(plan, advice),
        "verdict": Message("word.barely") if barely else verdict_word(verdict),
        "needed": Quantity(taken_bytes(effect.needed_bytes, verdict, effect.available_bytes), "bytes"),
        "traced": Quantity(traced.needed_bytes if traced else None, "bytes"),
        "saves": Quantity(_saved(found, advice), "bytes"), "step_change": Quantity(effect.slower, "signed_percent"),
        "token_time": Quantity(effect.slower, "signed_percent"),
        "run_change": Quantity(effect.longer, "signed_percent"), "sum": Quantity(effect.money, "money"),
        "estimate": Message("advice.unestimated"), "learning": learned,
        "answers": Message("exactness.answers") if advice.learns_otherwise else learned,
    }  # fmt: skip
    if estimate is not None:
        cells["estimate"] = Message("advice.estimated", {"then": estimate.loss_then, "now": estimate.loss_now})
    return cells


def _saved(found: Advices, advice: Advice) -> int | None:
    saved = advice.effect.saved_bytes
    same = advice.gpu == found.gpu and advice.used_by_others_bytes == found.used_by_others_bytes
    return saved if same or saved > 0 else None


def _useless(idle: Sequence[Idle]) -> list[Block]:
    blocks: list[Block] = []
    together: dict[str, list[str]] = {}
    for each in idle:
        if each.reason in ONE_BY_ONE:
            values = {"shorter": 0.0, **{k: v for k, v in each.values.items() if v is not None}}
            own, same = (f"idle.{each.reason}{kind}.{each.rule}" for kind in ("", "_same"))
            id = same if has(same) and rounds_to_zero(values["shorter"]) else own if has(own) else f"idle.{each.reason}"
            blocks.append(Paragraph(Message(id, {**values, "rules": _named(each.rule)})))
        else:
            together.setdefault(each.reason, []).append(_named(each.rule))
    for reason, rules in together.items():
        blocks.append(Paragraph(Message(f"idle.{reason}", {"rules": listed(rules)})))
    return blocks


def _named(rule: str) -> str:
    return Message(f"rule_name.{rule}").text() if has(f"rule_name.{rule}") else rule


def _explained(plan: AnyPlan, found: Advices) -> tuple[Block, ...]:
    how = found.goal if found.goal in ("fit", "quality") else "speed"
    how = "tokens" if found.is_for_a_token else how
    blocks: list[Block] = [Paragraph(Message(f"advice.how.{how}", {"tokens": found.tokens_per_step}))]
    if found.cluster is not None:
        blocks.append(Paragraph(Message("advice.how.cards")))
    blocks += _sources(found, found.advised)
    untraced = [each.confirmation.reason for each in found.advised if each.confirmation and each.confirmation.reason]
    if untraced:
        blocks.append(Paragraph(Message("advice.untraced", {"reason": untraced[0]}), "warn"))
    if found.now_confirmation is not None:
        blocks.append(Paragraph(Message("advice.how.traced")))
    if found.advised:
        blocks.append(Paragraph(Message("advice.apply")))
    one = plan_of(plan)
    if isinstance(one, Plan):
        calibrated = one.timing is not None and one.timing.source == "calibrated"
        blocks.append(Paragraph(Message("source.calibrated") if calibrated else uncalibrated(one)))
    return tuple(blocks)


def _sources(found: Advices, changes: Sequence[Advice]) -> list[Paragraph]:
    return [Paragraph(Message(f"finetune.better.{each.rules[0]}")) for each in changes if _published(found)]


# -- numbers of cards ------------------------------------------------------------------------------------------------


def _alone(found: Advices) -> list[Paragraph]:
    alone = found.counts[0].effect if found.counts else None
    if alone is None or alone.verdict is None:
        return []
    values = {"gpu": found.gpu, "needed": alone.needed_bytes, "available": alone.available_bytes or 0}
    values |= {"total": alone.total_s or 0.0, "now": found.now.total_s or 0.0}
    timed = "alone" if alone.total_s and found.now.total_s else "alone_untimed"
    return [Paragraph(Message(f"advice.{timed}.{alone.verdict}", values))]


def _counts(found: Advices) -> list[str]:
    return [_count(each) for each in found.counts if each.cards > 1]


def _count(each: CardCount) -> str:
    values: dict[str, Any] = {"cards": each.cards}
    if each.effect is None:
        return Message("advice.count.indivisible", values).text()
    if each.effect.total_s is None or each.speed_up is None or each.effect.verdict in FAILING:
        verdict = verdict_word(each.effect.verdict)
        return Message("advice.count.untimed", {**values, "verdict": verdict}).text()
    values |= {"total": each.effect.total_s, "expected": each.speed_up.expected}
    return Message("advice.count.fits" if each.effect.verdict == "fits" else "advice.count.tight", values).text()


def _count_table(found: Advices) -> Table:
    names = ("cards", "strategy", "verdict", "needed", "step", "speed_up", "efficiency", "hours", "sum")
    rows = tuple(_count_row(each) for each in found.counts)
    tones = tuple("strong" if found.cluster and each.text == found.cluster.text else "plain" for each in found.counts)
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, rows, frozenset({0, 3, 4, 5, 6, 7, 8}), tones, optional=(6, 8))


def _count_row(each: CardCount) -> tuple[Cell, ...]:
    effect, cards = each.effect, f"{each.cards:,}"
    if effect is None:
        return (cards, "–", Message("advice.indivisible"), *("–",) * 6)
    return (
        cards, way_name(each.way) if each.way else "–", verdict_word(effect.verdict),
        Quantity(effect.needed_bytes, "bytes"), Quantity(effect.step_s, "duration"),
        Quantity(each.speed_up.expected if each.speed_up else None, "factor"), Quantity(each.efficiency, "percent"),
        Quantity(effect.total_s, "duration"), Quantity(effect.money, "money"),
    )  # fmt: skip


# -- one change in full ---------------------------------------------------------------------------------------------


def one(plan: AnyPlan, found: Advices, number: int, asked: Asked) -> Document:
    """Advice `number` (from 1): what, why, what it costs, its effect by phase, and what changes in the config."""
    advice = found.advised[number - 1]
    do: list[Block] = [Verbatim(shlex.join(command_of(plan, advice, asked)))]
    if isinstance(plan, Plan):
        do = [Paragraph(message) for message in commands(plan.config, found, advice)]
    title = Message("advice.detail", {"number": number, "short": short(plan, advice)})
    subtitle = {**_subtitle(plan, found), "gpu": advice.shared.text if advice.shared else advice.gpu}
    sections = [
        *_rules(plan, advice),
        *([Section(Message("finetune.better_title"), tuple(_sources(found, [advice])))] if _published(found) else []),
        Section(Message("plan.verdict"), (Table((), _effects(found, advice)),)),
        *([Section(Message("advice.by_phase"), (_phases(advice),))] if len(advice.effect.phases) > 1 else ()),
        Section(Message("advice.diff"), (_diff(advice),)),
        Section(Message("advice.do"), tuple(do)),
    ]
    return Document(title, Message("advice.subtitle", subtitle), sections)


def _rules(plan: AnyPlan, advice: Advice) -> list[Section]:
    if not isinstance(plan, Plan | ClusterPlan):
        return []
    described = [rule for rule in advice.rules if has(f"rule.{rule}.what") or not has(f"rule.{rule}.short")]
    return [Section(_short(plan, advice, rule), (_rule(rule),)) for rule in described]


def _rule(rule: str) -> Table:
    text_id = rule if has(f"rule.{rule}.what") else "untold"
    values = {"rule": rule, "saves": BY_ID[rule].saves, "costs": BY_ID[rule].costs}
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Message(f"advice.{part}"), Message(f"rule.{text_id}.{part}", values)) for part in ("what", "why", "costs")
    )
    return Table((), (*rows, (Message("advice.reference"), BY_ID[rule].reference)))


def _effects(found: Advices, advice: Advice) -> tuple[tuple[Cell, ...], ...]:
    effect = advice.effect
    memory = {
        "needed": effect.needed_bytes, "before": found.now.needed_bytes, "available": effect.available_bytes or 0,
        "verdict": verdict_word(effect.verdict), "source": effect.source,
    }  # fmt: skip
    kept = Message("advice.tokens_kept", {"tokens": advice.tokens_per_step})
    changed = Message("advice.tokens_changed", {"tokens": advice.tokens_per_step, "before": found.tokens_per_step})
    rows: list[tuple[Cell, ...]] = [
        (Message("advice.exactness"), Message(f"exactness.long.{EXACTNESS_ID[advice.exactness]}")),
        (Message("advice.tokens"), kept if advice.keeps_tokens_per_step else changed),
        (Message("advice.needs"), Message("advice.needs_values", memory)),
        (Message("column.hours"), _time(effect, for_a_token=found.is_for_a_token)),
    ]
    traced, estimate = advice.confirmation, advice.estimate
    if traced is not None and traced.needed_bytes is not None:
        verdict = verdict_word(traced.verdict)
        values = {"needed": traced.needed_bytes, "verdict": verdict}
        rows.append((Message("column.traced"), Message("advice.traced_values", values)))
    if estimate is not None:
        values = {
            "now": estimate.loss_now, "then": estimate.loss_then, "tokens": estimate.tokens_then,
            "before": estimate.tokens_now, "law": estimate.law,
        }  # fmt: skip
        rows.append((Message("column.est_loss"), Message("advice.loss_values", values)))
    return tuple(rows)


def _time(effect: Effect, *, for_a_token: bool) -> Message:
    if effect.slower is None or effect.longer is None:
        return Message("advice.time_unknown")
    if for_a_token:
        return Message("advice.time_token", {"slower": effect.slower})
    step, run = rounds_to_zero(effect.slower), rounds_to_zero(effect.longer)
    id = "time_same" if step and run else "time_same_step" if step else "time_same_run" if run else "time_values"
    return Message(f"advice.{id}", {"slower": effect.slower, "longer": effect.longer})


def _phases(advice: Advice) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            Message(f"phase.{p.phase}"), Quantity(p.needed_bytes + p.saved_bytes, "bytes"),
            Quantity(p.needed_bytes, "bytes"), Quantity(p.saved_bytes, "bytes"),
        )
        for p in advice.effect.phases
    )  # fmt: skip
    heads = tuple(Message(f"column.{name}") for name in ("phase", "now", "then", "saves"))
    return Table(heads, rows, frozenset({1, 2, 3}))


def _diff(advice: Advice) -> Block:
    if not advice.settings:
        return Paragraph(Message("advice.no_diff"))
    rows: tuple[tuple[Cell, ...], ...] = tuple((s.option, _shown(s.before), _shown(s.after)) for s in advice.settings)
    return Table(tuple(Message(f"column.{name}") for name in ("key", "now", "then")), rows, frozenset({1, 2}))


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def commands(config: RunConfig, found: Advices, advice: Advice) -> list[Message]:
    environment = [s for s in advice.settings if s.option == "allocator_settings"] if advice.step == "nanogpt" else []
    own = [s for s in to_set(advice.settings) if s not in environment]
    options = " ".join(f"--{s.option}={s.after}" for s in own)
    messages: list[Message] = []
    if advice.used_by_others_bytes < found.used_by_others_bytes:
        messages.append(Message("advice.beside", {"others": advice.used_by_others_bytes}))
    if advice.gpu != found.gpu:
        messages.append(Message("advice.on_card", {"gpu": advice.gpu}))
    messages += [Message("advice.environment", {"setting": s.after}) for s in environment]
    if own or advice.step != found.step:
        foreign = advice.step == "nanogpt" and not any(s.ours for s in own)
        id = "advice.run_nanogpt" if foreign else "advice.run_foretrain"
        messages.append(Message(id, {"options": options}))
    return messages

"""Advice as Documents: the ranked list with what each change saves and costs, one change in full, plan's short list."""

from collections.abc import Sequence
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice, Advices, Effect, Idle, to_set, with_settings
from foretrain.advice.rules import BY_ID
from foretrain.base.messages import has, listed
from foretrain.base.units import rounds_to_zero
from foretrain.config.options import RunConfig
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.shared import TONES, assumed, uncalibrated, uneven, verdict_word

EXACTNESS_ID = {
    "exact": "exact", "rounding": "rounding", "other tokens": "tokens", "other optimizer": "optimizer",
    "other model": "model",
}  # fmt: skip
NOW = {
    "fits": "advice.fits_already",
    "tight": "advice.tight_now",
    "may_not_fit": "advice.may_not_now",
    "does_not_run": "advice.not_running",
    "does_not_fit": "advice.not_now",
    None: "advice.unknown_now",
}
HOW = {"fit": "advice.how_fit", "quality": "advice.how_quality"}
# Reasons of which each rule has its own sentence, with its own numbers; the others are told of all rules together.
ONE_BY_ONE = ("not_the_peak", "not_enough", "trace_denies", "trace_tight", "traced_short", "no_peak")


def document(plan: Plan, found: Advices, hidden: int = 0) -> Document:
    """All advice; `hidden`: how many were cut off."""
    sections = [Section(Message("advice.now"), (*_now(plan, found), *assumed(plan)))]
    if found.advised:
        blocks: list[Block] = [
            _table(plan, found, found.advised), *_uneven(plan, found),
        ]  # fmt: skip
        if hidden:
            total = {"count": hidden, "all": len(found.advised) + hidden}
            blocks.append(Paragraph(Message("advice.more", total)))
    else:
        id = "advice.nothing" if found.nothing_fits else "advice.nothing_better"
        blocks = [Paragraph(Message(id), "warn")]
    sections.append(Section(Message("advice.list"), tuple(blocks)))
    if found.partial:
        sections.append(Section(Message("advice.partial"), (_table(plan, found, found.partial, partial=True),)))
    if found.useless:
        sections.append(Section(Message("advice.useless"), tuple(_useless(plan, found.useless))))
    sections.append(Section(Message("advice.explained"), _explained(plan, found)))
    source = Message("plan.source_trace" if found.now_confirmation else "plan.source")
    subtitle = {"gpu": plan.gpu.name, "goal": Message(f"goal.{found.goal}"), "source": source}
    return Document(Message("advice.title", {"name": found.name}), Message("advice.subtitle", subtitle), sections)


def section(plan: Plan, found: Advices) -> Section:
    title = Message(
        "advice.plan_section", {"step": Message(f"step.{found.step}"), "goal": Message(f"goal.{found.goal}")}
    )
    table = _table(plan, found, found.advised)
    return Section(title, (table, *_uneven(plan, found), Paragraph(Message("advice.plan_more"))))


def _now(plan: Plan, found: Advices) -> tuple[Block, ...]:
    now, mode = found.now, "compiled" if plan.compiled else "eager"
    values = {
        "step": Message(f"step.{found.step}"), "mode": Message(f"mode.{mode}"),
        "needed": now.needed_bytes, "available": now.available_bytes or 0,
    }  # fmt: skip
    blocks: list[Block] = [Paragraph(Message(NOW[now.verdict], values), TONES[now.verdict])]
    if found.goal == "cost" and now.money is not None:
        blocks.append(Paragraph(Message("advice.cost_now", {"sum": now.money, "currency": plan.config.currency})))
    traced = found.now_confirmation
    if traced is not None:
        verdict = verdict_word(traced.verdict)
        told = Message("advice.traced_now", {"verdict": verdict, "needed": traced.needed_bytes})
        blocks.append(Paragraph(told, TONES[traced.verdict]))
    return tuple(blocks)


def _uneven(plan: Plan, found: Advices) -> tuple[Block, ...]:
    alone = {"batch_size", "gradient_accumulation_steps"}
    changes = [
        ({setting.option: setting.after for setting in advice.settings}, advice.effect.needed_bytes)
        for advice in found.advised if advice.gpu == found.gpu
    ]  # fmt: skip
    points = [
        (changed["batch_size"], needed)
        for changed, needed in changes
        if "batch_size" in changed and alone >= set(changed)
    ]
    return uneven([(plan.config.batch_size, found.now.needed_bytes), *points])


def short(plan: Plan, advice: Advice) -> str:
    """A change in a few words: its rules with their values, joined."""
    return " + ".join(_short(plan, advice, rule).text() for rule in advice.rules)


def _short(plan: Plan, advice: Advice, rule: str) -> Message:
    if not has(f"rule.{rule}.short"):
        return Message("rule.untold.short", {"rule": rule})
    part = rule == "free_others" and advice.used_by_others_bytes  # not all that they use is needed
    return Message(f"rule.{rule}.short_part" if part else f"rule.{rule}.short", _values(plan, advice))


def _named(rule: str) -> str:
    return Message(f"rule_name.{rule}").text() if has(f"rule_name.{rule}") else rule


def _values(plan: Plan, advice: Advice) -> dict[str, Any]:
    config = with_settings(plan.config, advice.settings)
    return {
        **config.model_dump(), "checkpointed": config.checkpointed, "gpu": advice.gpu,
        "tokens_per_step": config.tokens_per_step, "used": plan.used_by_others_bytes,
        "freed": plan.used_by_others_bytes - advice.used_by_others_bytes,
    }  # fmt: skip


def _table(plan: Plan, found: Advices, listed: tuple[Advice, ...], *, partial: bool = False) -> Table:
    by_memory = found.goal == "fit" or partial
    traced = any(advice.confirmation for advice in listed)
    names = ["change"] if partial else ["number", "change"]
    names += ["needed", *(["traced"] if traced else []), "saves"] if by_memory else ["needed"]
    names += ["estimate"] if found.goal == "quality" else ["step_change"]
    names += [] if by_memory or found.goal == "quality" else ["run_change"]
    names += ["sum"] if found.goal == "cost" and not partial else []
    names += ["verdict" if partial else "learning"]
    rows: list[tuple[Cell, ...]] = []
    for number, advice in enumerate(listed, 1):
        cells = _cells(plan, found, advice, number)
        rows.append(tuple(cells[name] for name in names))
    text = {"number", "change", "learning", "verdict", "estimate"}
    numeric = frozenset(i for i, name in enumerate(names) if name not in text)
    tones = tuple("warn" if advice.effect.verdict == "tight" else "plain" for advice in listed)
    return Table(tuple(Message(f"column.{name}") for name in names), tuple(rows), numeric, tones)


def _cells(plan: Plan, found: Advices, advice: Advice, number: int) -> dict[str, Cell]:
    effect, estimate = advice.effect, advice.estimate
    cells: dict[str, Cell] = {
        "number": str(number), "change": short(plan, advice), "needed": Quantity(effect.needed_bytes, "bytes"),
        "saves": Quantity(_saved(found, advice), "bytes"), "step_change": Quantity(effect.slower, "signed_percent"),
        "run_change": Quantity(effect.longer, "signed_percent"),
        "learning": Message(f"exactness.{EXACTNESS_ID[advice.exactness]}"),
        "verdict": Message("word.barely" if effect.verdict == "fits" else f"word.{effect.verdict}"),
        "traced": Quantity(advice.confirmation.needed_bytes if advice.confirmation else None, "bytes"),
        "estimate": Message("advice.unestimated"), "sum": Quantity(effect.money, "money"),
    }  # fmt: skip
    if estimate is not None:
        cells["estimate"] = Message("advice.estimated", {"then": estimate.loss_then, "now": estimate.loss_now})
    return cells


def _saved(found: Advices, advice: Advice) -> int | None:
    saved = found.now.needed_bytes - advice.effect.needed_bytes
    same = advice.gpu == found.gpu and advice.used_by_others_bytes == found.used_by_others_bytes
    return saved if same or saved > 0 else None


def _useless(plan: Plan, idle: tuple[Idle, ...]) -> list[Block]:
    blocks: list[Block] = []
    together: dict[str, list[str]] = {}
    for each in idle:
        if each.reason in ONE_BY_ONE:
            values = {"shorter": 0.0, **_known(each), "rules": _named(each.rule)}
            own = f"idle.{each.reason}.{each.rule}"
            same = f"idle.{each.reason}_same.{each.rule}"
            id = same if has(same) and rounds_to_zero(values["shorter"]) else own if has(own) else f"idle.{each.reason}"
            blocks.append(Paragraph(Message(id, values)))
        else:
            together.setdefault(each.reason, []).append(_named(each.rule))
    for reason, rules in together.items():
        blocks.append(Paragraph(Message(f"idle.{reason}", {"rules": listed(rules)})))
    return blocks


def _known(idle: Idle) -> dict[str, Any]:
    return {name: value for name, value in idle.values.items() if value is not None}


def _explained(plan: Plan, found: Advices) -> tuple[Block, ...]:
    how = Message(HOW.get(found.goal, "advice.how_speed"), {"tokens": found.tokens_per_step})
    blocks: list[Block] = [Paragraph(how)]
    if found.now_confirmation is not None:
        blocks.append(Paragraph(Message("advice.how_traced")))
    if found.advised:
        blocks.append(Paragraph(Message("advice.apply")))
    calibrated = plan.timing is not None and plan.timing.source == "calibrated"
    blocks.append(Paragraph(Message("source.calibrated") if calibrated else uncalibrated(plan)))
    return tuple(blocks)


# -- one change in full ---------------------------------------------------------------------------------------------


def one(plan: Plan, found: Advices, number: int, asked: Asked) -> Document:
    """Advice `number` (from 1): what, why, what it costs, its effect by phase, and what changes in the config."""
    advice = found.advised[number - 1]
    rules = [Section(_short(plan, advice, rule), (_rule(rule),)) for rule in advice.rules]
    do = [Paragraph(message) for message in commands(plan.config, found, advice)]
    return detail(found, number, short(plan, advice), rules, do)


def detail(
    found: Advices, number: int, change: str, rules: Sequence[Section], do: Sequence[Block], phase: str = "phase"
) -> Document:
    """One change of any kind of run. `change`, `rules`: what it is, in short and at length; `do`: how to make it."""
    advice = found.advised[number - 1]
    title = Message("advice.detail", {"number": number, "short": change})
    gpu = advice.shared.text if advice.shared else advice.gpu
    subtitle = {"gpu": gpu, "goal": Message(f"goal.{found.goal}"), "source": Message("plan.source")}
    sections = [
        *rules,
        Section(Message("plan.verdict"), (Table((), _effects(found, advice)),)),
        *([Section(Message("advice.by_phase"), (_phases(advice, phase),))] if len(advice.effect.phases) > 1 else ()),
        Section(Message("advice.diff"), (_diff(advice),)),
        Section(Message("advice.do"), tuple(do)),
    ]
    return Document(title, Message("advice.subtitle", subtitle), sections)


def _rule(rule: str) -> Table:
    told = rule if has(f"rule.{rule}.what") else "untold"
    values = {"rule": rule, "saves": BY_ID[rule].saves, "costs": BY_ID[rule].costs}
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Message(f"advice.{part}"), Message(f"rule.{told}.{part}", values)) for part in ("what", "why", "costs")
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


def _phases(advice: Advice, names: str) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            Message(f"{names}.{p.phase}"), Quantity(p.needed_bytes + p.saved_bytes, "bytes"),
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

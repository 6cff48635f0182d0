"""The first screen of `plan`: does it fit, how long, what does it cost, what limits it, what to do. Twelve lines.

The whole plan is plan_view's; nothing is worked out here.
"""

import math
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.best import Best
from foretrain.advice.cards import Choice
from foretrain.advice.first_answer import Changed, FirstAnswer, within_command
from foretrain.advice.record import Advice
from foretrain.base.messages import has, listed
from foretrain.base.units import rounds_to_zero
from foretrain.predict.memory import REFUSED, PhaseMemory
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.predict.within import Within
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Row, Screen, Table
from foretrain.reports.views.advice import short
from foretrain.reports.views.shared import (
    TONES,
    best_cards,
    cost_of,
    grouped,
    needs_of_free,
    room,
    verdict_id,
    verdict_word,
    warmup,
    why_not,
    within_answer,
)

DIES = {"may_not_fit": "may_not_fit_exact", "does_not_fit": "does_not_fit_exact"}
MOST_CARDS = 5  # of a comparison; --full has all
LARGEST = 2  # groups of memory that are named


def screen(plan: Plan, answer: FirstAnswer, asked: Asked) -> Screen:
    rows = [*_batch(plan), *_takes_of(plan, answer), *_limits(plan, answer, plan.step)]
    rows += _next(plan, answer, asked)
    rows += [*assumed_rows(plan, plan.step), *_more(plan, asked)]
    shown = _changed_timing(plan, answer)
    title = _title(plan, plan.step, asked) if shown is None else _titled(plan, _sources(plan, plan.step, shown))
    return Screen(title, tuple(lead_of(plan, asked)), None, tuple(rows))


def within(plan: Plan, found: Within, asked: Asked) -> Screen:
    """`--within`, `--tokens`: the steps that fit first."""
    then = found.plan
    assert isinstance(then, Plan)
    lead = [Paragraph(within_answer(found), "good"), *lead_of(plan, asked, others=False)]
    changes = (
        Message("first.change", {"key": key, "now": getattr(plan.config, key), "then": getattr(then.config, key)})
        for key in found.changed
    )
    rows = _takes(plan, then.timing, steps=found.steps)
    if plan.verdict in REFUSED:
        rows = [Row(row.label, Message("first.if_fitted", {"text": row.text})) for row in rows]
    if found.changed:
        rows.append(Row(Message("first.label.change"), listed(change.text() for change in changes)))
    if then.config.decay_lr and plan.config.warmup_iters:
        rows.append(Row(Message("first.label.note"), warmup(plan.config, then.config)))
    command = within_command(plan, then, found.changed, asked)
    rows += [
        Row(Message("first.label.next"), command=command) if command else _written(asked),
        *assumed_rows(plan, plan.step),
        *_all(asked),
    ]
    return Screen(_title(plan, plan.step, asked), tuple(lead), None, tuple(rows))


def best(plan: Plan, found: Best, asked: Asked) -> Screen:
    """`--best`: the model first."""
    winner = found.candidates[0]
    c = winner.config
    values = {
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "params": winner.n_params,
        "tokens": winner.tokens, "loss": winner.loss, "low": winner.loss_low, "high": winner.loss_high,
        "needed": winner.needed_bytes, "room": room(plan), "gpu": plan.place, "text": found.limit.text,
        "batch_size": c.batch_size, "accumulation": c.gradient_accumulation_steps,
    }  # fmt: skip
    believable = winner.loss < math.log(c.vocab_size)
    lead = (
        Paragraph(Message("first.best", values), "good"),
        Paragraph(
            Message("first.best_loss" if believable else "first.best_no_loss", values),
            "plain" if believable else "warn",
        ),
        Paragraph(Message("first.best_needs", values)),
    )
    rows = _takes(plan.model_copy(update={"config": c}), winner.timing, steps=winner.steps)
    rows += [Row(Message("first.label.limits"), listed(Message(f"first.bind.{bind}").text() for bind in found.binds))]
    split = [Message("first.split", values).text()]
    shared = [Message(f"cluster.strategy.{c.strategy}").text()] if plan.world > 1 else []
    rows += [Row(Message("first.label.batch"), listed([*split, *shared]), optional=2), _written(asked, plan.world)]
    rows += assumed_rows(plan, plan.step, *(["no_repeats"] if found.dataset_tokens is None else []))
    rows += _all(asked)
    return Screen(Message("best.title", values), lead, None, tuple(rows))


def cards(plans: list[Plan], choice: Choice, asked: Asked) -> Screen:
    names = ("gpu", "verdict", "needs_of_free", "hours", "money_of")
    heads = tuple(Message(f"column.{name}", {"currency": plans[0].config.currency}) for name in names)
    shown = plans[:MOST_CARDS]
    cells = tuple(_card(plan, plan.step) for plan in shown)
    tones = tuple(TONES[plan.verdict_of(plan.step)] for plan in shown)
    table = Table(heads, cells, frozenset({2, 3, 4}), tuple("plain" if tone == "good" else tone for tone in tones))
    rows = [Row(Message("first.label.best"), best_cards(choice))]
    chosen = choice.cheapest or choice.fastest
    plan = next((plan for plan in plans if plan.gpu.name == chosen), plans[0])
    if choice.mixed_prices:
        rows.append(Row(Message("first.label.note"), Message("first.mixed"), optional=1))
    others = ("--used-by-others", asked.others) if asked.others else ()
    command = ("foretrain", "plan", *asked.words, "--gpu", plan.gpu.name, *others)
    if chosen is None:
        command = ("foretrain", "advise", *asked.words, "--gpu", plan.gpu.name, *others)
    rows += [] if asked.quiet else [Row(Message("first.label.next"), command=command)]
    rows += assumed_rows(plan, plan.step)
    hidden = len(plans) - len(shown)
    if hidden:
        rows.append(Row(Message("first.label.more"), Message("first.more_cards", {"count": hidden})))
    elif not asked.quiet:
        rows.append(Row(Message("first.label.more"), Message("first.more_of_cards"), optional=3))
    title = Message(
        "first.cards_title", {"name": plans[0].name, "count": len(plans), "sources": sources_of(plan, "foretrain")}
    )
    return Screen(title, (), table, tuple(rows))


# -- parts ---------------------------------------------------------------------------------------------------------


def _title(plan: Plan, step: StepName, asked: Asked) -> Message:
    if asked.speed:
        typed = {"memory": plan.memory_of(step).source, "option": asked.speed}
        return _titled(plan, Message("first.sources_typed", typed))
    return _titled(plan, sources_of(plan, step))


def _titled(plan: Plan, sources: Message) -> Message:
    values = {"name": plan.name, "gpu": plan.gpu.name, "params": plan.counts.n_params}
    return Message("first.title", {**values, "sources": sources})


def sources_of(plan: Plan, step: StepName) -> Message:
    return _sources(plan, step, plan.timing_of(step))


def _sources(plan: Plan, step: StepName, timing: Timing | None) -> Message:
    memory = plan.memory_of(step).source
    if timing is None or timing.source == memory:
        return Message("first.source", {"source": memory})
    return Message("first.sources", {"memory": memory, "time": timing.source})


def _where(phase: PhaseMemory) -> Message:
    part = phase.moment.partition(".")[0]
    return Message(f"first.where.{'evaluation' if phase.phase.startswith('evaluate') else part}")


def lead_of(plan: Plan, asked: Asked, *, others: bool = True) -> list[Paragraph]:
    verdict, memory = plan.verdict_of(plan.step), plan.memory_of(plan.step)
    phase, id = memory.neediest, verdict_id(verdict, memory.needed_bytes, plan.available_bytes)
    values: dict[str, Any] = {
        "peak": phase.needed_span, "room": room(plan), "short": room(plan, "short"), "where": _where(phase),
        "gpu": plan.gpu.name, "why": why_not(memory, plan.gpu),
    }  # fmt: skip
    exact = plan.exact_of(plan.step)
    if exact is not None and verdict == "fits":
        id, values["least"] = "fits_exact", exact.smallest_limit_bytes + exact.memory.context.expected_bytes
    elif exact is not None and exact.death is not None:
        id = DIES.get(verdict or "", id)
        values |= {
            "phase": Message(f"phase.{exact.death.phase}"), "requested": exact.death.requested_bytes,
            "reserved": exact.death.reserved_bytes, "allowed": exact.death.limit_bytes,
        }  # fmt: skip
    sentences = Message(f"first.verdict.{id}", values).text()
    first = next((_where(p) for p in memory.phases if p.verdict == "does_not_fit"), None)
    if id == "does_not_fit" and first is not None and first != values["where"]:
        fails = Message("first.fails_first", {"where": first})
        sentences = Message("first.two", {"one": sentences, "other": fails}).text()
    if others and plan.used_by_others_bytes:
        used = Message("first.others", {"others": plan.used_by_others_bytes})
        sentences = Message("first.two", {"one": sentences, "other": used}).text()
    lead = [Paragraph(Message("first.said", {"text": sentences}), TONES[verdict])]
    return [*lead, *_untraced(plan), *_other_step(plan, asked)]


def _untraced(plan: Plan) -> list[Paragraph]:
    why = next((note for note in plan.notes if note.id == "trace_unavailable"), None)
    return [] if why is None else [Paragraph(Message("note.trace_unavailable", why.values), "warn")]


def _other_step(plan: Plan, asked: Asked) -> list[Paragraph]:
    """The verdict of the other way to run the step: where it differs, or where a nanoGPT file is asked about that can
    run either way."""
    step: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    verdict = plan.verdict_of(step)
    alike = verdict == plan.verdict_of(plan.step)
    if verdict is None or len(plan.memories) == 1 or (alike and (not asked.nanogpt_file or verdict in REFUSED)):
        return []
    said = "needs" if verdict == plan.verdict_of(plan.step) == "fits" else verdict
    memory = plan.memory_of(step)
    values = {"needed": memory.needed_bytes, "why": why_not(memory, plan.gpu)}
    return [Paragraph(Message(f"first.other_{step}.{said}", values), "plain" if verdict == "fits" else "warn")]


def _batch(plan: Plan) -> list[Row]:
    note = next((note for note in plan.notes if note.id.startswith("auto_")), None)
    return [] if note is None else [Row(Message("first.label.batch"), Message(f"first.{note.id}", note.values))]


def _takes_of(plan: Plan, answer: FirstAnswer) -> list[Row]:
    timing = plan.timing_of(plan.step)
    if plan.verdict not in REFUSED or timing is None:
        return _takes(plan, timing)
    mark = "if_eager" if plan.verdict == "does_not_run" else "if_fitted"
    own, marks, instead = plan, (mark, mark), _changed_timing(plan, answer)
    if answer.changed is not None and instead is not None:
        own, timing = plan.model_copy(update={"config": answer.changed.config}), instead
        marks = ("with_change", "with_it")
    total = timing.length_s
    values = {
        "total": (total.low_s, total.expected_s, total.high_s), "steps": plan.work.steps,
        "step": timing.step_s.expected_s,
    }  # fmt: skip
    said = Message("first.time_short", values), cost_of(own.config, timing, own.gpu)
    rows = zip(("time", "cost"), marks, said, strict=True)
    return [
        Row(Message(f"first.label.{label}"), Message(f"first.{mark}", {"text": text})) for label, mark, text in rows
    ]


def _changed_timing(plan: Plan, answer: FirstAnswer) -> Timing | None:
    if plan.verdict not in REFUSED or plan.timing_of(plan.step) is None or answer.next != "change":
        return None
    return answer.changed.timing if answer.changed else None


def _takes(plan: Plan, timing: Timing | None, steps: int | None = None) -> list[Row]:
    if timing is None:
        unknown = Row(Message("first.label.cost"), Message("first.cost_unknown"))
        id = "first.no_time_of_recipe" if plan.of_untimed_recipe else "first.no_time"
        why = Message(id, {"gpu": plan.gpu.name, "recipe": plan.config.recipe})
        return [Row(Message("first.label.time"), why), unknown]
    c, total = plan.config, timing.length_s
    values = {
        "total": (total.low_s, total.expected_s, total.high_s), "steps": steps or plan.work.steps,
        "step": timing.step_s.expected_s, "tokens": (steps or plan.work.steps) * c.tokens_per_step,
        "batches": plan.evaluation_batches,
    }  # fmt: skip
    id = "first.time_evaluation" if c.eval_only else "first.time"
    return [
        Row(Message("first.label.time"), Message(id, values)),
        Row(Message("first.label.cost"), cost_of(plan.config, timing, plan.gpu)),
    ]


def _limits(plan: Plan, answer: FirstAnswer, step: StepName) -> list[Row]:
    timing, found = plan.timing_of(step), answer.bottleneck
    label = Message("first.label.limits")
    if plan.verdict_of(step) in (None, "fits") and timing is not None and found is not None:
        id = "evaluation" if plan.config.eval_only else found.limit
        return [Row(label, Message(f"first.limit.{id}", {"share": found.share, "mfu": timing.mfu or 0.0}))]
    parts = sorted(grouped(plan.memory_of(step).neediest.components), key=lambda part: -part[1])[:LARGEST]
    named = listed(f"{Message(f'group.{group}').text()} {Quantity(size, 'bytes').text()}" for group, size in parts)
    return [Row(label, Message("first.limit.memory", {"parts": named}), optional=1)]


def _next(plan: Plan, answer: FirstAnswer, asked: Asked) -> list[Row]:
    if asked.quiet:
        return []
    label, advice = Message("first.label.next"), answer.advice
    if answer.next != "train":
        if advice is None:
            return [Row(label, Message("first.advise"), answer.command)]
        brief = _change(plan, advice, answer.changed, brief=True)
        return [Row(label, _change(plan, advice, answer.changed), answer.command, short=brief)]
    rows = [Row(label, command=answer.command)]
    if advice is not None and advice.effect.longer is not None:
        values = {"change": short(plan, advice), "share": -advice.effect.longer}
        rows.append(Row(Message("first.label.faster"), Message("first.faster", values), optional=2))
    return rows


def _change(plan: Plan, advice: Advice, changed: Changed | None, *, brief: bool = False) -> str:
    """A change with what planning it says: the same need, whether it fits, and unless `brief` a step's time."""
    effect = advice.effect
    span = changed.memory.neediest.needed_span if changed else (effect.needed_bytes,) * 3
    values = {"change": short(plan, advice), "needed": span, "available": effect.available_bytes or 0}
    id = verdict_id(effect.verdict, effect.needed_bytes, effect.available_bytes)
    said, slower = [Message(f"first.changed.{id}", values).text()], effect.slower
    if slower is not None and not rounds_to_zero(slower) and not brief:
        said.append(Message("first.more_time" if slower > 0 else "first.less_time", {"share": abs(slower)}).text())
    return listed(said)


def _written(asked: Asked, world: int = 1) -> Row:
    if asked.wrote:
        cards = ("--gpus", str(world)) if world > 1 else ()
        return Row(Message("first.label.next"), command=("foretrain", "train", asked.wrote, *cards))
    return Row(Message("first.label.next"), Message("first.write"))


def _card(plan: Plan, step: StepName) -> tuple[Cell, ...]:
    timing, verdict = plan.timing_of(step), plan.verdict_of(step)
    needs = needs_of_free(plan.memory_of(step).needed_bytes, verdict, plan.available_bytes)
    word: Cell = verdict_word(verdict)
    if timing is None or verdict in REFUSED:
        return plan.gpu.name, word, needs, "–", "–"
    total, money = timing.length_s, timing.money()
    cost = Quantity(money[1] if money and money[1] else None, "money")
    return plan.gpu.name, word, needs, Quantity((total.low_s, total.expected_s, total.high_s), "duration_span"), cost


def assumed_rows(plan: Plan, step: StepName, *more: str) -> list[Row]:
    """What was taken without knowing it, in a few words each; `more`: ids of what this answer took besides.

    What can change the verdict always stands there. The data sheet's speed cannot.
    """
    notes = [*plan.assumptions, *plan.notes]
    said = [(note.id, note.values) for note in notes if has(f"first.assumed.{note.id}")]
    optional = 0 if said else 1
    timing = plan.timing_of(step)
    if timing is not None and timing.source == "estimated":
        card = "speed_measured" if plan.gpu.sustained_share(plan.dtype) else "speed"
        said.append(({"cpu": "speed_cpu", "mps": "speed_apple"}.get(plan.gpu.kind, card), {}))
    said += [(id, {}) for id in more]
    if not said:
        return []
    full = listed(Message(f"first.assumed.{id}", values).text() for id, values in said)
    brief = (
        f"first.assumed_short.{id}" if has(f"first.assumed_short.{id}") else f"first.assumed.{id}" for id, _ in said
    )
    short = listed(Message(id, values).text() for id, (_, values) in zip(brief, said, strict=True))
    return [Row(Message("first.label.assumed"), full, optional=optional, short=short)]


def _all(asked: Asked) -> list[Row]:
    return [] if asked.quiet else [Row(Message("first.label.more"), Message("first.more_full"), optional=3)]


def _more(plan: Plan, asked: Asked) -> list[Row]:
    if asked.quiet:
        return []
    hidden = [n for n in plan.notes if not n.id.startswith("auto_") and not has(f"first.assumed.{n.id}")]
    more = Message("first.more_notes" if hidden else "first.more", {"count": len(hidden)})
    return [Row(Message("first.label.more"), more, optional=3)]

"""The first screen of `plan`: does it fit, how long, what does it cost, what limits it, what to do. Twelve lines."""

import math

from foretrain.advice.asked import Asked
from foretrain.advice.best import Best
from foretrain.advice.first_answer import FirstAnswer
from foretrain.base.messages import listed
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.reports.document import Message, Paragraph, Quantity, Row, Screen
from foretrain.reports.views.advice import change_text, short
from foretrain.reports.views.lead import assumed_rows, lead_of, more_rows, title, written
from foretrain.reports.views.shared import grouped, room
from foretrain.reports.views.takes import takes_rows

LARGEST = 2  # groups of memory that are named


def screen(plan: Plan, asked: Asked, answer: FirstAnswer) -> Screen:
    rows = [*_batch(plan), *_takes_of(plan, answer), *_limits(plan, answer, plan.step)]
    rows += _next(plan, answer, asked)
    rows += [*assumed_rows(plan), *more_rows(plan, asked)]
    return Screen(title(plan, asked, _changed_timing(plan, answer)), tuple(lead_of(plan, asked)), None, tuple(rows))


def best(plan: Plan, found: Best, asked: Asked) -> Screen:
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
    rows = takes_rows(plan.model_copy(update={"config": c}), winner.timing, steps=winner.steps)
    rows += [Row(Message("first.label.limits"), listed(Message(f"first.bind.{bind}").text() for bind in found.binds))]
    split = [Message("first.split", values).text()]
    shared = [Message(f"cluster.strategy.{c.strategy}").text()] if plan.world > 1 else []
    rows += [Row(Message("first.label.batch"), listed([*split, *shared]), optional=2), written(asked, plan.world)]
    rows += assumed_rows(plan, *(["no_repeats"] if found.dataset_tokens is None else []))
    rows += _all(asked)
    return Screen(Message("best.title", values), lead, None, tuple(rows))


# -- parts ---------------------------------------------------------------------------------------------------------


def _batch(plan: Plan) -> list[Row]:
    note = next((note for note in plan.notes if note.id.startswith("auto_")), None)
    return [] if note is None else [Row(Message("first.label.batch"), Message(f"first.{note.id}", note.values))]


def _takes_of(plan: Plan, answer: FirstAnswer) -> list[Row]:
    instead = _changed_timing(plan, answer)
    if answer.changed is None or instead is None:
        return takes_rows(plan, plan.timing)
    changed = plan.model_copy(update={"config": answer.changed.state.config})
    return takes_rows(changed, instead, marks=("with_change", "with_it"))


def _changed_timing(plan: Plan, answer: FirstAnswer) -> Timing | None:
    if plan.verdict not in REFUSED or plan.timing_of(plan.step) is None or answer.next != "change":
        return None
    return answer.changed.timing if answer.changed else None


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
        needed = answer.changed.memory.neediest.needed_span if answer.changed else None
        brief = change_text(plan, advice, needed, brief=True)
        return [Row(label, change_text(plan, advice, needed), answer.command, short=brief)]
    rows = [Row(label, command=answer.command)]
    if advice is not None and advice.effect.longer is not None:
        values = {"change": short(plan, advice), "share": -advice.effect.longer}
        rows.append(Row(Message("first.label.faster"), Message("first.faster", values), optional=2))
    return rows


def _all(asked: Asked) -> list[Row]:
    return [] if asked.quiet else [Row(Message("first.label.more"), Message("first.more_full"), optional=3)]

"""The first screen of a fine-tuning plan: does it fit, how fast, what takes the memory, what to change."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.record import Advice
from foretrain.base.messages import has, listed
from foretrain.config.finetune.together import idle
from foretrain.config.finetune.words import changed_words, option_words
from foretrain.config.inference import WORDS as GENERATING
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.timing import Timing
from foretrain.reports.document import Message, Paragraph, Quantity, Row, Screen
from foretrain.reports.views.shared import TONES, cost_of, grouped, room
from foretrain.reports.views.shared import verdict_id as exact_id

LARGEST = 4  # groups of memory that are named
MOST_CHANGES = 3
MUCH_LONGER = 0.5  # of the time: then it is said as so many times
ASSUMED = ("experts_even", "finetune_liger", "finetune_unsloth")  # notes that the screen counts, and --full has


def screen(plan: FineTunePlan, changes: tuple[Advice, ...], asked: Asked) -> Screen:
    """One plan, a dozen lines."""
    rows = [
        *read_rows(plan),
        *batch_rows(plan),
        _trained(plan),
        *time_rows(plan),
        _memory(plan),
        *change_rows(plan, changes, asked),
    ]
    rows += [*assumed_rows(plan), *more_rows(asked)]
    return Screen(title(plan), (verdict_of(plan),), None, tuple(rows))


def sure_bytes(plan: FineTunePlan) -> int:
    low, expected, high = plan.memory.neediest.needed_span
    return {"at_least": low, "at_most": high}.get(plan.bound, expected)


def verdict_id(plan: FineTunePlan, exact: str, bounded: str) -> str:
    if plan.bound != "exact":
        return f"first.{bounded}.{plan.bound}.{plan.verdict or 'unknown'}"
    return f"first.{exact}.{exact_id(plan.verdict, plan.needed_bytes, plan.available_bytes)}"


def title(plan: FineTunePlan) -> Message:
    return Message("finetune.title", {
        "name": plan.name, "method": method_of(plan), "gpu": plan.place, "source": plan.memory.source,
    })  # fmt: skip


def method_of(plan: FineTunePlan) -> Message:
    method = Message(f"finetune.method.{plan.tune.method}", {"rank": plan.tune.lora_r})
    if plan.tune.training == "sft":
        return method
    return Message(
        "finetune.trained_for", {"training": Message(f"finetune.training.{plan.tune.training}"), "method": method}
    )


def read_rows(plan: FineTunePlan) -> list[Row]:
    read = [note.values for note in plan.notes if note.id == "finetune_read_as"]
    shown = [{**values, "where": Path(str(values["where"])).name} for values in read]
    return [Row(Message("finetune.label.read_as"), Message("finetune.read_as", values)) for values in shown]


def bound_rows(plan: FineTunePlan) -> list[Row]:
    if plan.bound == "exact":
        return []
    return [Row(Message("first.label.note"), Message(f"finetune.bound.{plan.bound}", {"keys": plan.bounded_by}))]


def time_unknown(plan: FineTunePlan) -> Message:
    return Message("first.no_time" if plan.bound == "exact" else "finetune.no_time", {"gpu": plan.gpu.name})


def title_of_cards(plan: FineTunePlan, count: int) -> Message:
    values = {"name": plan.name, "method": method_of(plan), "count": count, "source": plan.memory.source}
    return Message("finetune.title_cards", values)


def verdict_of(plan: FineTunePlan) -> Paragraph:
    phase, verdict = plan.memory.neediest, plan.verdict
    values: dict[str, Any] = {
        "peak": phase.needed_span, "gpu": plan.gpu.name, "room": room(plan), "short": room(plan, "short"),
        "where": _where(phase), "sure": sure_bytes(plan),
        "keys": plan.bounded_by,
    }  # fmt: skip
    return Paragraph(Message(verdict_id(plan, "verdict", "bound"), values), TONES[verdict])


def _where(phase: PhaseMemory) -> Message:
    if phase.phase in ("evaluate", "load"):
        return Message("first.where.evaluation" if phase.phase == "evaluate" else "first.where.build")
    part = phase.phase if phase.phase in ("prepare", "merge") else phase.moment.partition(".")[0]
    return Message(f"first.where.{part}") if has(f"first.where.{part}") else Message("first.where.backward")


def batch_rows(plan: FineTunePlan) -> list[Row]:
    t = plan.tune
    values = {"batch": t.sequences, "seq_len": t.seq_len, "accum": t.grad_accum, "tokens": t.tokens_per_step}
    id = "finetune.batch" if t.grad_accum == 1 else "finetune.batch_accum"
    if t.world > 1:
        id, values = "finetune.batch_cards", values | {"world": t.world}
    rows = [Row(Message("first.label.batch"), Message(id, values))]
    if plan.facts and t.seq_len > plan.facts.max_positions:
        beyond = {"seq_len": t.seq_len, "most": plan.facts.max_positions}
        rows.append(Row(Message("first.label.note"), Message("finetune.beyond_trained", beyond)))
    return rows


def _trained(plan: FineTunePlan) -> Row:
    return Row(Message("finetune.label.trains"), trained_text(plan), short=trained_text(plan, brief=True))


def trained_text(plan: FineTunePlan, *, brief: bool = False) -> Message:
    c, t = plan.counts, plan.tune
    share = c.n_trained / c.n_params
    values: dict[str, Any] = {
        "trained": c.n_trained, "params": c.n_params, "share": share, "dtype": t.dtype, "optim": t.optim,
        "bits": 8 if t.load_in_8bit else 4,
    }  # fmt: skip
    id = "finetune.trained_quantized" if t.quantized else "finetune.trained" if t.adapters else "finetune.trained_all"
    return Message("finetune.trained_short" if brief and t.adapters else id, values)


def time_rows(plan: FineTunePlan) -> list[Row]:
    timing = plan.timing
    if timing is None:
        return [Row(Message("first.label.time"), time_unknown(plan))]
    total = timing.total_s
    rate = Message("finetune.line_speed", {"tokens": timing.tokens_per_s}).text()
    values: dict[str, Any] = {
        "rate": listed([rate, *_shares(plan, timing)]), "step": timing.step_s.expected_s, "steps": timing.steps or 0,
        "tokens": timing.tokens_per_s,
        "total": (total.low_s, total.expected_s, total.high_s) if total else (0.0, 0.0, 0.0),
    }  # fmt: skip
    ids = ("finetune.time", "finetune.time_short") if total else ("finetune.speed", "finetune.speed_short")
    said, brief = (Message(id, values) for id in ids)
    rows = [Row(Message("first.label.time"), said, short=brief)]
    if total:
        rows.append(Row(Message("first.label.cost"), cost_of(timing.prices, timing, plan.gpu, plan.tune.world)))
        if timing.co2_expected_g is not None:
            co2 = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
            factor = {"factor": timing.prices.co2_per_kwh}
            rows.append(Row(Message("row.co2"), Message("value.co2", {**co2, **factor}), optional=2))
    return rows


def _shares(plan: FineTunePlan, timing: Timing) -> list[str]:
    shares = {"mfu": timing.mfu, **({"hfu": timing.hfu} if plan.tune.gradient_checkpointing else {})}
    return [Message(f"finetune.{name}", {"share": share}).text() for name, share in shares.items() if share is not None]


def _memory(plan: FineTunePlan) -> Row:
    parts = sorted(grouped(plan.memory.neediest.components), key=lambda part: -part[1])[:LARGEST]
    named = [f"{Message(f'group.{group}').text()} {Quantity(size, 'bytes').text()}" for group, size in parts]
    return Row(Message("finetune.label.memory"), listed(named), short=listed(named[:2]))


def change_rows(plan: FineTunePlan | InferencePlan, changes: tuple[Advice, ...], asked: Asked) -> list[Row]:
    if plan.verdict == "fits" or not changes:
        return []
    fitting = [change for change in changes if change.effect.verdict == "fits"]
    if not fitting:
        nearest = Message("finetune.none_fits", {"change": change_text(changes[0])})
        return [Row(Message("first.label.change"), nearest)]
    labels = [Message("first.label.change"), *[Message("finetune.label.or")] * MOST_CHANGES]
    shown = tuple(zip(labels, fitting[:MOST_CHANGES], range(MOST_CHANGES), strict=False))
    rows = [Row(label, change_text(each), optional=2 if number else 0) for label, each, number in shown]
    rows += [] if asked.quiet else [next_row(plan, fitting[0], asked)]
    if any(each.learns_otherwise for _, each, _ in shown):
        rows.append(Row(Message("first.label.note"), otherwise(plan), optional=1))
    return [*rows, *change_notes(plan, changes)]


def otherwise(plan: FineTunePlan | InferencePlan) -> Message:
    """What a * beside a change says."""
    return Message("finetune.learns_otherwise" if isinstance(plan, FineTunePlan) else "inference.answers_otherwise")


def next_row(plan: FineTunePlan | InferencePlan, change: Advice, asked: Asked) -> Row:
    """The whole command of the run with a change."""
    if isinstance(plan, InferencePlan):
        kept = GENERATING.without(asked.words, change.options)
        if "world" in change.options:
            asked = asked.model_copy(update={"gpu": "auto", "cards": ()})
        command = ("foretrain", "plan", *kept, *words_of(change), *asked.card_options(), *asked.options())
        return Row(Message("first.label.next"), command=command)
    unused = idle(plan.tune.model_copy(update=change.options))
    command = (*command_of("plan", asked, change.options, unused), *asked.options())
    return Row(Message("first.label.next"), command=command)


def command_of(
    name: str, asked: Asked, changed: Mapping[str, bool | int | str] | None = None, without: Collection[str] = ()
) -> tuple[str, ...]:
    model, *words = asked.words
    return ("foretrain", name, model, *changed_words(words, changed or {}, without), *asked.card_options())


def change_notes(plan: FineTunePlan | InferencePlan, changes: Sequence[Advice]) -> list[Row]:
    """What is to be known of some changes."""
    ids = {id for change in changes for id in change.rules}
    known = {"loss_alone": "finetune.loss_alone", "precomputed": "note.finetune_reference_precomputed"}
    said = [Message(text) for id, text in known.items() if id in ids]
    if (more := four_bits_more(plan, changes)) is not None:
        said.append(more)
    return [Row(Message("first.label.note"), each, optional=1) for each in said]


def four_bits_more(plan: FineTunePlan | InferencePlan, changes: Sequence[Advice]) -> Message | None:
    """Why QLoRA needs more than LoRA, where the change to LoRA says so."""
    lora = next((change for change in changes if change.rules == ("sixteen_bits",)), None)
    if lora is None or lora.effect.saved_bytes <= 0:
        return None
    return Message("finetune.four_bits_more", {"four_bits": plan.needed_bytes, "lora": lora.effect.needed_bytes})


def words_of(change: Advice) -> list[str]:
    """A change as words of the command line."""
    words = {name: option_words(name, value) for name, value in change.options.items()}
    if "world" in words:
        words["world"] = ["--gpus", f"{change.options['world']} x {change.gpu}"]
    return [word for each in words.values() for word in each]


def change_text(change: Advice) -> str:
    """What to type, and what it comes to."""
    what = " ".join([*words_of(change), *(["*"] if change.learns_otherwise else [])])
    room = change.effect.available_bytes
    id = exact_id(change.effect.verdict, change.effect.needed_bytes, room)
    values = {"change": what, "needed": (change.effect.needed_bytes,) * 3, "available": room or 0}
    said = [Message(f"first.changed.{id}", values).text()]
    if change.effect.slower is not None and abs(change.effect.slower) >= 0.005:
        said.append(_time_of(change.effect.slower))
    return listed(said)


def _time_of(longer: float) -> str:
    if longer > MUCH_LONGER:
        return Message("finetune.slower", {"factor": 1 + longer}).text()
    return Message("finetune.more_time" if longer > 0 else "finetune.less_time", {"share": abs(longer)}).text()


def component(plan: FineTunePlan, id: str) -> Message:
    if id == "gradients":
        return Message("finetune.gradients", {"dtypes": listed(plan.counts.gradient_dtypes)})
    return Message(f"component.{id}")


def more_rows(asked: Asked) -> list[Row]:
    return [] if asked.quiet else [Row(Message("first.label.more"), Message("finetune.more"), optional=3)]


def assumed_rows(plan: FineTunePlan) -> list[Row]:
    known = {note.id: note.values for note in plan.notes if note.id in ASSUMED or has(f"first.assumed_short.{note.id}")}
    said = [Message(f"first.assumed_short.{id}", values).text() for id, values in known.items() if id not in ASSUMED]
    if plan.timing is not None and plan.timing.source == "estimated":
        said.append(Message("first.assumed_short.speed").text())
    if hidden := sum(id in ASSUMED for id in known):
        said.append(Message("finetune.assumed_more", {"count": hidden}).text())
    return [Row(Message("first.label.assumed"), listed(said), optional=1)] if said else []

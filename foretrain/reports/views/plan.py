"""A plan as a Document: the verdict first, then memory, work, time, notes."""

from datetime import datetime, timedelta
from typing import Any

from foretrain.advice.record import Advices
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.memory import Component, PhaseMemory, StepMemory
from foretrain.predict.plan import Plan, Timing
from foretrain.predict.spec import StepName
from foretrain.predict.trace.memory import Exact
from foretrain.reports.document import (
    Bar,
    Block,
    Cell,
    Document,
    Message,
    Paragraph,
    Quantity,
    Section,
    StackedBars,
    Table,
)
from foretrain.reports.views.advice import section as advice_section
from foretrain.reports.views.shared import TONES, assumed, uncalibrated

LATEST_S = 3e9  # a run of more than a century has no date
# Components are shown in these groups, so that a bar has a handful of colours; order is from the bottom of a bar.
GROUPS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "checkpoint": "weights",
    "weight_copies": "weight_copies", "activations.residual": "activations", "activations.norm": "activations",
    "activations.attention": "activations", "activations.mlp": "activations", "activations.dropout": "activations",
    "activations.head": "activations",
    "logits": "logits", "temporaries": "temporaries", "workspace": "temporaries",
    "measuring": "temporaries", "batch": "temporaries",
    "overhead": "overhead", "activations": "activations", "buffers": "weights", "rounding": "temporaries",
}  # fmt: skip
GROUP_ORDER = (
    "weights", "gradients", "optimizer", "weight_copies", "activations", "logits", "temporaries", "overhead"
)  # fmt: skip


def grouped(components: tuple[Component, ...]) -> tuple[tuple[str, int], ...]:
    """(group, bytes) in the order of GROUP_ORDER."""
    sums: dict[str, int] = dict.fromkeys(GROUP_ORDER, 0)
    for component in components:
        sums[GROUPS[component.id]] += component.size_bytes
    return tuple((group, size) for group, size in sums.items() if size)


def document(plan: Plan, now: datetime | None = None, advice: Advices | None = None) -> Document:
    """The whole plan. `now`: says when the run would end if it were started then. `advice`: what to change."""
    gpu = plan.gpu
    peak = gpu.peak_flop_per_s(plan.dtype)
    logged = plan.timing is not None and plan.timing.source.startswith("measured")
    source = Message("plan.source_logged" if logged else "plan.source_trace" if plan.exact else "plan.source")
    subtitle = Message(
        "plan.subtitle" if peak and gpu.memory_bytes else "plan.subtitle_short",
        {"gpu": gpu.name, "memory": gpu.memory_bytes or 0, "peak": peak or 0, "dtype": plan.dtype, "source": source},
    )
    sections = [
        Section(Message("plan.verdict"), (*_verdict(plan), *assumed(plan))),
        Section(Message("plan.memory"), _memory(plan)),
    ]
    if advice is not None:
        sections.insert(1, advice_section(plan, advice))
    sections.append(Section(Message("plan.bytes"), _bytes(plan)))
    sections.append(Section(Message("plan.work"), (_work(plan),)))
    sections.append(Section(Message("plan.time"), _time(plan, now)))
    if plan.notes:
        notes = tuple(Paragraph(Message(f"note.{note.id}", note.values)) for note in plan.notes)
        sections.append(Section(Message("plan.notes"), notes))
    return Document(Message("plan.title", {"name": plan.name}), subtitle, sections)


def _mode(memory: StepMemory) -> str:
    return "compiled" if memory.compiled else "eager"


def _verdict(plan: Plan) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for memory in plan.memories:
        verdict = plan.verdict_of(memory.step)
        exact = plan.exact_of(memory.step)
        if exact is not None:
            blocks.append(Paragraph(_exact_verdict(plan, exact, verdict), TONES[verdict]))
            expandable = exact.smallest_limit_expandable_bytes
            if verdict != "fits" and expandable < 0.98 * exact.smallest_limit_bytes:
                lives = {"lives": expandable + memory.context.expected_bytes, "step": Message(f"step.{memory.step}")}
                blocks.append(Paragraph(Message("verdict_exact.expandable", lives)))
            continue
        phase = memory.neediest
        id = f"verdict.{verdict or 'unknown'}"
        beside = ".beside" if plan.used_by_others_bytes and verdict else ".alone" if verdict else ""
        values = _verdict_values(plan, memory, phase)
        blocks.append(Paragraph(Message(id + beside, values), TONES[verdict]))
        if verdict == "fits" and phase.needed_high_bytes > values["available"]:
            blocks.append(Paragraph(Message("verdict.given_back", values)))
    return tuple(blocks)


def _verdict_values(plan: Plan, memory: StepMemory, phase: PhaseMemory) -> dict[str, Any]:
    low, expected, high = phase.needed_span
    return {
        "step": Message(f"step.{memory.step}"),
        "mode": Message(f"mode.{_mode(memory)}").text(),
        "phase": Message(f"phase.{phase.phase}"),
        "moment": Message(f"moment.{phase.moment}"),
        "low": low,
        "expected": expected,
        "high": high,
        "available": plan.available_bytes or 0,
        "others": plan.used_by_others_bytes,
    }


def _exact_verdict(plan: Plan, exact: Exact, verdict: str | None) -> Message:
    """What it takes where there is room, from how much on it lives, and where it dies under what there is."""
    memory, death = exact.memory, exact.death
    values = _verdict_values(plan, memory, memory.neediest)
    values |= {
        "lives": exact.smallest_limit_bytes + exact.memory.context.expected_bytes,
        "room": Message("room.beside" if plan.used_by_others_bytes else "room.alone", dict(values)),
    }
    if death is not None:
        values |= {
            "allowed": death.limit_bytes, "phase": Message(f"phase.{death.phase}"),
            "moment": Message(f"moment.{death.moment}"), "requested": death.requested_bytes,
            "allocated": death.allocated_bytes, "reserved": death.reserved_bytes,
        }  # fmt: skip
    return Message(f"verdict_exact.{verdict or 'unknown'}", values)


def _needs(phase: PhaseMemory, exact: bool, reached: bool) -> tuple[Cell, ...]:
    """Allocated, with a trace also reserved, needed, the range of that, the verdict."""
    reserved = (Quantity(phase.reserved_bytes, "bytes"),) if exact else ()
    low, expected, high = phase.needed_span
    return (
        Quantity(phase.allocated_bytes, "bytes"),
        *reserved,
        Quantity(expected, "bytes"),
        Quantity((low, high), "bytes_range"),
        Message("word.not_reached") if not reached else Message(f"word.{phase.verdict}") if phase.verdict else "–",
    )


def _memory(plan: Plan) -> tuple[Block, ...]:
    reserved = ("reserved",) if plan.exact else ()
    names = ("phase", "allocated", *reserved, "needed", "range", "verdict")
    heads = tuple(Message(f"column.{name}") for name in names)
    numeric = frozenset(range(1, len(names) - 1))
    blocks: list[Block] = []
    for memory in plan.memories:
        rows, tones = [], []
        for phase in memory.phases:
            reached = phase.phase not in memory.not_reached
            cells = _needs(phase, bool(plan.exact), reached)
            rows.append((Message(f"phase.{phase.phase}"), *cells))
            tones.append("plain" if phase.verdict == "fits" or not reached else TONES[phase.verdict])
        head = Message(
            "plan.step_mode",
            {"step": Message(f"step.{memory.step}"), "mode": Message(f"mode.{_mode(memory)}")},
        )
        optional = tuple(names.index(name) for name in ("reserved", "allocated") if name in names)
        blocks.append(Table((head, *heads[1:]), tuple(rows), numeric, tuple(tones), optional))
    if plan.exact:
        return *blocks, Paragraph(Message("plan.needed_explained_exact", {"torch": plan.exact[0].torch}))
    explained = "plan.needed_explained_cpu" if plan.gpu.kind == "cpu" else "plan.needed_explained"
    return *blocks, Paragraph(Message(explained))


def phase_parts(plan: Plan, memory: StepMemory, phase: PhaseMemory) -> tuple[tuple[str, int], ...]:
    """A phase up to what it is expected to need: by group, then what the process needs besides, and last what the
    allocator keeps from earlier phases: an evaluation between steps does not need that itself."""
    above = max(0, phase.needed_expected_bytes - phase.allocated_bytes)
    if plan.gpu.kind == "cpu":
        return *grouped(phase.components), ("python", above)
    own = max(0, memory.worst.needed_expected_bytes - memory.worst.allocated_bytes)
    kept = max(0, above - own) if phase.phase.startswith("evaluate") else 0
    parts = (*grouped(phase.components), ("overhead", above - kept))
    return (*parts, ("kept", kept)) if kept else parts


def memory_bars(plan: Plan) -> StackedBars:
    """One bar for each way to run the step, at the phase that needs most, up to what it is expected to need."""
    bars = tuple(
        Bar(Message(f"step.{each.step}"), phase_parts(plan, each, each.neediest))
        for each in sorted(plan.memories, key=plan.memory.index)
    )
    return StackedBars(Message("picture.memory"), bars, plan.available_bytes)


def _bytes(plan: Plan) -> tuple[Block, ...]:
    """Both bars, then the rows of the phase that needs most of the step that is meant, each with its formula."""
    memory = plan.memory_of(plan.step)
    phase = memory.neediest
    rows: list[tuple[Cell, ...]] = [
        (Message(f"component.{c.id}"), Quantity(c.size_bytes, "bytes"), c.formula)
        for c in phase.components
        if c.size_bytes * 2000 >= phase.allocated_bytes
    ]
    rest = phase.allocated_bytes - sum(
        c.size_bytes for c in phase.components if c.size_bytes * 2000 >= phase.allocated_bytes
    )
    if rest:
        rows.append((Message("component.rest"), Quantity(rest, "bytes"), ""))
    rows.append((Message("component.total"), Quantity(phase.allocated_bytes, "bytes"), ""))
    columns = (Message("column.component"), Message("column.bytes"), Message("column.formula"))
    c, evaluates = plan.config, phase.phase.startswith("evaluate")
    batch, context = (c.eval_batch, c.eval_block) if evaluates else (c.batch_size, c.block_size)
    legend = Message(
        "plan.legend",
        {
            "B": batch, "T": context, "C": c.n_embd, "H": c.n_head, "L": c.n_layer, "V": c.vocab_size,
            "P": plan.counts.n_params,
        },
    )  # fmt: skip
    where = Message(
        "plan.where",
        {
            "step": Message(f"step.{plan.step}"),
            "phase": Message(f"phase.{phase.phase}"),
            "moment": Message(f"moment.{phase.moment}"),
        },
    )
    family = family_of(c)
    own = {letter: getattr(c, name) for name, letter in family.letters.items()}
    legends = [Paragraph(legend), *([Paragraph(Message(family.legend, own))] if own else [])]
    return memory_bars(plan), Paragraph(where), Table(columns, tuple(rows), frozenset({1})), *legends


def _work(plan: Plan) -> Table:
    counts, work = plan.counts, plan.work
    rows: list[tuple[Cell, ...]] = [
        (Message("row.parameters"), Message("value.parameters", counts.model_dump())),
        (Message("row.optimizer_groups"), Message("value.optimizer_groups", counts.model_dump())),
    ]
    if plan.config.eval_only:
        return Table((), (rows[0], evaluation_work_row(plan)))
    rows += [
        (Message("row.tokens_per_step"), Message("value.tokens_per_step", {
            "tokens": work.tokens_per_step, "batch_size": plan.config.batch_size,
            "accumulation": plan.config.gradient_accumulation_steps, "block_size": plan.config.block_size})),
        (Message("row.tokens"), Message("value.tokens", {"tokens": work.tokens, "steps": work.steps})),
    ]  # fmt: skip
    if work.epochs is not None:
        values = {"epochs": work.epochs, "tokens": work.dataset_tokens}
        rows.append((Message("row.epochs"), Message("value.epochs", values)))
    rows.append((Message("row.flops"), Message("value.flops", {"flops_6n": work.flops_6n, "flops": work.flops})))
    return Table((), tuple(rows))


def _time(plan: Plan, now: datetime | None) -> tuple[Block, ...]:
    timing = plan.timing_of(plan.step)
    if timing is None:
        id = "plan.no_time_of_recipe" if plan.of_untimed_recipe else "plan.no_time"
        return (Paragraph(Message(id, {"gpu": plan.gpu.name, "recipe": plan.config.recipe})),)
    rows = _time_rows(plan, timing, now)
    other: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    beside = None if plan.config.eval_only else plan.timing_of(other)
    if beside and timing.source != "measured (log)":
        took = beside.step_s
        id = "row.nanogpt_time" if other == "nanogpt" else "row.foretrain_time"
        rows.append((Message(id), _duration(took.low_s, took.expected_s, took.high_s)))
    table = Table((), tuple(rows))
    if timing.source == "estimated":
        return table, Paragraph(uncalibrated(plan))
    return table, Paragraph(Message("source.log" if timing.source.startswith("measured") else "source.calibrated"))


def _duration(low: float, expected: float, high: float) -> Message:
    if low == high:
        return Message("value.duration", {"expected": expected})
    return Message("value.duration_range", {"low": low, "expected": expected, "high": high})


def _time_rows(plan: Plan, timing: Timing, now: datetime | None) -> list[tuple[Cell, ...]]:
    total = timing.total_s
    rows = [evaluation_time_row(plan, timing)] if plan.config.eval_only else _step_rows(plan, timing)
    rows.append((Message("row.total_time"), _duration(total.low_s, total.expected_s, total.high_s)))
    if now is not None and total.high_s < LATEST_S:
        ends = {name: now + timedelta(seconds=getattr(total, f"{name}_s")) for name in ("low", "expected", "high")}
        rows.append(
            (Message("row.finish"), Message("value.finish", {k: f"{v:%Y-%m-%d %H:%M}" for k, v in ends.items()}))
        )
    return rows + spending_rows(plan, timing)


def _step_rows(plan: Plan, timing: Timing) -> list[tuple[Cell, ...]]:
    step, evaluation = timing.step_s, timing.evaluation_s
    rows: list[tuple[Cell, ...]] = [
        (Message("row.step_time"), _duration(step.low_s, step.expected_s, step.high_s)),
        (Message("row.throughput"), Message("value.throughput", {"tokens_per_s": timing.tokens_per_s})),
        (Message("row.mfu"), mfu_message(timing, plan.gpu, plan.dtype)),
    ]
    if plan.compiled and plan.work.steps:
        first, own = timing.compile_s.plus(step), evaluation.expected_s if evaluation else 0.0
        values = {"low": first.low_s, "expected": first.expected_s, "high": first.high_s}
        logged = {"compile": timing.compile_s.expected_s, "logged": first.expected_s + own}
        rows.append((Message("row.first_step"), Message("value.first_step", {**values, **logged})))
    if evaluation is not None:
        rows.append(
            (
                Message("row.evaluations"),
                Message(
                    "value.evaluations",
                    {
                        "count": timing.n_evaluations,
                        "each": evaluation.expected_s,
                        "save": timing.save_s.expected_s if timing.save_s else 0.0,
                    },
                ),
            )
        )
    steps = plan.work.steps
    all_steps = _duration(step.low_s * steps, step.expected_s * steps, step.high_s * steps)
    rows.append((Message("row.all_steps", {"steps": steps}), all_steps))
    return rows


def spending_rows(plan: Plan, timing: Timing) -> list[tuple[Cell, ...]]:
    """Energy, electricity or rent, CO2: each where it is known."""
    c, rows = plan.config, []
    if timing.power is not None:
        values = {
            "expected": timing.energy_expected_j, "low": timing.energy_low_j, "high": timing.energy_high_j,
            "watts": timing.power.expected_w, "watts_low": timing.power.low_w, "watts_high": timing.power.high_w,
            "board": plan.gpu.board_power_w or 0,
        }  # fmt: skip
        id = "value.energy_cpu" if timing.power.model == "cpu" else "value.energy"
        rows.append((Message("row.energy"), Message(id, values)))
    if timing.cost_expected is not None:
        rows.append(_money_row("electricity", (timing.cost_low, timing.cost_expected, timing.cost_high), c))
    if timing.rent_expected is not None:
        rows.append(_money_row("rent", (timing.rent_low, timing.rent_expected, timing.rent_high), c))
    if timing.co2_expected_g is not None:
        values = {"low": timing.co2_low_g, "expected": timing.co2_expected_g, "high": timing.co2_high_g}
        rows.append((Message("row.co2"), Message("value.co2", {**values, "factor": c.co2_per_kwh})))
    return rows


def _money_row(id: str, amounts: tuple[float | None, ...], config: RunConfig) -> tuple[Cell, ...]:
    values = dict(zip(("low", "expected", "high"), amounts, strict=True))
    values |= {"price_kwh": config.price_per_kwh, "price_hour": config.price_per_hour}
    return Message(f"row.{id}"), Message(f"value.{id}", {**values, "currency": config.currency})


def mfu_message(timing: Timing, gpu: Gpu, dtype: str) -> Message:
    """MFU against this card, and what nanoGPT would print for the same speed."""
    values = {"mfu": timing.mfu, "nanogpt": timing.nanogpt_mfu, "rate": timing.flop_per_s, "dtype": dtype}
    peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
    if timing.mfu is None or peak is None:
        return Message("value.mfu_unknown", values)
    return Message("value.mfu_cpu" if gpu.kind == "cpu" else "value.mfu", {**values, "peak": peak})


def evaluation_work_row(plan: Plan) -> tuple[Cell, ...]:
    """How many batches are evaluated, and of how many tokens."""
    c = plan.config.as_nanogpt() if plan.step == "nanogpt" else plan.config
    batches = plan.evaluation_batches
    values = {
        "batches": batches, "batch_size": c.eval_batch, "block_size": c.eval_block,
        "tokens": 2 * c.eval_rows * c.eval_block,
    }  # fmt: skip
    return Message("row.evaluation"), Message("value.evaluation_work", values)


def evaluation_time_row(plan: Plan, timing: Timing) -> tuple[Cell, ...]:
    """Seconds of all batches, which the whole run has beside its compilation."""
    took = timing.evaluation_s
    assert took is not None
    values = {"batches": plan.evaluation_batches, "low": took.low_s, "expected": took.expected_s, "high": took.high_s}
    return Message("row.evaluation"), Message("value.evaluation_time", values)

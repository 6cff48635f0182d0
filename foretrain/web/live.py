"""How a run goes: its newest figures, and its loss, step time and memory over its steps, as the page draws them."""

from collections.abc import Sequence
from typing import Any

from foretrain.base.downsample import extremes
from foretrain.base.messages import format_value, say
from foretrain.reports.document import Axis, Cell, Curves, Figure, Figures, Message, Quantity, Trace
from foretrain.training.store import RunRecord

MOST_POINTS = 600  # of a curve; more cannot be told apart

Lines = Sequence[dict[str, Any]]  # of metrics.jsonl


def pictures(lines: Lines) -> list[Curves]:
    """The loss, a step's time, and the memory where the run measures it."""
    steps, evaluations = _of_kind(lines, "step"), _of_kind(lines, "evaluation")
    loss = [
        _trace(Message("axis.train"), steps, "loss", 1, colour=0),
        _trace(Message("axis.val"), evaluations, "val_loss", 0, colour=1),
    ]
    time = _trace(Message("page.picture.step_time"), steps, "step_s", 1)
    memory = _trace(Message("page.picture.memory"), steps, "memory_bytes", 1)
    found = [
        _curves("loss", Axis(Message("axis.loss"), "number"), loss),
        _curves("step_time", Axis(Message("page.picture.step_time"), "duration", from_zero=True), [time]),
    ]
    if memory.values:
        found.append(_curves("memory", Axis(Message("page.picture.memory"), "bytes", from_zero=True), [memory]))
    return found


def _of_kind(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


def _curves(name: str, y: Axis, traces: list[Trace]) -> Curves:
    steps = Axis(Message("axis.step"), "number")
    return Curves(
        Message(f"page.picture.{name}"), (steps,), y, tuple(traces), small=name != "loss", smooth=name == "loss"
    )


def _trace(label: Message, lines: Lines, key: str, shift: int, colour: int = 0) -> Trace:
    """`shift`: 1 where a line is of a step that is done, 0 where it is said before one."""
    found = [(line["step"] + shift, line[key]) for line in lines if isinstance(line.get(key), int | float)]
    kept = [found[i] for i in extremes([y for _, y in found], MOST_POINTS)]
    places, values = tuple(float(x) for x, _ in kept), tuple(float(y) for _, y in kept)
    return Trace(label, (places,), values, colour, dashed=key == "val_loss")


def figures(record: RunRecord, lines: Lines) -> Figures:
    """Of a run that goes, the newest step's; of one that is over, the medians that the list and the report have."""
    over = record.status != "running" and record.step_s
    known = {key: getattr(record, key) for key in ("step_s", "tokens_per_s", "mfu")} if over else {}
    return figures_of(known, lines, running=record.status == "running")


def figures_of(known: dict[str, Any], lines: Lines, *, running: bool) -> Figures:
    """The newest step's and evaluation's; `known`: figures of the whole run in their place."""
    step = next(reversed(_of_kind(lines, "step")), {})
    evaluation = next(reversed(_of_kind(lines, "evaluation")), {})
    of = known or step
    speed = of.get("tokens_per_s")
    found: list[tuple[str, Cell | None]] = [
        ("loss", _quantity(step.get("loss"), "digits4")),
        ("val_loss", _quantity(evaluation.get("val_loss"), "digits4")),
        ("step", _quantity(of.get("step_s"), "duration")),
        ("speed", Message("value.throughput", {"tokens_per_s": speed}) if speed else None),
        ("mfu", _quantity(of.get("mfu") or None, "percent")),
        ("left", _quantity(step.get("eta_s"), "duration") if running else None),
    ]
    source = Message("page.measured")
    return Figures(tuple(Figure(Message(f"page.now.{id}"), cell, source) for id, cell in found if cell is not None))


def _quantity(value: Any, format: str) -> Quantity | None:
    return Quantity(value, format) if isinstance(value, int | float) and not isinstance(value, bool) else None


def progress(done: int, of: int) -> str:
    """'120 of 5,000 steps', in words."""
    return say("page.steps_of", done=format_value(done, "number"), of=format_value(of, "number"))

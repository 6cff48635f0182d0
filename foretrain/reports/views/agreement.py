"""Predicted against measured as points: on the line where both are the same, with the range that was stated."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from foretrain.analysis.forecast_check import Row, Sources
from foretrain.base.messages import format_value, listed, say, source_name
from foretrain.hardware.calibration import Calibration, KernelTime, Peaks, StepTime
from foretrain.hardware.catalogue import Gpu
from foretrain.measure.verify_record import CONTRIBUTED, Outcome, Verification
from foretrain.measure.verify_record import Quantity as What
from foretrain.reports.document import (
    Axis,
    Block,
    Cell,
    Cloud,
    Document,
    Dot,
    Message,
    Paragraph,
    Quantity,
    Scatter,
    Section,
    Table,
)

BAND = 0.1  # either way of what was measured: what the eye compares with


def pictures(groups: Sequence[tuple[str, Sequence[Row]]], sources: Sources) -> tuple[Block, ...]:
    """A picture of bytes and one of times, as far as there are any. `groups`: (name of the run, its rows)."""
    found = []
    kinds: tuple[Literal["bytes", "seconds"], ...] = ("bytes", "seconds")
    for kind in kinds:
        rows = [(name, [row for row in rows if row.kind == kind]) for name, rows in groups]
        if sum(len(some) for _, some in rows) > 1:
            found.append(_picture(kind, [(name, some) for name, some in rows if some], sources[kind]))
    return tuple(found)


def _picture(kind: str, groups: list[tuple[str, list[Row]]], sources: Sequence[str]) -> Scatter:
    name, format = ("bytes", "bytes") if kind == "bytes" else ("time", "duration")
    clouds = tuple(
        Cloud(label if len(groups) > 1 else Message("report.quantities"), tuple(_dot(row) for row in rows), number)
        for number, (label, rows) in enumerate(groups)
    )
    values = [v for _, rows in groups for row in rows for v in (row.predicted, row.measured)]
    ends = (min(values) / 1.6, max(values) * 1.6)
    band = tuple((x, x * (1 - BAND), x * (1 + BAND)) for x in ends)
    return Scatter(
        Message("picture.predicted_memory" if kind == "bytes" else "picture.predicted_time"),
        Axis(Message(f"axis_measured.{name}"), format, True), Axis(Message(f"axis_predicted.{name}"), format, True),
        clouds,
        ((Message("report.same_line"), tuple((x, x) for x in ends)),), (Message("report.band", {"share": BAND}), band),
        note_label=Message("column.error"),
        source=Message("report.source_check", {"source": listed(map(source_name, sources))}),
    )  # fmt: skip


def _dot(row: Row) -> Dot:
    return Dot(
        Message(f"quantity.{row.id}"), row.measured, row.predicted, row.low, row.high,
        note=Quantity(row.error, "signed_percent"),
    )  # fmt: skip


def document(found: Calibration, gpu: Gpu, kept: bool) -> Document:
    rows: list[tuple[Cell, ...]] = []
    for dtype in dict.fromkeys(kernel.dtype for kernel in found.kernels):
        rates = [_flop_per_s(k) for k in found.kernels if k.kind == "matmul" and k.dtype == dtype]
        values = {"best": max(rates), "usual": sorted(rates)[len(rates) // 2], "count": len(rates)}
        rows.append((Message("row.products", {"dtype": dtype}), Message("calibration.products", values)))
        peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
        if peak:
            shares = {"share": max(rates) / peak, "peak": peak}
            rows.append((Message("row.of_peak", {"dtype": dtype}), Message("calibration.of_peak", shares)))
    for step in found.steps:
        values = {"dtype": step.dtype, "how": listed(_how(step)), **_sizes(step)}
        rows.append((Message("row.reference", values), Message("calibration.step", {"time": step.time_s})))
    if found.context_bytes is not None:
        rows.append((Message("row.context"), Message("calibration.bytes", {"size": found.context_bytes})))
    if found.clock_ghz is not None:
        rows.append((Message("row.clock"), f"{found.clock_ghz:.2f} GHz"))
    if found.power_w is not None:
        rows.append((Message("row.power"), f"{found.power_w:,.0f} W"))
    note = Message("calibration.kept" if kept else "calibration.not_kept", {"torch": found.torch_version})
    subtitle = Message("calibration.subtitle", {"date": found.date[:16].replace("T", " "), "took": found.took_s})
    blocks = [Table((), tuple(rows)), Paragraph(note)]
    if found.disturbed:
        blocks.insert(0, Paragraph(Message("calibration.disturbed", {"share": found.unsteadiness})))
    sections = [Section(Message("calibration.section"), tuple(blocks))]
    if found.peaks is not None:
        sections.insert(0, Section(Message("calibration.peaks"), (Table((), tuple(_peaks(found.peaks))),)))
    return Document(Message("calibration.title", {"device": found.device}), subtitle, sections)


def _peaks(peaks: Peaks) -> Iterator[tuple[Cell, ...]]:
    for dtype in peaks.dtypes:
        kinds = {"forward": "matmul", "input": "matmul_input", "weight": "matmul_weight", "attention": "attention"}
        values: dict[str, Any] = {name: _rate(peaks, dtype, kind) for name, kind in kinds.items()}
        values["best"] = peaks.flop_per_s(dtype)
        yield Message("row.peak_products", {"dtype": dtype}), Message("calibration.peak_products", values)
    moved = {
        "memory": peaks.memory_bytes_per_s(), "cache": peaks.cache_bytes_per_s(),
        "memory_in_place": peaks.memory_bytes_per_s(in_place=True),
        "cache_in_place": peaks.cache_bytes_per_s(in_place=True),
    }  # fmt: skip
    values = {name: (rate or 0.0) / 1e9 for name, rate in moved.items()}
    yield Message("row.peak_memory"), Message("calibration.peak_memory", values)
    if peaks.page_s is not None and peaks.page_bytes:
        page = {"each": peaks.page_s * 1e6, "size": peaks.page_bytes}
        yield Message("row.peak_page"), Message("calibration.peak_page", page)
    launch = {"each": peaks.launch_s * 1e6, "both": peaks.autograd_launch_s * 1e6}
    yield Message("row.peak_launch"), Message("calibration.peak_launch", launch)


def _rate(peaks: Peaks, dtype: str, kind: Any) -> float:
    found = peaks.best(dtype, kind)
    return found.flop_per_s if found else 0.0


def _how(step: StepTime) -> list[str]:
    """Its mode, and what else `train` chooses among."""
    found = [Message("mode.compiled" if step.compiled else "mode.eager").text()]
    if step.options.get("attention", "auto") != "auto":
        found.append(str(step.options["attention"]))
    return [*found, "master_weights"] if step.options.get("master_weights") else found


def _sizes(step: StepTime) -> dict[str, int | float | bool | str]:
    return {name: step.options[name] for name in ("n_layer", "n_embd", "block_size", "batch_size")}


def _flop_per_s(kernel: KernelTime) -> float:
    m, n, k = kernel.shape
    return 2 * m * n * k / kernel.time_s


ERRORS: tuple[What, ...] = ("allocated", "reserved", "process", "time")
FEW: tuple[What, ...] = ("allocated", "reserved", "time")  # what a line about one case has


def verify_document(found: Verification, path: str = "") -> Document:
    """The whole answer. `path`: the file to contribute, of one's own."""
    measured = found.of("measured")
    values = {
        "measured": len(measured), "count": len(found.outcomes), "torch": found.versions.torch, "date": found.date
    }  # fmt: skip
    sections = [Section(Message("verify.errors"), _errors(found))]
    if measured:
        sections.append(Section(Message("verify.cases"), (_cases(measured),)))
    if without := found.of("out_of_memory", "failed", "skipped", "waiting"):
        sections.append(Section(Message("verify.without"), (_without(without), *_again(found))))
    if path and measured:
        contribute = Message("verify.contribute", {"path": path, "folder": CONTRIBUTED})
        sections.append(Section(Message("verify.file"), (Paragraph(contribute),)))
    return Document(
        Message("verify.title", {"device": found.machine.device}), Message("verify.subtitle", values), sections
    )


def _errors(found: Verification) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if ran_out := len(found.of("out_of_memory")):
        blocks.append(Paragraph(Message("verify.ran_out", {"count": ran_out}), "bad"))
    if not found.by_quantity:
        return (*blocks, Paragraph(Message("verify.none"), "warn"))
    rows = []
    for each in found.by_quantity:
        inside = "" if each.inside is None else f"{each.inside} / {each.cases}"
        middle, worst = Quantity(each.median, "small_percent"), Quantity(each.worst, "small_signed_percent")
        name = Message(f"verify.quantity.{each.quantity}")
        rows.append((name, str(each.cases), middle, worst, inside, each.worst_case))
    names = ("quantity", "count", "median", "worst", "inside", "worst_case")
    heads = tuple(Message(f"column.{name}") for name in names)
    blocks.append(Table(heads, tuple(rows), frozenset({1, 2, 3, 4}), optional=(5,)))
    blocks.append(Paragraph(Message("verify.errors_are")))
    if busy := sum(each.busy for each in found.of("measured")):
        blocks.append(Paragraph(Message("verify.busy_cases", {"count": busy}), "warn"))
    estimated = [each for each in found.of("measured") if each.predicted and each.predicted.source == "estimated"]
    if estimated and found.machine.kind == "cuda":
        blocks.append(Paragraph(Message("verify.not_traced", {"count": len(estimated)}), "warn"))
    return tuple(blocks)


def _cases(measured: list[Outcome]) -> Table:
    shown: list[What] = [each for each in ERRORS if any(outcome.error(each) is not None for outcome in measured)]
    peak: What = "allocated" if "allocated" in shown else "process"
    heads = ["case", "batch", "peak", "step", *("time_error" if each == "time" else each for each in shown)]
    rows = []
    for outcome in measured:
        config, taken = outcome.case.config, outcome.measured
        most, step = outcome.pair(peak), taken.step_s if taken else None
        figures = [Quantity(most[1] if most else None, "bytes"), Quantity(step, "duration")]
        errors = [Quantity(outcome.error(each), "small_signed_percent") for each in shown]
        batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
        rows.append((outcome.case.label, batch, *figures, *errors))
    columns = tuple(Message(f"column.{head}") for head in heads)
    return Table(columns, tuple(rows), frozenset(range(1, len(heads))), optional=(1, 2, 3))


def _without(outcomes: list[Outcome]) -> Table:
    rows = tuple((outcome.case.label, why(outcome)) for outcome in outcomes)
    tones = tuple("bad" if outcome.status in ("out_of_memory", "failed") else "plain" for outcome in outcomes)
    return Table((Message("column.case"), Message("column.why")), rows, tones=tones)


def _again(found: Verification) -> tuple[Block, ...]:
    failed = found.of("failed")
    return (Paragraph(Message("verify.again", {"count": len(failed)})),) if failed else ()


def why(outcome: Outcome) -> Message:
    if outcome.reason is None:
        return Message("verify.why.waiting")
    return Message(f"verify.why.{outcome.reason.id}", dict(outcome.reason.values))


def errors_of(outcome: Outcome) -> str:
    parts = []
    for quantity in FEW if outcome.error("allocated") is not None else ERRORS[2:]:
        error = outcome.error(quantity)
        if error is not None:
            parts.append(f"{say(f'verify.short.{quantity}')} {format_value(error, 'small_signed_percent')}")
    return listed(parts)

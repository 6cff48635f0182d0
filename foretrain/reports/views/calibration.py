"""What a calibration found, as a document."""

from collections.abc import Iterator
from typing import Any

from foretrain.base.messages import listed
from foretrain.hardware.calibration import Calibration, KernelTime, Peaks, StepTime
from foretrain.hardware.catalogue import Gpu
from foretrain.reports.document import Cell, Document, Message, Paragraph, Section, Table


def document(found: Calibration, gpu: Gpu, kept: bool) -> Document:
    """What it reaches in practice first; the products of each dtype, overheads; and what is not known."""
    rows: list[tuple[Cell, ...]] = []
    for dtype in dict.fromkeys(kernel.dtype for kernel in found.kernels):
        products = [_flop_per_s(k) for k in found.kernels if k.kind == "matmul" and k.dtype == dtype]
        values = {"best": max(products), "usual": sorted(products)[len(products) // 2], "count": len(products)}
        rows.append((Message("row.products", {"dtype": dtype}), Message("calibration.products", values)))
        peak = gpu.peak_flop_per_s(dtype)  # type: ignore[arg-type]
        if peak:
            shares = {"share": max(products) / peak, "peak": peak}
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

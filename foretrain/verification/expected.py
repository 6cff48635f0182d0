"""What is predicted of a case: the trace of `plan --exact`, the estimate, the catalogue's step time. No torch here."""

import contextlib
from collections.abc import Callable, Sequence

from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.context import Context
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import StepMemory, estimated
from foretrain.predict.plan import timing
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for
from foretrain.predict.trace.service import Request, TraceUnavailable
from foretrain.verification.record import Case, Predicted

Peaks = dict[str, tuple[int, int | None]]  # phase -> allocated and reserved bytes


def requests(case: Case, gpu: Gpu) -> list[Request]:
    """The traces that predict a case; none of a CPU."""
    if gpu.kind != "cuda":
        return []
    return requests_for(case.spec(gpu))


def trace_all(cases: Sequence[Case], gpu: Gpu, listen: Callable[[str], None]) -> None:
    """Make all traces at once, which costs less than one by one; those that fail are told with their case."""
    with contextlib.suppress(TraceUnavailable):
        service.traces([request for case in cases for request in requests(case, gpu)], listen)


def predict(case: Case, gpu: Gpu) -> tuple[Predicted, Peaks]:
    """(figures, peaks by phase): traced where a trace can be made, else estimated."""
    spec = case.spec(gpu)
    ledger = estimated(spec).memory
    peaks, source = _traced(case, gpu), "traced"
    if peaks is None:
        peaks, source = _estimated(ledger), "estimated"
    cuda = gpu.kind == "cuda"
    reserved = max((size for _, size in peaks.values() if size is not None), default=None)
    context = ledger.context
    need, low, high = _process(ledger, context, reserved if cuda else None)
    found = timing(spec)
    step = None if found is None or spec.config.eval_only else found.step_s
    return Predicted(
        source=source,
        allocated_bytes=max(size for size, _ in peaks.values()) if cuda else None,
        reserved_bytes=reserved if cuda else None,
        process_bytes=need, process_low_bytes=low, process_high_bytes=high,
        estimate_allocated_bytes=max(size for size, _ in _estimated(ledger).values()) if cuda else None,
        step_s=step and step.expected_s, step_low_s=step and step.low_s, step_high_s=step and step.high_s,
    ), peaks  # fmt: skip


def _process(ledger: StepMemory, context: Context, reserved: int | None) -> tuple[int, int, int]:
    """(expected, low, high) bytes of the process: what is reserved and the context, or as the estimate has it."""
    if reserved is not None:
        return tuple(reserved + size for size in (context.expected_bytes, context.low_bytes, context.high_bytes))  # type: ignore[return-value]
    most = max((p for p in ledger.phases if p.phase != "resume"), key=lambda p: p.needed_expected_bytes)
    return most.needed_expected_bytes, most.needed_low_bytes, most.needed_high_bytes


def _traced(case: Case, gpu: Gpu) -> Peaks | None:
    """Of two traces, which differ in how a vocabulary is padded, the one with more reserved, as in a plan."""
    try:
        found = [replay(trace) for trace in service.traces(requests(case, gpu))]
    except TraceUnavailable:
        return None
    if not found:
        return None
    worst = max(found, key=lambda run: run.peak_reserved_bytes)
    return {phase.phase: (phase.allocated_bytes, phase.reserved_bytes) for phase in worst.phases}


def _estimated(ledger: StepMemory) -> Peaks:
    """Without the phase of resuming, which no case does."""
    return {p.phase: (p.allocated_bytes, p.reserved_bytes) for p in ledger.phases if p.phase != "resume"}


def without_calibration(gpu: Gpu) -> Gpu:
    """The card as the catalogue has it: what is contributed shows how good that is."""
    return gpu.model_copy(update={"calibration": None})

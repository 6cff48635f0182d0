"""Where the memory of a fine-tuning run goes, by its estimate or by its trace, and the trace as a snapshot."""

from collections.abc import Callable
from pathlib import Path

from foretrain.analysis.finetune_memory import FineTuneExplanation, explain
from foretrain.app.exact import write_trace
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base.errors import UserError
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.record import Trace

Listen = Callable[[str], None]


def explained(
    plan: FineTunePlan,
    asked: FineTuneQuestion,
    settings: Settings,
    listen: Listen,
    *,
    observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> FineTuneExplanation:
    """Where the memory of a plan goes; by its trace where the plan is traced. `observed_bytes`, `process_bytes`: what
    nvidia-smi shows, to explain. Raises UserError."""
    trace = trace_of(plan, asked, listen) if plan.memory.source == "traced" else None
    return explain(plan, trace, settings=settings, observed_bytes=observed_bytes, process_bytes=process_bytes)


def trace_of(plan: FineTunePlan, asked: FineTuneQuestion, listen: Listen) -> Trace:
    """The trace behind a plan. Raises UserError where there can be none."""
    try:
        (trace,) = service.traces([FineTuneRequest(asked.source, plan.tune, plan.gpu)], listen)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    return trace


def write_snapshot(plan: FineTunePlan, asked: FineTuneQuestion, path: Path, settings: Settings, listen: Listen) -> None:
    """The trace as a memory snapshot for pytorch.org/memory_viz. Raises UserError."""
    write_trace(trace_of(plan, asked, listen), path, settings)

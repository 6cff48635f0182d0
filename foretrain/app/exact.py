"""What a trace of the real step adds to a plan: exact memory, where it goes, what still fits, a snapshot."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from foretrain.analysis.components import Explanation, explain
from foretrain.base.errors import UserError
from foretrain.base.files import not_written
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings, of_run
from foretrain.predict.forecast import Forecast, Probe, forecast
from foretrain.predict.largest import Largest
from foretrain.predict.largest import largest as search
from foretrain.predict.plan import Plan
from foretrain.predict.pretraining import of_plan
from foretrain.predict.snapshot import Label, snapshot_of, write
from foretrain.predict.spec import StepName
from foretrain.predict.step_moments import StepMoments, traced_moments
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import answers_for, ranks_to_trace, requests_for, traced
from foretrain.predict.trace.record import Trace

Listen = Callable[[str], None]  # hears how far the traces are


def settings_of(plan: Plan | None = None, alloc_conf: str = "") -> Settings:
    """Return the allocator's settings by `alloc_conf`, else by the plan's config and environment. Raises UserError."""
    try:
        if alloc_conf:
            return Settings.parse(alloc_conf)
        return of_run(plan.config.allocator_settings if plan else "", os.environ)
    except ValueError as error:
        raise UserError("usage.alloc_conf", problem=str(error)) from None


def traced_plan(plan: Plan, listen: Listen, alloc_conf: str = "") -> Plan:
    """Trace a plan's memory; a note of the plan says why where it could not."""
    return traced(plan, settings_of(plan, alloc_conf), listen)


def trace_of(plan: Plan, step: StepName, listen: Listen, alloc_conf: str = "") -> Trace | None:
    """Return the trace behind a plan's answer; None where it was estimated."""
    if plan.memory_of(step).source != "traced":
        return None
    spec = plan.spec(step)
    asked = [each for rank in ranks_to_trace(spec) for each in requests_for(spec, rank)]
    return worst(asked, listen, settings_of(plan, alloc_conf))


def worst(asked: Sequence[service.Traceable], listen: Listen, settings: Settings) -> Trace:
    """Return the trace with most reserved, of several that only the card can tell apart."""
    return max(service.traces(asked, listen), key=lambda trace: replay(trace, settings).peak_reserved_bytes)


def moments_of(plan: Plan, step: StepName, listen: Listen) -> StepMoments | None:
    """Return what is allocated when in a traced step; None where it was estimated."""
    trace = trace_of(plan, step, listen)
    return traced_moments(trace, step, min(2, plan.config.gradient_accumulation_steps)) if trace else None


def explained(
    plan: Plan, step: StepName, listen: Listen, alloc_conf: str = "", *, observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> Explanation:  # fmt: skip
    """Explain where a traced plan's memory goes, and nvidia-smi's bytes."""
    trace, settings = trace_of(plan, step, listen, alloc_conf), settings_of(plan, alloc_conf)
    return explain(plan, step, trace, settings=settings, observed_bytes=observed_bytes, process_bytes=process_bytes)


def check_readings(observed_bytes: int | None, process_bytes: int | None, gpus: Sequence[Gpu]) -> None:
    """Raise UserError where the given figures of nvidia-smi contradict each other, on these cards."""
    for option, size in (("--observed", observed_bytes), ("--process", process_bytes)):
        if size == 0:
            raise UserError("usage.reading_zero", option=option)
        for gpu in gpus:
            if size is not None and gpu.memory_bytes is not None and size > gpu.memory_bytes:
                raise UserError(
                    "usage.reading_beyond", option=option, value=size, memory=gpu.memory_bytes, gpu=gpu.name
                )
    if observed_bytes is not None and process_bytes is not None and process_bytes > observed_bytes:
        raise UserError("usage.readings_contradict", observed=observed_bytes, process=process_bytes)


def largest(plan: Plan, option: str, listen: Listen, alloc_conf: str = "") -> Largest:
    made, settings = of_plan(plan), settings_of(plan, alloc_conf)
    try:
        return search(made, option, lambda value: probe_of(made, option, value, settings, listen))
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None


def probe_of(made: Forecast, option: str, value: int, settings: Settings, listen: Listen) -> Probe:
    listen(f"{option} = {value}")
    changed = forecast(made.run.but(**{option: value}), made.where).plan
    assert isinstance(changed, Plan)
    (found,) = answers_for(changed, [changed.step], settings, listen)
    return Probe(
        value=value, verdict=found.memory.verdict, needed_expected_bytes=found.memory.needed_bytes,
        smallest_limit_bytes=found.smallest_limit_bytes,
    )  # fmt: skip


def write_snapshot(plan: Plan, step: StepName, path: Path, listen: Listen, alloc_conf: str = "") -> None:
    """Write the trace as a memory snapshot for pytorch.org/memory_viz. Raises UserError."""
    trace = trace_of(plan, step, listen, alloc_conf)
    if trace is None:
        reason = next((note.values["reason"] for note in plan.notes if note.id == "trace_unavailable"), "")
        raise UserError("environment.no_trace", reason=reason)
    write_trace(trace, path, settings_of(plan, alloc_conf))


def write_trace(trace: Trace, path: Path, settings: Settings) -> None:
    def label(id: int) -> Label:
        a = trace.allocations[id]
        shape = "×".join(str(side) for side in a.shape)
        what = f"{a.name or a.op} {shape} {a.dtype}"
        return Label(what, frames=(a.category, a.module or a.op, trace.phase_at(a.allocated_at)))

    snapshot = snapshot_of(trace, label, settings)
    try:
        write(snapshot, path.resolve())  # what a link points to, not the link
    except OSError as error:
        raise not_written(path, error) from None


def check_snapshot(path: Path, configs: Iterable[Path]) -> None:
    """Raise UserError where no snapshot can be written. `configs`: files that are not to be lost."""
    try:
        reason = _why_not_written(path, configs)
    except (OSError, RuntimeError) as error:  # a name that is too long, links that go round
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no usable path"
    if reason:
        raise UserError("usage.cannot_write_file", path=str(path), reason=reason)


def _why_not_written(path: Path, configs: Iterable[Path]) -> str:
    """Return why no snapshot can be written to this path, else ''; only an earlier snapshot is overwritten."""
    if str(path) == "-":
        return "a snapshot goes into a file"
    if path.is_dir():
        return "it is a folder"
    if not path.resolve().parent.is_dir():
        return "its folder is not there"
    if not os.access(path.resolve().parent, os.W_OK | os.X_OK):
        return "its folder is read-only"
    if not path.exists():
        return ""
    if not path.is_file():
        return "it is not a plain file"
    if any(config.exists() and path.samefile(config) for config in configs):
        return "it is the config"
    with path.open("rb") as file:
        begins_as_pickle = file.read(1) in (b"", b"\x80")
    return "" if begins_as_pickle else "there is a file already that is no snapshot"

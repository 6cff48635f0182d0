"""What a trace of the real step adds to a plan: exact memory, where it goes, what still fits, a snapshot."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from foretrain.analysis.explanation import Explanation, explain
from foretrain.base.errors import UserError
from foretrain.base.files import not_written
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings, of_run
from foretrain.predict.finetune.plan import FineTunePlan, bounded, check_exact
from foretrain.predict.finetune.traced import exact_finetune
from foretrain.predict.finetuning import FineTuning
from foretrain.predict.forecast import AnyPlan, Forecast, Probe, forecast
from foretrain.predict.largest import Largest
from foretrain.predict.largest import largest as search
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of, with_pays
from foretrain.predict.ranks import traced as trace_cluster
from foretrain.predict.snapshot import Label, snapshot_of, write
from foretrain.predict.step_moments import StepMoments, traced_moments
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune.request import requests_for as finetune_requests
from foretrain.predict.trace.forecast import answers_for, ranks_to_trace, requests_for
from foretrain.predict.trace.forecast import traced as trace_plan
from foretrain.predict.trace.record import Trace

Listen = Callable[[str], None]  # hears how far the traces are
ESTIMATED = ("finetune_compile",)  # notes on what only the estimate leaves out


def settings_of(plan: AnyPlan | None = None, alloc_conf: str = "") -> Settings:
    """Return the allocator's settings by `alloc_conf`, else by the plan's config and environment. Raises UserError."""
    try:
        if alloc_conf:
            return Settings.parse(alloc_conf)
        own = plan.config.allocator_settings if isinstance(plan, Plan | ClusterPlan) else ""
        return of_run(own, os.environ)
    except ValueError as error:
        raise UserError("usage.alloc_conf", problem=str(error)) from None


def traced(found: Forecast, listen: Listen, alloc_conf: str = "") -> Forecast:
    """Trace the memory of a run of any kind. Raises UserError; pretraining has a note where that is not possible."""
    made, settings = found.plan, settings_of(found.plan, alloc_conf)
    if isinstance(made, Plan):
        return replace(found, plan=trace_plan(made, settings, listen))
    if isinstance(made, ClusterPlan):
        return replace(found, plan=with_pays(trace_cluster(made, settings, listen)))
    if not isinstance(made, FineTunePlan):
        raise UserError("usage.inference_without", option="--exact")
    if made.tune.bound != "exact":
        check_exact(made, "--exact")
    if made.facts is None:
        return found  # it is traced already
    if any(note.id in ("four_bits_kept", "four_bits_unnamed") for note in made.notes):
        raise UserError("usage.finetune_bounded", option="--exact", keys=["llm_int8_skip_modules"])
    assert isinstance(found.run, FineTuning)
    with untraced():
        answer = exact_finetune(found.run.source, made.tune, made.gpu, made.available_bytes, listen, settings)
    notes = tuple(note for note in made.notes if note.id not in ESTIMATED)
    update = {"memory": bounded(answer.memory, made.bound), "notes": (*notes, *answer.notes)}
    return replace(found, plan=made.model_copy(update=update))


@contextmanager
def untraced() -> Iterator[None]:
    """Raise UserError where a trace is not possible."""
    try:
        yield
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None


def trace_of(found: Forecast, listen: Listen, settings: Settings) -> Trace | None:
    """Return the trace behind a forecast's memory; None where it was estimated."""
    made = found.plan
    if isinstance(made, Plan | ClusterPlan):
        made = rank_of(made) if isinstance(made, ClusterPlan) else made
        if made.memory_of(made.step).source != "traced":
            return None
        spec = made.spec()
        return worst([each for rank in ranks_to_trace(spec) for each in requests_for(spec, rank)], listen, settings)
    if isinstance(made, FineTunePlan) and made.memory.source == "traced":
        assert isinstance(found.run, FineTuning)
        with untraced():
            return worst(finetune_requests(found.run.source, made.tune, made.gpu), listen, settings)
    return None


def worst(asked: Sequence[service.Traceable], listen: Listen, settings: Settings) -> Trace:
    """Return the trace with most reserved, of several that only the card can tell apart."""
    return max(service.traces(asked, listen), key=lambda trace: replay(trace, settings).peak_reserved_bytes)


def moments_of(found: Forecast, listen: Listen) -> StepMoments | None:
    """Return what is allocated when in a traced step of pretraining; None where it was estimated."""
    made = found.plan
    assert isinstance(made, Plan)
    trace = trace_of(found, listen, settings_of(made))
    return traced_moments(trace, made.step, min(2, made.config.gradient_accumulation_steps)) if trace else None


def explained(
    found: Forecast,
    listen: Listen,
    alloc_conf: str = "",
    observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> Explanation:
    """Explain where a run's memory goes, and nvidia-smi's bytes."""
    settings = settings_of(found.plan, alloc_conf)
    trace = trace_of(found, listen, settings)
    return explain(found.plan, trace, settings=settings, observed_bytes=observed_bytes, process_bytes=process_bytes)


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


def largest(found: Forecast, option: str, listen: Listen, alloc_conf: str = "") -> Largest:
    settings = settings_of(found.plan, alloc_conf)
    with untraced():
        return search(found, option, lambda value: probe_of(found, option, value, settings, listen))


def probe_of(made: Forecast, option: str, value: int, settings: Settings, listen: Listen) -> Probe:
    listen(f"{option} = {value}")
    changed = forecast(made.run.but(**{option: value}), made.where).plan
    assert isinstance(changed, Plan)
    (found,) = answers_for(changed, [changed.step], settings, listen)
    return Probe(
        value=value, verdict=found.memory.verdict, needed_expected_bytes=found.memory.needed_bytes,
        smallest_limit_bytes=found.smallest_limit_bytes,
    )  # fmt: skip


def write_snapshot(found: Forecast, path: Path, listen: Listen, alloc_conf: str = "") -> None:
    """Write the trace as a memory snapshot for pytorch.org/memory_viz. Raises UserError."""
    settings = settings_of(found.plan, alloc_conf)
    trace = trace_of(found, listen, settings)
    if trace is None:
        reason = next((note.values["reason"] for note in found.plan.notes if note.id == "trace_unavailable"), "")
        raise UserError("environment.no_trace", reason=reason)

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

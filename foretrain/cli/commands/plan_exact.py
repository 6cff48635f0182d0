"""What `foretrain plan` does beyond the ledger: --exact, --explain, --snapshot, --largest."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.cli.common import ERR, OUT, need_one_of, print_error, print_json, print_notes, working
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.allocator.settings import Settings, driver_backend, of_run
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for, traced
from foretrain.predict.trace.record import Trace

EXPLAIN_SCHEMA = "foretrain.explanation/2"
LARGEST_SCHEMA = "foretrain.largest/2"


@dataclass(frozen=True)
class Depth:
    """How deep to look: the options of `plan` that need a trace, or use one where there is one."""

    exact: bool = False
    explain: bool = False
    observed: str = ""
    process: str = ""
    largest: str = ""
    snapshot: Path | None = None
    alloc_conf: str = ""
    quiet: bool = False

    @property
    def wants_trace(self) -> bool:
        return self.exact or self.explain or self.snapshot is not None

    def settings(self, plan: Plan | None = None) -> Settings:
        """The allocator's, from --alloc-conf, or as a run of this plan would have them: from its config and from the
        environment; the ledger asks for none."""
        if not (self.wants_trace or self.alloc_conf):
            return Settings()
        try:
            if self.alloc_conf:
                return Settings.parse(self.alloc_conf)
            return of_run(plan.config.allocator_settings if plan else "", os.environ)
        except ValueError as error:
            raise UserError("usage.alloc_conf", problem=str(error)) from None


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that moves while workers trace; nothing where nobody watches."""
    with working(say("exact.tracing", state=""), quiet=quiet) as show:
        yield lambda text: show(say("exact.tracing", state=text))


def check_depth(depth: Depth, configs: Iterable[Path]) -> None:
    """What can be wrong with these options, before anything is traced. Raises UserError. `configs`: files that were
    read."""
    depth.settings()
    variable = driver_backend(os.environ)
    if variable and not depth.alloc_conf:
        print_notes((UserError("config.native_allocator", variable=variable),), quiet=depth.quiet)
    if (depth.observed or depth.process) and not depth.explain:
        raise UserError("usage.needs_explain", option="--observed" if depth.observed else "--process")
    if depth.largest and (depth.explain or depth.snapshot is not None):
        raise UserError("usage.largest_alone", option="--explain" if depth.explain else "--snapshot")
    if depth.snapshot is None:
        return
    try:
        reason = _why_not_written(depth.snapshot, configs)
    except (OSError, RuntimeError) as error:  # a name that is too long, links that go round
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no usable path"
    if reason:
        raise UserError("usage.cannot_write_file", path=str(depth.snapshot), reason=reason)


def _why_not_written(path: Path, configs: Iterable[Path]) -> str:
    """'' where a snapshot can be written to this path, else why not. Only a snapshot of before is written over."""
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


def check_readings(depth: Depth, gpus: Sequence[Gpu]) -> None:
    """Whether --observed and --process can be true together, on these cards. Raises UserError."""
    observed, process = _size(depth.observed, "--observed"), _size(depth.process, "--process")
    for option, size in (("--observed", observed), ("--process", process)):
        if size == 0:
            raise UserError("usage.reading_zero", option=option)
        for gpu in gpus:
            if size is not None and gpu.memory_bytes is not None and size > gpu.memory_bytes:
                raise UserError(
                    "usage.reading_beyond", option=option, value=size, memory=gpu.memory_bytes, gpu=gpu.name
                )
    if observed is not None and process is not None and process > observed:
        raise UserError("usage.readings_contradict", observed=observed, process=process)


def deepen(plan: Plan, depth: Depth) -> Plan:
    """The plan with traced memory where that was asked for."""
    if not depth.wants_trace:
        return plan
    settings = depth.settings(plan)
    with progress(depth.quiet) as listen:
        return traced(plan, settings, listen)


def trace_of(plan: Plan, step: StepName, depth: Depth) -> Trace | None:
    """The trace behind a plan's answer (the one with more reserved, of two); None where the ledger answered."""
    if plan.exact_of(step) is None:
        return None
    with progress(depth.quiet) as listen:
        requests = requests_for(plan.config, plan.gpu, plan.dtype, step, compiled=plan.compiled)
        found = service.traces(requests, listen)
    from foretrain.predict.trace.replay import replay

    return max(found, key=lambda trace: replay(trace, depth.settings(plan)).peak_reserved_bytes)


def look_deeper(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """What --snapshot and --explain ask for beside the plan."""
    if depth.snapshot is not None:
        write_snapshot(plan, step, depth)
    if depth.explain:
        explain_command(plan, step, depth, as_json=as_json)


def explain_command(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """Print the explanation of a plan."""
    from foretrain.analysis.components import explain

    explanation = explain(
        plan, step, trace_of(plan, step, depth), settings=depth.settings(plan),
        observed_bytes=_size(depth.observed, "--observed"), process_bytes=_size(depth.process, "--process"),
    )  # fmt: skip
    if as_json:
        print_json(explanation.to_json(schema=EXPLAIN_SCHEMA))
        return
    from foretrain.reports import text
    from foretrain.reports.views import explain as explain_view

    text.render(explain_view.document(plan, explanation), OUT)


def _size(value: str, option: str) -> int | None:
    return stated_bytes(value, option) if value else None


def largest_command(plan: Plan, step: StepName, depth: Depth, *, as_json: bool, check: bool) -> None:
    """Search and print the largest value of a knob that fits; `check`: exit with 3 where none does."""
    from foretrain.predict.trace.largest import estimated, largest

    try:
        if depth.exact:
            with progress(depth.quiet) as listen:
                found = largest(plan, depth.largest, step, depth.settings(plan), listen)
        else:
            found = estimated(plan, depth.largest, step)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    if as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
    else:
        from foretrain.reports import text
        from foretrain.reports.views import explain as explain_view

        text.render(explain_view.largest(plan, found), OUT)
    if check and found.value is None:  # the one object of --json is the answer, which says so too
        error = UserError("check.largest_nothing", option=found.option, name=plan.name, gpu=plan.gpu.name)
        print_error(error, as_json=False)
        raise typer.Exit(int(error.exit_code))


def write_snapshot(plan: Plan, step: StepName, depth: Depth) -> None:
    """The trace as a memory snapshot for pytorch.org/memory_viz."""
    from foretrain.predict.snapshot.read import Writer
    from foretrain.predict.trace.replay import replay

    assert depth.snapshot is not None
    trace = trace_of(plan, step, depth)
    if trace is None:
        reason = next((note.values["reason"] for note in plan.notes if note.id == "trace_unavailable"), "")
        raise UserError("environment.no_trace", reason=reason)

    def describe(id: int) -> list[str]:
        a = trace.allocations[id]
        shape = "×".join(str(side) for side in a.shape)
        what = f"{a.name or a.op} {shape} {a.dtype}"
        return [what, a.category, a.module or a.op, trace.phase_at(a.born)]

    writer = Writer(trace.events, describe)
    try:
        with working(say("working.writing", path=str(depth.snapshot)), quiet=depth.quiet):
            replay(trace, depth.settings(plan), watch=writer.watch)
            writer.write(depth.snapshot.resolve())  # what a link points to, not the link
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError("disk.full_output") from None
        raise UserError("environment.cannot_write", path=str(depth.snapshot), reason=error.strerror or "") from None
    if not depth.quiet:
        ERR.print(say("exact.snapshot", path=str(depth.snapshot)), soft_wrap=True)


def with_trainer(resolved: ResolvedConfig, trainer: str) -> ResolvedConfig:
    """The config for the trainer that --trainer names, if it does; `ResolvedConfig.step` has the rule for the rest."""
    if trainer:
        need_one_of("--trainer", trainer, ("foretrain", "nanogpt"))
    return replace(resolved, trainer="nanogpt" if trainer == "nanogpt" else "foretrain") if trainer else resolved

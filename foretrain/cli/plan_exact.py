"""What `foretrain plan` does beyond the ledger: --exact, --explain, --snapshot, --largest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from foretrain.cli.common import ERR, OUT, print_json
from foretrain.errors import UserError
from foretrain.messages import say
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact import service
from foretrain.predict.exact.forecast import requests_for, traced
from foretrain.predict.exact.record import Trace
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan
from foretrain.units import parse_bytes

EXPLAIN_SCHEMA = "foretrain.explanation/1"
LARGEST_SCHEMA = "foretrain.largest/1"


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
        return self.exact or self.explain or bool(self.largest) or self.snapshot is not None

    def settings(self) -> Settings:
        """The allocator's, from --alloc-conf or from the environment as a run here would have them."""
        try:
            return Settings.parse(self.alloc_conf) if self.alloc_conf else Settings.of_environment(os.environ)
        except ValueError as error:
            raise UserError("usage.alloc_conf", problem=str(error)) from None


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that moves while workers trace; nothing where nobody watches."""
    if quiet or not ERR.is_terminal:
        yield lambda text: None
        return
    with ERR.status(say("exact.tracing", state="")) as status:
        yield lambda text: status.update(say("exact.tracing", state=text))


def check_depth(depth: Depth) -> None:
    """What can be wrong with these options, before anything is traced. Raises UserError."""
    depth.settings()
    _size(depth.observed, "--observed")
    _size(depth.process, "--process")
    if (depth.observed or depth.process) and not depth.explain:
        raise UserError("usage.needs_explain", option="--observed" if depth.observed else "--process")
    if depth.snapshot is not None and not depth.snapshot.parent.is_dir():
        raise UserError("usage.cannot_write_file", path=str(depth.snapshot), reason="its folder is not there")


def deepen(plan: Plan, depth: Depth) -> Plan:
    """The plan with traced memory where that was asked for."""
    if not depth.wants_trace:
        return plan
    settings = depth.settings()
    with progress(depth.quiet) as listen:
        return traced(plan, settings, listen)


def trace_of(plan: Plan, step: StepName, depth: Depth) -> Trace | None:
    """The trace behind a plan's answer (the one with more reserved, of two); None where the ledger answered."""
    if plan.exact_of(step) is None:
        return None
    with progress(depth.quiet) as listen:
        requests = requests_for(plan.config, plan.gpu, plan.dtype, step, compiled=plan.compiled)
        found = service.traces(requests, listen)
    from foretrain.predict.exact.replay import replay

    return max(found, key=lambda trace: replay(trace, depth.settings()).peak_reserved_bytes)


def explain_command(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """Print the explanation of a plan."""
    from foretrain.advise.explain import explain

    explanation = explain(
        plan, step, trace_of(plan, step, depth), settings=depth.settings(),
        observed_bytes=_size(depth.observed, "--observed"), process_bytes=_size(depth.process, "--process"),
    )  # fmt: skip
    if as_json:
        print_json(explanation.to_json(schema=EXPLAIN_SCHEMA))
        return
    from foretrain.report import explain_view, text

    text.render(explain_view.document(plan, explanation), OUT)


def _size(value: str, option: str) -> int | None:
    if not value:
        return None
    try:
        return parse_bytes(value)
    except ValueError:
        raise UserError("gpu.bad_memory", option=option, value=value) from None


def largest_command(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """Search and print the largest value of a knob that fits."""
    from foretrain.predict.exact.largest import largest

    try:
        with progress(depth.quiet) as listen:
            found = largest(plan, depth.largest, step, depth.settings(), listen)
    except service.TraceUnavailable as error:
        raise UserError("environment.no_trace", reason=str(error)) from None
    if as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
        return
    from foretrain.report import explain_view, text

    text.render(explain_view.largest(plan, found), OUT)


def write_snapshot(plan: Plan, step: StepName, depth: Depth) -> None:
    """The trace as a memory snapshot for pytorch.org/memory_viz."""
    from foretrain.predict.exact.replay import replay
    from foretrain.predict.snapshot import Writer

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
    replay(trace, depth.settings(), watch=writer.watch)
    try:
        writer.write(depth.snapshot)
    except OSError as error:
        raise UserError("usage.cannot_write_file", path=str(depth.snapshot), reason=error.strerror or "") from None
    if not depth.quiet:
        ERR.print(say("exact.snapshot", path=str(depth.snapshot)), soft_wrap=True)


def chosen_step(trainer: str, sources: dict[str, str]) -> StepName:
    """Whose step is meant: --trainer, else nanoGPT's for a nanoGPT file and foretrain's for the rest."""
    if trainer not in ("", "foretrain", "nanogpt"):
        raise typer.BadParameter("must be foretrain or nanogpt", param_hint="--trainer")
    if trainer:
        return "nanogpt" if trainer == "nanogpt" else "foretrain"
    return "nanogpt" if any(".py" in source for source in sources.values()) else "foretrain"

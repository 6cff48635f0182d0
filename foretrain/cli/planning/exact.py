"""What `foretrain plan` does beyond the estimate: --exact, --explain, --snapshot, --largest."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from click.exceptions import Exit

from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import say
from foretrain.cli.common import ERR, OUT, need_one_of, print_error, print_json, print_notes, working
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.catalogue import Gpu, stated_bytes
from foretrain.predict.allocator.settings import driver_backend
from foretrain.predict.largest import Largest, largest
from foretrain.predict.plan import Plan
from foretrain.predict.pretraining import of_plan
from foretrain.predict.spec import StepName
from foretrain.reports import text

if TYPE_CHECKING:
    from foretrain.app import exact
    from foretrain.reports.views import explain as explain_view
else:  # a plan without traces does not wait for what they add
    exact, explain_view = Later("foretrain.app.exact"), Later("foretrain.reports.views.explain")

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
        return self.exact or self.explain or self.snapshot is not None


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that moves while workers trace; nothing where nobody watches."""
    with working(say("exact.tracing", state=""), quiet=quiet) as show:
        yield lambda text: show(say("exact.tracing", state=text))


def check_depth(depth: Depth, configs: Iterable[Path]) -> None:
    """What can be wrong with these options, before anything is traced. Raises UserError. `configs`: files that were
    read."""
    if depth.wants_trace or depth.alloc_conf:
        exact.settings_of(alloc_conf=depth.alloc_conf)
    variable = driver_backend(os.environ)
    if variable and not depth.alloc_conf:
        print_notes((UserError("config.native_allocator", variable=variable),), quiet=depth.quiet)
    if (depth.observed or depth.process) and not depth.explain:
        raise UserError("usage.needs_explain", option="--observed" if depth.observed else "--process")
    if depth.largest and (depth.explain or depth.snapshot is not None):
        raise UserError("usage.largest_alone", option="--explain" if depth.explain else "--snapshot")
    if depth.snapshot is not None:
        exact.check_snapshot(depth.snapshot, configs)


def check_readings(depth: Depth, gpus: Sequence[Gpu]) -> None:
    """Whether --observed and --process can be true together, on these cards. Raises UserError."""
    if depth.observed or depth.process:
        exact.check_readings(size_of(depth.observed, "--observed"), size_of(depth.process, "--process"), gpus)


def deepen(plan: Plan, depth: Depth) -> Plan:
    """The plan with traced memory where that was asked for."""
    if not depth.wants_trace:
        return plan
    with progress(depth.quiet) as listen:
        return exact.traced_plan(plan, listen, depth.alloc_conf)


def look_deeper(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """What --snapshot and --explain ask for beside the plan."""
    if depth.snapshot is not None:
        with working(say("working.writing", path=str(depth.snapshot)), quiet=depth.quiet):
            exact.write_snapshot(plan, step, depth.snapshot, lambda state: None, depth.alloc_conf)
        if not depth.quiet:
            ERR.print(say("exact.snapshot", path=str(depth.snapshot)), soft_wrap=True)
    if depth.explain:
        explain_command(plan, step, depth, as_json=as_json)


def explain_command(plan: Plan, step: StepName, depth: Depth, *, as_json: bool) -> None:
    """Print the explanation of a plan."""
    with progress(depth.quiet) as listen:
        explanation = exact.explained(
            plan, step, listen, depth.alloc_conf, observed_bytes=size_of(depth.observed, "--observed"),
            process_bytes=size_of(depth.process, "--process"),
        )  # fmt: skip
    if as_json:
        print_json(explanation.to_json(schema=EXPLAIN_SCHEMA))
    else:
        text.render(explain_view.document(plan, explanation), OUT)


def size_of(value: str, option: str) -> int | None:
    """The bytes of an option; None where it was not given. Raises UserError."""
    return stated_bytes(value, option) if value else None


def largest_command(plan: Plan, depth: Depth, *, as_json: bool, check: bool) -> None:
    """Search and print the largest value of a knob that fits; `check`: exit with 3 where none does."""
    if depth.exact:
        with progress(depth.quiet) as listen:
            found = exact.largest(plan, depth.largest, listen, depth.alloc_conf)
    else:
        found = largest(of_plan(plan), depth.largest)
    print_largest(plan, found, as_json=as_json)
    if check and found.value is None:  # the one object of --json is the answer, which says so too
        error = UserError("check.largest_nothing", option=found.option, name=plan.name, gpu=plan.gpu.name)
        print_error(error, as_json=False)
        raise Exit(int(error.exit_code))


def print_largest(plan: Plan, found: Largest, *, as_json: bool) -> None:
    """Print the largest value, of a plan for one card or for several."""
    if as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
    else:
        text.render(explain_view.largest(plan, found), OUT)


def with_trainer(resolved: ResolvedConfig, trainer: str) -> ResolvedConfig:
    """The config for the trainer that --trainer names, if it does; `ResolvedConfig.step` has the rule for the rest."""
    if trainer:
        need_one_of("--trainer", trainer, ("foretrain", "nanogpt"))
    return replace(resolved, trainer="nanogpt" if trainer == "nanogpt" else "foretrain") if trainer else resolved

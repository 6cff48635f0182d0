"""What `foretrain plan` does beyond the estimate: --exact, --explain, --snapshot, --largest."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.app.plan import Look
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import say
from foretrain.base.records import Note
from foretrain.cli.common import ERR, OUT, print_json, print_notes, print_shown, working
from foretrain.hardware.catalogue import Gpu, catalogue, stated_bytes
from foretrain.predict.allocator.settings import driver_backend
from foretrain.predict.largest import Largest, SmallestCard, largest, smallest_card
from foretrain.reports import text
from foretrain.reports.views import document_of

if TYPE_CHECKING:
    from foretrain.app import exact
else:  # a plan without traces does not wait for what they add
    exact = Later("foretrain.app.exact")


@dataclass(frozen=True)
class Depth:
    """How deep to look: the options of `plan` that need a trace, or use one where there is one."""

    exact: bool = False
    explain: bool = False
    observed: str = ""
    process: str = ""
    largest: str = ""
    smallest_card: bool = False
    snapshot: Path | None = None
    alloc_conf: str = ""
    python: str = ""
    quiet: bool = False

    @property
    def traces(self) -> bool:
        return self.exact or bool(self.python) or self.snapshot is not None

    @property
    def looks(self) -> str:
        return "--explain" if self.explain else "--snapshot" if self.snapshot is not None else ""

    @property
    def look(self) -> Look:
        readings = size_of(self.observed, "--observed"), size_of(self.process, "--process")
        return Look(self.alloc_conf, *readings)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that moves while workers trace; nothing where nobody watches."""
    with working(say("exact.tracing", state=""), quiet=quiet) as show:
        yield lambda text: show(say("exact.tracing", state=text))


@contextmanager
def unasked_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """The same of a trace that nobody asked for; a sentence says what it is for."""
    print_shown((Note(id="family_tracing", values={}),), quiet=quiet)
    with progress(quiet) as show:
        yield show


def check_depth(depth: Depth, configs: Iterable[Path]) -> None:
    """Raise UserError for what is wrong with these options, before any trace. `configs`: files that were read."""
    if depth.traces or depth.explain or depth.alloc_conf:
        exact.settings_of(alloc_conf=depth.alloc_conf)
    variable = driver_backend(os.environ)
    if variable and not depth.alloc_conf:
        print_notes((UserError("config.native_allocator", variable=variable),), quiet=depth.quiet)
    if (depth.observed or depth.process) and not depth.explain:
        raise UserError("usage.needs_explain", option="--observed" if depth.observed else "--process")
    if depth.largest and depth.looks:
        raise UserError("usage.largest_alone", option=depth.looks)
    if depth.snapshot is not None:
        exact.check_snapshot(depth.snapshot, configs)


def check_readings(depth: Depth, gpus: Sequence[Gpu]) -> None:
    """Whether --observed and --process can be true together, on these cards. Raises UserError."""
    if depth.observed or depth.process:
        exact.check_readings(size_of(depth.observed, "--observed"), size_of(depth.process, "--process"), gpus)


def deepened(request: Any, plans: list[Any], depth: Depth) -> list[Any]:
    """Return the plans with traced memory where that was asked for; the snapshot is written."""
    if not depth.traces and not (depth.explain and request.kind == "pretraining"):
        return plans
    with progress(depth.quiet) as listen:
        plans = [request.traced(plan, listen, depth.look) for plan in plans]
    if depth.snapshot is not None:
        with working(say("working.writing", path=str(depth.snapshot)), quiet=depth.quiet):
            request.write_snapshot(plans[0], depth.snapshot, lambda state: None, depth.look)
        if not depth.quiet:
            ERR.print(say("exact.snapshot", path=str(depth.snapshot)), soft_wrap=True)
    return plans


def explain_command(request: Any, plan: Any, depth: Depth, *, as_json: bool) -> None:
    with progress(depth.quiet) as listen:
        explanation = request.explained(plan, listen, depth.look)
    if as_json:
        print_json(explanation.to_json(schema="foretrain.plan/1#explanation"))
    else:
        text.render(document_of(explanation, plan), OUT)


def searched(request: Any, plan: Any, depth: Depth) -> Largest:
    """Return the largest value of an option that fits, by traces with --exact."""
    if not depth.exact:
        return largest(request.forecast(plan), request.aliases.get(depth.largest, depth.largest))
    with progress(depth.quiet) as listen:
        return request.largest(plan, depth.largest, listen, depth.look)


def smallest(request: Any, plan: Any, depth: Depth) -> SmallestCard:
    cards = [gpu for gpu in catalogue().values() if gpu.kind == "cuda"]
    with working(say("working.searching"), quiet=depth.quiet) as tell:
        return smallest_card(request.forecast(plan), cards, tell)


def size_of(value: str, option: str) -> int | None:
    return stated_bytes(value, option) if value else None

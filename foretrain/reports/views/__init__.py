"""Which view shows a record: a new kind of record is one line here, and all faces ask for its document."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrain.base.records import Record
from foretrain.reports.document import Document, Screen

if TYPE_CHECKING:
    from foretrain.reports.views.shared import Page


class View(NamedTuple):
    """A module here with the functions `document` and, of a plan, `screen` and `page`, or other names of them. `alone`:
    a document needs nothing beside the record, so that `print` shows it."""

    module: str
    document: str = "document"
    screen: str = "screen"
    alone: bool = True


VIEWS = {
    "Plan": View("plan", screen="first.screen"),
    "ClusterPlan": View("cluster"),
    "FineTunePlan": View("finetune"),
    "InferencePlan": View("generation"),
    "Comparison": View("compare"),
    "Evaluation": View("scores"),
    "Explanation": View("explain", alone=False),
    "LogExplanation": View("log"),
    "RunExplanation": View("run_explain"),
    "SnapshotAnalysis": View("explain", "snapshot_document"),
    "TrainerRunExplanation": View("trainer_run"),
}


def document_of(record: Record, *more: Any, **options: Any) -> Document:
    """Return all that is known of it. `more`: of a plan what to change, of the bytes of a plan that plan."""
    view = VIEWS[type(record).__name__]
    return _module(view.module).__dict__[view.document](record, *more, **options)


def screen_of(plan: Record, *more: Any) -> Screen:
    """Return the first screen of a plan. `more`: what was typed, and what to change."""
    view = VIEWS[type(plan).__name__]
    module, _, name = view.screen.rpartition(".")
    return _module(module or view.module).__dict__[name](plan, *more)


def page_of(plan: Record) -> "Page":
    return _module(VIEWS[type(plan).__name__].module).page(plan)


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")

"""What `foretrain plan` of a fine-tuning run does beyond the estimate: --exact, --explain, --snapshot."""

from foretrain.app.exact import settings_of
from foretrain.app.finetune import traced
from foretrain.app.finetuning import explain
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base.messages import say
from foretrain.cli.common import ERR, OUT, print_json, working
from foretrain.cli.planning.exact import Depth, progress, size_of
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.trace import interpreter
from foretrain.reports import text
from foretrain.reports.views.finetune import explain as explain_view

EXPLANATION_SCHEMA = "foretrain.finetune-explanation/1"


def deepened(plans: list[FineTunePlan], found: FineTuneQuestion, depth: Depth, python: str) -> list[FineTunePlan]:
    """Plans with traced memory where --exact or --snapshot asks for it; the snapshot is written."""
    if not depth.exact and depth.snapshot is None:
        return plans
    settings = settings_of(alloc_conf=depth.alloc_conf)
    with interpreter.use_interpreter(python), progress(depth.quiet) as listen:
        plans = [traced(plan, found, listen, settings) for plan in plans]
    if depth.snapshot is not None:
        with (
            interpreter.use_interpreter(python),
            working(say("working.writing", path=str(depth.snapshot)), quiet=depth.quiet),
        ):
            explain.write_snapshot(plans[0], found, depth.snapshot, settings, lambda state: None)
        if not depth.quiet:
            ERR.print(say("exact.snapshot", path=str(depth.snapshot)), soft_wrap=True)
    return plans


def explain_command(plan: FineTunePlan, found: FineTuneQuestion, depth: Depth, python: str, *, as_json: bool) -> None:
    """Print where the memory goes: by the estimate, with --exact by the trace."""
    with interpreter.use_interpreter(python), progress(depth.quiet) as listen:
        explanation = explain.explained(
            plan, found, settings_of(alloc_conf=depth.alloc_conf), listen,
            observed_bytes=size_of(depth.observed, "--observed"), process_bytes=size_of(depth.process, "--process"),
        )  # fmt: skip
    if as_json:
        print_json(explanation.to_json(schema=EXPLANATION_SCHEMA))
    else:
        text.render(explain_view.document(plan, explanation), OUT)

"""`foretrain plan` of a Hugging Face model: `hf:owner/name`, a folder with config.json, a trainer's YAML, a preset."""

import typer

from foretrain.app.finetuning import limits as limits_of
from foretrain.app.finetuning.question import FineTuneQuestion
from foretrain.base.errors import UserError
from foretrain.cli import finetune_deeper, finetune_print, show_config
from foretrain.cli.common import print_error
from foretrain.cli.finetune_options import Options, asked_about, read
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.finetuning import of_plan
from foretrain.predict.largest import largest
from foretrain.predict.memory import FAILING
from foretrain.reports.views.shared import check_error

# Options of `plan` that a fine-tuning plan cannot have, each with a sentence that says what to take instead.
REFUSED = {
    **{name: name for name in ("trainer", "logged_mfu", "best", "write")},
    **dict.fromkeys(("gpus", "link", "network"), "cluster"),
}


def answered(context: typer.Context, words: list[str]) -> bool:
    """Whether a fine-tuning run was asked about; then it is answered. Raises UserError."""
    asked = asked_about(context, words)
    if asked:
        _answer(context, words)
    return asked


def _answer(context: typer.Context, words: list[str]) -> None:
    """Print the plan, in the form that the options of `plan` ask for. Raises UserError."""
    given = context.params
    data = [f"--dataset-tokens={given['data_tokens']}"] if given["data_tokens"] else []
    found = read(context, [*words, *data], REFUSED)
    options = Options.of(given, words)
    if given["show_config"]:
        show_config.show_finetune(found, given["as_json"])
        return
    plans = limits_of.plans(found, given["gpu"], given["others"], options.limits, options.step_s)
    options.checked(plans)
    plans = _answered(plans, found, options)
    if given["check"]:
        _check(plans)


def _answered(plans: list[FineTunePlan], found: FineTuneQuestion, options: Options) -> list[FineTunePlan]:
    """What was asked, printed; the plans that --check is about."""
    depth, limits, form = options.depth, options.limits, options.form
    searched = largest(of_plan(plans[0]), options.largest) if options.largest else None
    if searched is not None:
        plans = [replanned(plans[0], **{searched.option: searched.value}) if searched.value else plans[0]]
    if searched is not None and (searched.value is None or not limits.asks):
        finetune_print.largest(plans[0], searched, form)
        return plans
    plans = finetune_deeper.deepened(plans, found, depth, options.python)
    if depth.explain:
        finetune_deeper.explain_command(plans[0], found, depth, options.python, as_json=form.as_json)
    elif len(plans) > 1:
        finetune_print.cards(plans, limits_of.cards(plans, limits), form)
    elif limits.asks:
        finetune_print.within(limits_of.within(plans[0], limits), form, searched)
    else:
        finetune_print.one(plans[0], form)
    return plans


def _check(plans: list[FineTunePlan]) -> None:
    """Exit with 3 where one does not fit, with 2 where nobody can say."""
    for plan in plans:
        if plan.verdict in FAILING:
            _fail(check_error("check.failed_finetune", plan, plan.memory, plan.gpu, plan.available_bytes or 0))
    for plan in plans:
        if plan.verdict is None:
            phase = plan.memory.neediest
            needed = phase.needed_low_bytes if plan.bound == "at_least" else phase.needed_high_bytes
            room, id = plan.available_bytes or 0, f"usage.no_verdict.{plan.bound}"
            _fail(UserError(id, name=plan.name, gpu=plan.gpu.name, needed=needed, room=room, keys=plan.bounded_by))


def _fail(error: UserError) -> None:
    print_error(error, as_json=False)
    raise typer.Exit(int(error.exit_code))

"""`foretrain plan` of a Hugging Face model: `hf:owner/name`, a folder with config.json, a trainer's YAML, a preset."""

from dataclasses import dataclass, fields
from importlib.metadata import version

import typer

from foretrain.app.finetune import advised, largest, plan_question, question, traced
from foretrain.base.errors import UserError
from foretrain.base.messages import printable
from foretrain.cli.commands.plan_exact import progress
from foretrain.cli.common import OUT, print_error, print_json, print_notes
from foretrain.predict.finetune.plan import SCHEMA, FineTunePlan
from foretrain.reports import text
from foretrain.reports.document import Message
from foretrain.reports.views.finetune import screen as screen_view
from foretrain.reports.views.finetune import whole as whole_view

PLANS_SCHEMA, LARGEST_SCHEMA = "foretrain.finetunes/1", "foretrain.finetune-largest/1"


@dataclass(frozen=True)
class Asked:
    """What was typed besides the model and its options."""

    gpu: str
    others: str
    largest: str
    exact: bool
    check: bool
    full: bool
    oneline: bool
    as_json: bool
    quiet: bool


# Parameters of `plan` that these plans take; any other is refused where it was typed.
TAKEN = {"words", "gpu", "others", "largest", "exact", "check", "full", "oneline", "as_json", "quiet"}


def answer(context: typer.Context, words: list[str]) -> None:
    """Print the plan, in the form that the options of `plan` ask for. Raises UserError."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in TAKEN and source is not None and source.name == "COMMANDLINE":
            raise UserError("usage.finetune_without", option=parameter.opts[-1])
    asked = Asked(**{field.name: context.params[field.name] for field in fields(Asked)})
    found = question(words[0], words[1:])
    print_notes(tuple(UserError(f"note.{note.id}", **note.values) for note in found.notes), quiet=asked.quiet)
    cards = [name.strip() for name in asked.gpu.split(",") if name.strip()] or [asked.gpu]
    plans = [plan_question(found, card, asked.others) for card in cards]
    if asked.exact:
        with progress(asked.quiet) as listen:
            plans = [traced(plan, found, listen) for plan in plans]
    if asked.largest:
        _largest(plans[0], asked)
    elif len(plans) > 1:
        _cards(plans, asked)
    else:
        _one(plans[0], asked)
    if asked.check:
        _check(plans)


def _one(plan: FineTunePlan, asked: Asked) -> None:
    if asked.oneline:
        OUT.print(printable(screen_view.line(plan, version("foretrain")).text()), soft_wrap=True, markup=False)
        return
    changes = advised(plan)
    if asked.as_json:
        print_json({**plan.to_json(schema=SCHEMA), "changes": [change.model_dump(mode="json") for change in changes]})
    elif asked.full:
        text.render(whole_view.document(plan, changes), OUT)
    else:
        text.render_screen(screen_view.screen(plan, changes), OUT)


def _cards(plans: list[FineTunePlan], asked: Asked) -> None:
    if asked.as_json:
        print_json({"schema": PLANS_SCHEMA, "plans": [plan.to_json(schema=SCHEMA) for plan in plans]})
    elif asked.oneline:
        for plan in plans:
            _one(plan, asked)
    else:
        text.render(whole_view.cards(plans), OUT)


def _largest(plan: FineTunePlan, asked: Asked) -> None:
    found = largest(plan, asked.largest)
    if asked.as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
        return
    id = "finetune.largest" if found.plan else "finetune.largest_none"
    values = {
        "option": asked.largest, "value": found.value, "gpu": plan.gpu.name, "next": found.next_value,
        "needed": found.plan.needed_bytes if found.plan else 0, "beyond": found.next_needed_bytes or 0,
    }  # fmt: skip
    OUT.print(printable(Message(id, values).text()), soft_wrap=True, markup=False)


def _check(plans: list[FineTunePlan]) -> None:
    """Exit with 3 where one does not fit."""
    for plan in plans:
        if plan.verdict == "does_not_fit":
            room = plan.available_bytes or 0
            error = UserError(
                "check.failed_finetune", name=plan.name, gpu=plan.gpu.name, needed=plan.needed_bytes, room=room
            )
            print_error(error, as_json=False)
            raise typer.Exit(int(error.exit_code))

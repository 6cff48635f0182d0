"""`foretrain plan MODEL --inference`: parse, plan, print."""

import re
from importlib.metadata import version

import click
from click.exceptions import Exit

from foretrain.app.generation.plan import model_of_words, plans
from foretrain.base.errors import UserError
from foretrain.base.messages import listed, say
from foretrain.cli.common import print_error, print_json, print_said
from foretrain.cli.planning.printing import document, line, screen
from foretrain.config.inference.options import Inference, parse_inference
from foretrain.config.presets import models
from foretrain.hardware import devices
from foretrain.hardware.catalogue import stated_bytes
from foretrain.hardware.cluster import is_counted
from foretrain.predict.inference.plan import SCHEMA, InferencePlan
from foretrain.predict.memory import FAILING
from foretrain.reports.views import generation as view

PLANS_SCHEMA = "foretrain.inferences/1"
# Options of `plan` that go with --inference; every other one is about training.
WITH = ("largest", "price", "inference", "gpu", "others", "check", "full", "oneline", "as_json", "quiet", "words")


def answer_command(context: click.Context, words: list[str]) -> None:
    """Answer what was asked of generating text. Raises UserError."""
    given = context.params
    for name in given:
        source = context.get_parameter_source(name)
        if name not in WITH and source is not None and source.name == "COMMANDLINE":
            raise UserError("usage.inference_without", option=f"--{name.replace('_', '-')}")
    forms = [f"--{name.removeprefix('as_')}" for name in ("full", "oneline", "as_json") if given[name]]
    if len(forms) > 1:
        raise UserError("usage.two_forms", options=forms)
    asked, left, notes = parse_inference(words)
    print_said(notes, quiet=given["quiet"])
    if not left:
        raise UserError("usage.inference_no_model", models=listed(list(models())))
    model = model_of_words(left)
    stated = stated_bytes(given["others"], "--used-by-others") if given["others"] else None
    names = list(dict.fromkeys(each.strip() for each in given["gpu"].split(",") if each.strip())) or ["auto"]
    if counted := next((name for name in names if is_counted(name)), None):
        raise UserError("usage.inference_one_card", value=counted[:80], one=re.sub(r"^.*\d\s*x\s*", "", counted)[:80])
    found = plans(model, asked, [devices.target(name, stated) for name in names], given["price"])
    if given["largest"] and not given["as_json"]:
        _largest(found, given["largest"])
    elif given["as_json"] and len(found) > 1:
        print_json({"schema": PLANS_SCHEMA, "plans": [plan.to_json(schema=SCHEMA) for plan in found]})
    else:
        for plan in found:
            others = ("--used-by-others", given["others"]) if given["others"] else ()
            price = ("--price", given["price"]) if given["price"] else ()
            card = ("--gpu", names[0] if len(names) == 1 else plan.gpu.name, *others, *price)
            command = ("foretrain", "plan", *left, "--inference", *_changed(asked, plan), *card)
            shown = () if given["quiet"] else command
            _print(plan, given["as_json"], given["full"], given["oneline"] or len(found) > 1, shown)
    if given["check"]:
        _check(found)


def _largest(plans: list[InferencePlan], value: str) -> None:
    """One line a card: the longest context and the largest batch that fit."""
    if value not in ("batch", "batch_size", "context", "seq_len"):
        raise UserError("usage.inference_largest", value=value[:40])
    for plan in plans:
        line(view.line(plan, version("foretrain")) if not plan.longest_context else view.most(plan)[0])


def _changed(asked: Inference, plan: InferencePlan) -> list[str]:
    """The options that were typed, with those that would let it fit."""
    typed = asked.model_dump(exclude_defaults=True)
    changed = parse_inference(plan.fitting.words.split()).asked if plan.fitting else asked
    return [f"--{name}={value}" for name, value in (typed | changed.model_dump(exclude_defaults=True)).items()]


def _print(plan: InferencePlan, as_json: bool, full: bool, oneline: bool, command: tuple[str, ...]) -> None:
    if as_json:
        print_json(plan.to_json(schema=SCHEMA))
    elif full:
        document(view.document(plan))
    elif oneline:
        line(view.line(plan, version("foretrain")))
    else:
        screen(view.screen(plan, command))


def _check(plans: list[InferencePlan]) -> None:
    """Exit with 3 where one does not fit."""
    for plan in plans:
        if plan.verdict in FAILING:
            error = UserError(
                "check.failed_inference", name=plan.name, gpu=plan.gpu.name, needed=plan.needed_bytes,
                room=plan.available_bytes or 0, verdict=say(f"word.{plan.verdict}"),
            )  # fmt: skip
            print_error(error, as_json=False)
            raise Exit(int(error.exit_code))

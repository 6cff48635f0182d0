"""`foretrain plan MODEL --inference`: parse, plan, print."""

from collections.abc import Mapping
from typing import Any

import click

from foretrain.advice.asked import Asked
from foretrain.analysis.finetune_memory import explain_generation
from foretrain.app.generation import model_of_words, plans
from foretrain.app.plan import words_of_cards
from foretrain.base.errors import UserError
from foretrain.base.messages import listed
from foretrain.cli.asked_elsewhere import cards_of, check_cards, typed_cards
from foretrain.cli.common import print_json, print_said
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import EXPLAIN_SCHEMA, Depth, check_depth, check_readings, size_of
from foretrain.config.inference import WORDS, parse_inference
from foretrain.config.presets import models
from foretrain.hardware import devices
from foretrain.hardware.catalogue import stated_bytes
from foretrain.predict.inference.plan import InferencePlan
from foretrain.reports.views import generation as view
from foretrain.reports.views.line import line

# Options of `plan` that go with --inference; every other one is about training.
WITH = (
    "largest", "explain", "observed", "process", "price", "inference", "gpu", "gpus", "link", "network", "others",
    "check", "full", "oneline", "as_json", "quiet", "words",
)  # fmt: skip


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
    depth = Depth(False, given["explain"], given["observed"], given["process"], quiet=given["quiet"])
    check_depth(depth, ())
    check_cards(context)
    gpu, cards = words_of_cards(cards_of(given), words, WORDS)
    asked, typed, left, notes = parse_inference([*words, *cards])
    print_said(notes, quiet=given["quiet"])
    if not left:
        raise UserError("usage.inference_no_model", models=listed(list(models())))
    model = model_of_words(left)
    stated = stated_bytes(given["others"], "--used-by-others") if given["others"] else None
    names = list(dict.fromkeys(each.strip() for each in gpu.split(",") if each.strip())) or ["auto"]
    found = plans(model, asked, [devices.target(name, stated) for name in names], given["price"])
    form = plan_print.Form(
        given["full"], given["oneline"], given["as_json"], _asked(given, typed[: len(typed) - len(cards)], left)
    )
    if given["largest"] and not given["as_json"]:
        _largest(found, given["largest"])
    elif depth.explain:
        form.check(elsewhere="--explain")
        _explain(found, depth, as_json=given["as_json"])
    else:
        plan_print.plans(found, form)
    if given["check"]:
        plan_print.check(found)


def _explain(plans: list[InferencePlan], depth: Depth, *, as_json: bool) -> None:
    if len(plans) > 1:
        raise UserError("usage.one_card", count=len(plans))
    check_readings(depth, [plans[0].gpu])
    readings = size_of(depth.observed, "--observed"), size_of(depth.process, "--process")
    found = explain_generation(plans[0], *readings)
    if as_json:
        print_json(found.to_json(schema=EXPLAIN_SCHEMA))
    else:
        plan_print.document(view.explain_document(plans[0], found))


def _largest(plans: list[InferencePlan], value: str) -> None:
    """One line a card: the longest context and the largest batch that fit."""
    if value not in ("batch", "batch_size", "context", "seq_len"):
        raise UserError("usage.inference_largest", value=value[:40])
    for plan in plans:
        plan_print.line(view.most(plan)[0] if plan.longest_context else line(plan))


def _asked(given: Mapping[str, Any], typed: list[str], model: list[str]) -> Asked:
    card: dict[str, Any] = {"gpu": given["gpu"], "others": given["others"], "price": given["price"] or ""}
    card["cards"] = typed_cards(given)
    return Asked(words=(*model, "--inference", *typed), quiet=given["quiet"], **card)

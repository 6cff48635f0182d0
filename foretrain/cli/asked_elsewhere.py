"""`plan` and `advise` of a fine-tuning run, of several cards and of generating text.

Other modules answer, imported where that is asked.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from foretrain.app.plan import Cards
from foretrain.base.errors import UserError
from foretrain.config.presets import is_surely_asked

FINETUNING = {"plan": "foretrain.cli.finetune", "advise": "foretrain.cli.finetune_advise"}
CLUSTER = {"plan": "foretrain.cli.cluster", "advise": "foretrain.cli.cluster_advise"}
OWN = ("gpus", "link", "network", "write_job")  # options that only a plan for several cards has


def answered(context: click.Context, words: list[str]) -> bool:
    """Whether `plan` was asked about any of them; then it has been answered. Raises UserError."""
    return inference(context, words) or finetuning(context, words) or cluster(context, words)


def finetuning(context: click.Context, words: list[str]) -> bool:
    """Whether a fine-tuning run was asked about; then it has been answered. Raises UserError."""
    return not is_surely_asked(words) and import_module(FINETUNING[context.command.name or ""]).answered(context, words)


def inference(context: click.Context, words: list[str]) -> bool:
    """Whether generating text was asked about; then it has been answered. Raises UserError."""
    if context.params["inference"]:
        import_module("foretrain.cli.generation").answer_command(context, words)
    return bool(context.params["inference"])


def cluster(context: click.Context, words: list[str]) -> bool:
    """Whether several cards that train together were asked about; then it has been answered. Raises UserError."""
    if context.params["gpus"]:
        import_module(CLUSTER[context.command.name or ""]).answer_command(context, words)
        return True
    check_cards(context)
    return False


def is_typed(context: click.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_cards(context: click.Context) -> None:
    """Raise UserError for options of several cards without --gpus, and for cards that are named twice."""
    given = context.params
    for name in () if given["gpus"] else OWN:
        if given.get(name):
            raise UserError("usage.needs_gpus", option=f"--{name.replace('_', '-')}")
    if given["gpus"] and is_typed(context, "gpu") and (not given["gpus"].strip().isdigit() or "," in given["gpu"]):
        raise UserError("usage.cluster_two", gpus=given["gpus"][:80], gpu=given["gpu"][:80])


def cards_of(given: Mapping[str, Any]) -> Cards:
    """Return the options that name the cards."""
    return Cards(given["gpus"], given["gpu"], given["link"], given["network"], given["others"])


def typed_cards(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return --gpus and what belongs to it, as they were typed."""
    return tuple(word for name in ("gpus", "link", "network") if given[name] for word in (f"--{name}", given[name]))

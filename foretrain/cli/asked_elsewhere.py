"""`plan` and `advise` of a fine-tuning run, of several cards and of generating text.

Other modules answer, imported where that is asked.
"""

from importlib import import_module

import click

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
        import_module("foretrain.cli.generation.plan").answer_command(context, words)
    return bool(context.params["inference"])


def cluster(context: click.Context, words: list[str]) -> bool:
    """Whether several cards that train together were asked about; then it has been answered. Raises UserError."""
    if context.params["gpus"]:
        import_module(CLUSTER[context.command.name or ""]).answer_command(context, words)
        return True
    for name in OWN:
        if context.params.get(name):
            raise UserError("usage.needs_gpus", option=f"--{name.replace('_', '-')}")
    return False

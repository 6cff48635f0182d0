"""`foretrain plan CONFIG --gpus "2 x RTX 4090"`: parse, plan, print."""

import click

from foretrain.advice.asked import Asked
from foretrain.app.limits import Limits, check_limits
from foretrain.app.ranks.job_files import JOB_KINDS, write_job
from foretrain.app.ranks.plan import Cards, answer, traced_cluster, within_cluster
from foretrain.base.errors import UserError
from foretrain.cli.common import need_one_of, print_notes
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import print_largest, progress
from foretrain.cli.planning.limits import tell_written, write_steps
from foretrain.cli.show_config import show_config_of
from foretrain.config.resolve import resolve
from foretrain.predict.largest import largest
from foretrain.predict.pretraining import of_cluster

CARDS = ("gpus", "link", "network")  # options that name them
# Those that such a plan cannot have.
ALONE = (
    "step_time", "logged_mfu", "explain", "observed", "process", "snapshot", "alloc_conf", "best",
)  # fmt: skip


def answer_command(context: click.Context, words: list[str]) -> None:
    """Answer what was asked of several cards that train together. Raises UserError."""
    given = context.params
    check_options(context, ALONE)
    if given["write_job"]:
        need_one_of("--write-job", given["write_job"], tuple(JOB_KINDS))
    resolved = resolve(words)
    print_notes(resolved.notes, quiet=given["quiet"])
    if given["show_config"]:
        show_config_of(resolved, given["as_json"])
        return
    limits = Limits(*(given[name] for name in ("price", "co2", "within", "tokens", "best", "data_tokens", "write")))
    traces = given["exact"] or bool(given["python"])
    if given["largest"] and traces:
        raise UserError("usage.finetune_largest_alone", option="--exact")
    check_limits(limits, 1, traces or bool(given["largest"]))
    plan = answer(resolved, cards_of(context), limits)
    if traces:
        with progress(given["quiet"]) as listen:
            plan = traced_cluster(plan, listen, given["python"])
    form = plan_print.Form(given["full"], given["oneline"], given["as_json"], asked_of(context, words))
    if given["largest"]:
        print_largest(plan.one_card, largest(of_cluster(plan), given["largest"]), as_json=given["as_json"])
    elif limits.asks:
        found = within_cluster(plan, limits)
        if limits.write is not None:
            write_steps(plan.one_card, found, limits.write, form.asked)
        plan_print.within(plan, found, form)
    else:
        plan_print.plans([plan], form)
    if given["write_job"]:
        tell_written(write_job(given["write_job"], plan, words), quiet=given["quiet"])
    if given["check"]:
        plan_print.check([plan])


def cards_of(context: click.Context) -> Cards:
    given = context.params
    return Cards(given["gpus"], given["gpu"], given["link"], given["network"], given["others"])


def _is_typed(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_options(context: click.Context, alone: tuple[str, ...]) -> None:
    """Nothing; raises UserError for options that do not go with several cards. `alone`: those of one card."""
    for name in alone:
        if _is_typed(context, name):
            raise UserError("usage.cluster_alone", option=f"--{name.replace('_', '-')}")
    if context.params["trainer"] not in ("", "foretrain"):
        raise UserError("usage.cluster_trainer", value=context.params["trainer"][:40])
    if _is_typed(context, "gpu") and (not context.params["gpus"].strip().isdigit() or "," in context.params["gpu"]):
        raise UserError("usage.cluster_two", gpus=context.params["gpus"][:80], gpu=context.params["gpu"][:80])


def asked_of(context: click.Context, words: list[str], command: str = "plan") -> Asked:
    given = context.params
    cards = tuple(word for name in CARDS if given[name] for word in (f"--{name}", given[name]))
    return Asked(
        command=command, words=tuple(words), gpu=given["gpu"], cards=cards, others=given["others"],
        quiet=given["quiet"], price=given["price"] or "",
    )  # fmt: skip

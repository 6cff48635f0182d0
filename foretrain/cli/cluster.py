"""`foretrain plan CONFIG --gpus "2 x RTX 4090"`: parse, plan, print."""

import click

from foretrain.advice.asked import Asked
from foretrain.app.limits import Limits, check_limits
from foretrain.app.ranks.job_files import JOB_KINDS, write_job
from foretrain.app.ranks.plan import answer, traced_cluster
from foretrain.base.errors import UserError
from foretrain.cli.asked_elsewhere import cards_of, check_cards, is_typed, typed_cards
from foretrain.cli.common import need_one_of, print_notes
from foretrain.cli.planning import exact as plan_exact
from foretrain.cli.planning import limits as plan_limits
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import Depth, print_largest, progress
from foretrain.cli.planning.limits import tell_written
from foretrain.cli.show_config import show_config_of
from foretrain.config.resolve import resolve
from foretrain.predict.largest import largest
from foretrain.predict.pretraining import of_cluster
from foretrain.predict.ranks import rank_of
from foretrain.predict.trace import interpreter

# Those that such a plan cannot have.
ALONE = ("logged_mfu",)


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
    names = ("price", "co2", "within", "tokens", "best", "data_tokens", "write")
    limits = Limits(**{name: given[name] for name in names}, given=frozenset(resolved.sources))
    traces = given["exact"] or bool(given["python"]) or given["snapshot"] is not None
    if given["largest"] and traces:
        raise UserError("usage.finetune_largest_alone", option="--exact")
    check_limits(limits, 1, traces or bool(given["largest"]))
    depth = Depth(**{name: given[name] for name in Depth.__dataclass_fields__})
    plan_exact.check_depth(depth, resolved.files)
    plan = answer(resolved, cards_of(given), limits, given["step_time"])
    plan_exact.check_readings(depth, [plan.gpu])
    if traces:
        with progress(given["quiet"]) as listen:
            plan = traced_cluster(plan, listen, given["python"], given["alloc_conf"])
    form = plan_print.Form(given["full"], given["oneline"], given["as_json"], asked_of(context, words))
    form.check(elsewhere="--explain" if depth.explain else "")
    with interpreter.use_interpreter(given["python"]):
        plan_exact.look_deeper(rank_of(plan), "foretrain", depth, as_json=form.as_json)
    if given["largest"]:
        print_largest(plan.one_card, largest(of_cluster(plan), given["largest"]), as_json=given["as_json"])
    elif limits.asks:
        plan_limits.answer(plan, limits, form)
    elif not depth.explain:
        plan_print.plans([plan], form)
    if given["write_job"]:
        tell_written(write_job(given["write_job"], plan, words), quiet=given["quiet"])
    if given["check"] and not limits.best:
        plan_print.check([plan])


def check_options(context: click.Context, alone: tuple[str, ...]) -> None:
    """Nothing; raises UserError for options that do not go with several cards. `alone`: those of one card."""
    for name in alone:
        if is_typed(context, name):
            raise UserError("usage.cluster_alone", option=f"--{name.replace('_', '-')}")
    if context.params["trainer"] not in ("", "foretrain"):
        raise UserError("usage.cluster_trainer", value=context.params["trainer"][:40])
    check_cards(context)


def asked_of(context: click.Context, words: list[str], command: str = "plan") -> Asked:
    given = context.params
    return Asked(
        command=command, words=tuple(words), gpu=given["gpu"], cards=typed_cards(given), others=given["others"],
        quiet=given["quiet"], price=given["price"] or "",
    )  # fmt: skip

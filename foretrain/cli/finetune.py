"""`foretrain plan` of a Hugging Face model: `hf:owner/name`, a folder with config.json, a trainer's YAML, a preset."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from foretrain.advice.asked import Asked
from foretrain.app.exact import settings_of
from foretrain.app.finetune import traced
from foretrain.app.finetuning import explain
from foretrain.app.finetuning import limits as limits_of
from foretrain.app.finetuning.question import FineTuneQuestion, question
from foretrain.app.limits import Limits
from foretrain.app.plan import words_of_cards
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.cli.asked_elsewhere import cards_of, check_cards, is_typed, typed_cards
from foretrain.cli.common import ERR, OUT, print_json, print_said, working
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import (
    EXPLAIN_SCHEMA,
    LARGEST_SCHEMA,
    Depth,
    check_depth,
    check_readings,
    progress,
    size_of,
)
from foretrain.cli.show_config import show_finetune
from foretrain.config.finetune.asked import how_chosen, is_asked
from foretrain.config.finetune.words import WORDS
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.finetuning import of_plan
from foretrain.predict.largest import Largest, largest
from foretrain.predict.trace import interpreter
from foretrain.reports import text
from foretrain.reports.views.finetune import limits as limits_view
from foretrain.reports.views.finetune import whole as whole_view

LIMITS = ("co2", "within", "tokens", "data_tokens")  # options of `plan` that a plan of a changed run has as well
TRACES = ("alloc_conf", "python")  # and those of its trace


def asked_about(context: click.Context, words: list[str]) -> bool:
    """Whether these words ask about a fine-tuning run. Which of the two was taken, where both could be, is printed."""
    print_said(how_chosen(words), quiet=context.params["quiet"])
    return is_asked(words)


def read(context: click.Context, words: list[str], refused: Mapping[str, str]) -> FineTuneQuestion:
    """What is asked, with its notes printed. `refused`: options of the command that a fine-tuning run cannot have, each
    with the id of the sentence that says what to take instead. Raises UserError."""
    for name, id in refused.items():
        if is_typed(context, name):
            raise UserError(f"usage.finetune_without.{id}")
    found = question(words[0], words[1:])
    said = [note for note in found.notes if note.id != "finetune_read_as"]  # which the answer itself says
    print_said(said, quiet=context.params["quiet"] or bool(context.params.get("full")))
    return found


def card_and_words(context: click.Context) -> tuple[str, list[str]]:
    """Return the card of --gpu or --gpus, and how many train together as words of the run. Raises UserError."""
    check_cards(context)
    return words_of_cards(cards_of(context.params), context.params["words"], WORDS)


def asked_with(given: Mapping[str, Any], words: list[str], command: str = "plan") -> Asked:
    """What was typed, for the command that comes next: it goes on with what was said of the run, its card and money."""
    limits = [word for name in LIMITS if given.get(name) is not None for word in _typed(name, given[name])]
    limits += [word for name in TRACES if given.get(name) for word in _typed(name, given[name])]
    return Asked(
        command=command, words=tuple(words), gpu=given["gpu"], cards=typed_cards(given), others=given["others"],
        quiet=given["quiet"], price=given["price"] or "", exact=given["exact"], limits=tuple(limits),
    )  # fmt: skip


def _typed(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Options:
    """The options of `plan`, as they were typed."""

    step_s: float | None
    largest: str
    python: str
    limits: Limits
    depth: Depth
    form: plan_print.Form

    @classmethod
    def of(cls, given: Mapping[str, Any], words: list[str]) -> "Options":
        """From the parameters of the command."""
        limits = Limits(given["price"], given["co2"], given["within"], given["tokens"])
        exact = given["exact"] or bool(given["python"])
        depth = Depth(exact, **{name: given[name] for name in Depth.__dataclass_fields__ if name != "exact"})
        asked = asked_with(given, words)
        form = plan_print.Form(given["full"], given["oneline"], given["as_json"], asked)
        return cls(given["step_time"], given["largest"], given["python"], limits, depth, form)

    def checked(self, plans: list[FineTunePlan]) -> None:
        """Nothing; raises UserError for options that do not go together."""
        depth, limits, count = self.depth, self.limits, len(plans)
        looks = "--explain" if depth.explain else "--snapshot" if depth.snapshot is not None else ""
        elsewhere = "--explain" if depth.explain else "--largest" if self.largest and not limits.asks else ""
        self.form.check(elsewhere=elsewhere)
        check_depth(depth, ())
        check_readings(depth, [plan.gpu for plan in plans])
        if limits.asks and looks:
            raise UserError("usage.finetune_limit_alone", option=looks)
        if (self.largest or looks) and count > 1:
            raise UserError("usage.one_card", count=count)
        if self.step_s is not None and count > 1:
            raise UserError("usage.one_speed", option="--step-time", count=count)
        if self.largest and (self.step_s is not None or depth.exact):
            raise UserError("usage.finetune_largest_alone", option="--exact" if depth.exact else "--step-time")


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
        print_json(explanation.to_json(schema=EXPLAIN_SCHEMA))
    else:
        text.render(whole_view.explain_document(plan, explanation), OUT)


def print_largest(plan: FineTunePlan, found: Largest, form: plan_print.Form) -> None:
    """The largest value of an option that fits."""
    if form.as_json:
        print_json(found.to_json(schema=LARGEST_SCHEMA))
    else:
        plan_print.line(limits_view.largest(plan, found))


# Options of `plan` that a fine-tuning plan cannot have, each with a sentence that says what to take instead.
REFUSED = {
    **{name: name for name in ("trainer", "logged_mfu", "best", "write")},
}


def answered(context: click.Context, words: list[str]) -> bool:
    """Whether a fine-tuning run was asked about; then it is answered. Raises UserError."""
    asked = asked_about(context, words)
    if asked:
        _answer(context, words)
    return asked


def _answer(context: click.Context, words: list[str]) -> None:
    """Print the plan, in the form that the options of `plan` ask for. Raises UserError."""
    given = context.params
    data = [f"--dataset-tokens={given['data_tokens']}"] if given["data_tokens"] else []
    gpu, cards = card_and_words(context)
    found = read(context, [*words, *data, *cards], REFUSED)
    options = Options.of(given, words)
    if given["show_config"]:
        show_finetune(found, given["as_json"])
        return
    plans = limits_of.plans(found, gpu, given["others"], options.limits, options.step_s)
    options.checked(plans)
    plans = _answered(plans, found, options)
    if given["check"]:
        plan_print.check(plans)


def _answered(plans: list[FineTunePlan], found: FineTuneQuestion, options: Options) -> list[FineTunePlan]:
    """What was asked, printed; the plans that --check is about."""
    depth, limits, form = options.depth, options.limits, options.form
    searched = largest(of_plan(plans[0]), options.largest) if options.largest else None
    if searched is not None:
        plans = [replanned(plans[0], **{searched.option: searched.value}) if searched.value else plans[0]]
    if searched is not None and (searched.value is None or not limits.asks):
        print_largest(plans[0], searched, form)
        return plans
    plans = deepened(plans, found, depth, options.python)
    if depth.explain:
        explain_command(plans[0], found, depth, options.python, as_json=form.as_json)
    elif limits.asks and len(plans) == 1:
        plan_print.within(plans[0], limits_of.within(plans[0], limits), form, searched)
    else:
        plan_print.plans(plans, form, limits_of.cards(plans, limits) if len(plans) > 1 else None)
    return plans

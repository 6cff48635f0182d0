"""The options of `foretrain plan` as a fine-tuning plan takes them, and which of them do not go together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from foretrain.advice.asked import Asked
from foretrain.app.finetuning.question import FineTuneQuestion, question
from foretrain.app.limits import Limits
from foretrain.base.errors import UserError
from foretrain.cli.common import print_said
from foretrain.cli.planning.exact import Depth, check_depth, check_readings
from foretrain.cli.planning.printing import Form
from foretrain.config.finetune.asked import how_chosen, is_asked
from foretrain.predict.finetune.plan import FineTunePlan

LIMITS = ("co2", "within", "tokens", "data_tokens")  # options of `plan` that a plan of a changed run has as well
TRACES = ("alloc_conf", "python")  # and those of its trace


def asked_about(context: typer.Context, words: list[str]) -> bool:
    """Whether these words ask about a fine-tuning run. Which of the two was taken, where both could be, is printed."""
    print_said(how_chosen(words), quiet=context.params["quiet"])
    return is_asked(words)


def read(context: typer.Context, words: list[str], refused: Mapping[str, str]) -> FineTuneQuestion:
    """What is asked, with its notes printed. `refused`: options of the command that a fine-tuning run cannot have, each
    with the id of the sentence that says what to take instead. Raises UserError."""
    for name, id in refused.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"usage.finetune_without.{id}")
    found = question(words[0], words[1:])
    said = [note for note in found.notes if note.id != "finetune_read_as"]  # which the answer itself says
    print_said(said, quiet=context.params["quiet"] or bool(context.params.get("full")))
    return found


def asked_with(given: Mapping[str, Any], words: list[str], command: str = "plan") -> Asked:
    """What was typed, for the command that comes next: it goes on with what was said of the run, its card and money."""
    limits = [word for name in LIMITS if given.get(name) is not None for word in _typed(name, given[name])]
    limits += [word for name in TRACES if given.get(name) for word in _typed(name, given[name])]
    return Asked(
        command=command, words=tuple(words), gpu=given["gpu"], others=given["others"], quiet=given["quiet"],
        price=given["price"] or "", exact=given["exact"], limits=tuple(limits),
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
    form: Form

    @classmethod
    def of(cls, given: Mapping[str, Any], words: list[str]) -> "Options":
        """From the parameters of the command."""
        limits = Limits(given["price"], given["co2"], given["within"], given["tokens"])
        exact = given["exact"] or bool(given["python"])
        depth = Depth(exact, **{name: given[name] for name in Depth.__dataclass_fields__ if name != "exact"})
        asked = asked_with(given, words)
        form = Form(given["full"], given["oneline"], given["as_json"], asked)
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

"""The answer of `foretrain plan`: which question its options ask of a run's forecasts."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretrain.advice.asked import Asked
from foretrain.app.job_files import JOB_KINDS, write_job
from foretrain.app.limits import Limits
from foretrain.app.request import Request
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import say
from foretrain.cli import printing, reading
from foretrain.cli.common import ERR, need_one_of, print_notes, working
from foretrain.hardware.catalogue import catalogue, stated_bytes
from foretrain.predict.allocator.settings import driver_backend
from foretrain.predict.forecast import AnyPlan, Forecast
from foretrain.predict.largest import Largest, largest, smallest_card
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.trace import interpreter
from foretrain.predict.within import within

if TYPE_CHECKING:
    from foretrain.advice import best as models
    from foretrain.app import exact
    from foretrain.app import finetune as tuning
    from foretrain.app import training_script as script
else:  # an answer does not wait for what another one needs
    exact, models = Later("foretrain.app.exact"), Later("foretrain.advice.best")
    tuning, script = Later("foretrain.app.finetune"), Later("foretrain.app.training_script")


@dataclass(frozen=True)
class Options:
    """The options of `plan` that say what is asked, how deep to look, and in which form to answer."""

    full: bool
    oneline: bool
    as_json: bool
    quiet: bool
    exact: bool
    explain: bool
    observed: str
    process: str
    largest: str
    smallest_card: bool
    snapshot: Path | None
    alloc_conf: str
    python: str
    step_time: float | None
    logged_mfu: float | None
    check: bool
    write_job: str
    write_script: Path | None

    @classmethod
    def of(cls, context: click.Context) -> "Options":
        return cls(**{field.name: context.params[field.name] for field in fields(cls)})

    @property
    def traces(self) -> bool:
        return self.exact or bool(self.python) or self.snapshot is not None

    @property
    def looks(self) -> str:
        return "--explain" if self.explain else "--snapshot" if self.snapshot is not None else ""

    @property
    def readings(self) -> tuple[int | None, int | None]:
        named = (("--observed", self.observed), ("--process", self.process))
        observed, process = (stated_bytes(value, option) if value else None for option, value in named)
        return observed, process

    def check_form(self, limits: Limits) -> None:
        """Raise UserError where more than one form was asked for, or one that the answer has not."""
        elsewhere = "--explain" if self.explain else "--largest" if self.largest and not limits.asks else ""
        wanted = [f"--{name}" for name in ("full", "oneline") if getattr(self, name)]
        if len(wanted) > 1 or (wanted == ["--oneline"] and self.as_json):
            raise UserError("usage.two_forms", options=[*wanted, *(["--json"] if self.as_json else [])])
        if self.oneline and elsewhere:
            raise UserError("usage.no_line", option=elsewhere)

    def check_depth(self, request: Request, limits: Limits) -> None:
        """Raise UserError for what is wrong with these options, before any trace."""
        if self.traces or self.explain or self.alloc_conf:
            exact.settings_of(alloc_conf=self.alloc_conf)
        warn_of_backend(self.alloc_conf, quiet=self.quiet)
        if (self.observed or self.process) and not self.explain:
            raise UserError("usage.needs_explain", option="--observed" if self.observed else "--process")
        if self.largest and self.looks:
            raise UserError("usage.largest_alone", option=self.looks)
        if self.snapshot is not None:
            exact.check_snapshot(self.snapshot, request.files)
        request.check(limits, look=self.looks, traced=self.traces, largest=self.largest)
        if self.write_job:
            need_one_of("--write-job", self.write_job, tuple(JOB_KINDS))

    def check_plans(self, made: list[Forecast], limits: Limits) -> None:
        """Raise UserError for what can only be asked of one card, and for impossible readings."""
        if self.observed or self.process:
            exact.check_readings(*self.readings, [found.plan.gpu for found in made])
        alone = self.write_job or self.write_script or (self.largest and (self.as_json or limits.asks))
        if (self.looks or self.smallest_card or alone) and len(made) > 1:
            raise UserError("usage.one_card", count=len(made))


def warn_of_backend(alloc_conf: str, *, quiet: bool) -> None:
    variable = driver_backend(os.environ)
    if variable and not alloc_conf:
        print_notes((UserError("config.native_allocator", variable=variable),), quiet=quiet)


def answer(context: click.Context, request: Request, words: list[str]) -> None:
    """Print the answer to what the options of `plan` ask for. Raises UserError."""
    given = context.params
    limits = Limits(
        **{name: given[name] for name in ("price", "co2", "within", "tokens", "best", "data_tokens", "write")}
    )
    if given["show_config"]:
        printing.show_config(request, limits, given["as_json"])
        return
    options, asked = Options.of(context), reading.asked_of(context, request, words)
    options.check_form(limits)
    options.check_depth(request, limits)
    with interpreter.use_interpreter(options.python):
        made = request.forecasts(limits, options.step_time, options.logged_mfu)
        options.check_plans(made, limits)
        answered, found = _answered(request, made, limits, options, asked)
    plan: Any = made[0].plan
    if options.write_script:
        assert isinstance(request, tuning.FineTuningRequest)
        script.write_script(options.write_script, plan, request.asked, words, printing.command_of(asked))
        printing.tell_written(options.write_script, quiet=options.quiet)
    if options.write_job:
        printing.tell_written(write_job(options.write_job, plan, words), quiet=options.quiet)
    if options.check and found is not None and found.value is None:
        option, name = options.largest, request.name
        printing.exit_with(UserError("check.largest_nothing", option=option, name=name, gpu=plan.place))
    if options.check and not limits.best:
        printing.check(answered)


def _answered(
    request: Request, made: list[Forecast], limits: Limits, options: Options, asked: Asked
) -> tuple[list[AnyPlan], Largest | None]:
    """Print what was asked; return the plans that --check is about, and what --largest found."""
    found = None
    if options.smallest_card:
        cards = [gpu for gpu in catalogue().values() if gpu.kind == "cuda"]
        with working(say("working.searching"), quiet=options.quiet) as tell:
            smallest = smallest_card(made[0], cards, tell)
        printing.smallest(made[0].plan, smallest, options)
        return [], found
    if options.largest:
        for each in made:
            found = _largest(request, each, options)
            if found.value is None or not limits.asks:
                printing.largest(each.plan, found, options)
        if found is None or found.value is None or not limits.asks:
            return [], found
        made = [tuning.changed(made[0], **{found.option: found.value})]
    if options.traces or (options.explain and request.kind == "pretraining"):
        made = _traced(made, options)
    plans = [each.plan for each in made]
    if options.explain:
        with reading.progress(options.quiet) as listen:
            explanation = exact.explained(made[0], listen, options.alloc_conf, *options.readings)
        printing.explanation(explanation, plans[0], options)
    elif limits.best:
        _best(request, plans[0], limits, options, asked)
    elif limits.asks and len(made) == 1:
        answer = within(made[0], limits.limit())
        if limits.write is not None:
            printing.write_steps(plans[0], answer, limits.write, asked)
        printing.within(plans[0], answer, options, asked, found)
    else:
        printing.plans(plans, options, limits, asked)
    return plans, found


def _largest(request: Request, found: Forecast, options: Options) -> Largest:
    """Return the largest value of an option that fits, by traces with --exact."""
    option = request.aliases.get(options.largest, options.largest)
    if not options.exact:
        return largest(found, option)
    with reading.progress(options.quiet) as listen:
        return exact.largest(found, option, listen, options.alloc_conf)


def _traced(made: list[Forecast], options: Options) -> list[Forecast]:
    """Return the forecasts with traced memory; the snapshot is written."""
    with reading.progress(options.quiet) as listen:
        made = [exact.traced(found, listen, options.alloc_conf) for found in made]
    if options.snapshot is not None:
        with working(say("working.writing", path=str(options.snapshot)), quiet=options.quiet):
            exact.write_snapshot(made[0], options.snapshot, lambda state: None, options.alloc_conf)
        if not options.quiet:
            ERR.print(say("exact.snapshot", path=str(options.snapshot)), soft_wrap=True)
    return made


def _best(request: Request, plan: AnyPlan, limits: Limits, options: Options, asked: Asked) -> None:
    assert isinstance(plan, Plan | ClusterPlan)
    if plan.timing is not None and plan.timing.source.startswith("measured"):
        raise UserError("usage.best_speed")
    step = plan.step if isinstance(plan, Plan) else "foretrain"
    with working(say("best.searching", share=0.0), quiet=options.quiet) as show:
        tell = lambda done, of: show(say("best.searching", share=done / of))  # noqa: E731
        best = models.best(plan, limits.limit(), step, request.given, tell)
    if limits.write is not None:
        printing.write_config(best.candidates[0].config, limits.write, asked)
    printing.best(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, best, options, asked)

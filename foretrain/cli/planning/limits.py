"""What `foretrain plan` shows of limits: progress, the answer, and the config that --write writes."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.app import kept_answers as kept_advice
from foretrain.app.limits import Limits
from foretrain.base.messages import printable, say
from foretrain.cli.common import ERR
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.printing import Form
from foretrain.config import writer as config_writer
from foretrain.config.options import RunConfig
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.largest import Largest
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.within import Within, within


def write_config(config: RunConfig, path: Path, asked: Asked, before: dict[str, str] | None = None) -> None:
    """The config as a file that `plan` and `train` read: what differs from the defaults, and where it is from."""
    config_writer.write_text(config_writer.short_toml(config, origin(asked), before), path)
    tell_written(path, quiet=asked.quiet)


def origin(asked: Asked) -> tuple[str, ...]:
    """What a written file says of where it is from."""
    command = shlex.join(("foretrain", asked.command, *asked.words, *asked.card_options()))
    return (say("written.origin", command=command, version=version("foretrain")),)


def tell_written(path: Path, *, quiet: bool) -> None:
    if not quiet:
        ERR.print(printable(say("within.written", path=str(path))), soft_wrap=True, markup=False)


def write_steps(plan: Plan | ClusterPlan, found: Within, path: Path, asked: Asked) -> None:
    """The config of a plan with the steps that fit in a limit, as a file."""
    assert not isinstance(found.plan, FineTunePlan)
    before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in found.changed}
    write_config(found.plan.config, path, asked, before)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that counts; nothing where nobody watches."""
    if quiet or not ERR.is_terminal:
        yield lambda done, of: None
        return
    with ERR.status(say("best.searching", share=0.0)) as status:
        yield lambda done, of: status.update(say("best.searching", share=done / of))


def answer(request: Any, plan: AnyPlan, limits: Limits, form: Form, largest: Largest | None = None) -> None:
    """Answer the inverse question that was asked. `largest`: what --largest found before."""
    if limits.best:
        assert isinstance(plan, Plan | ClusterPlan)
        with _progress(form.asked.quiet) as listen:
            best = kept_advice.best(plan, limits, listen)
        if limits.write is not None:
            write_config(best.candidates[0].config, limits.write, form.asked)
        plan_print.best(rank_of(plan) if isinstance(plan, ClusterPlan) else plan, best, form)
        return
    found = within(request.forecast(plan), limits.limit())
    if limits.write is not None:
        assert isinstance(plan, Plan | ClusterPlan)
        write_steps(plan, found, limits.write, form.asked)
    plan_print.within(plan, found, form, largest)

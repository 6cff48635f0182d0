"""What `foretrain plan` does about money and limits: --price, --co2, --within, --tokens, --best, --write."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from foretrain.advice.asked import Asked
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.quantities import Limit, currency_code, parse_count, parse_limit, parse_price
from foretrain.cli.commands import plan_print
from foretrain.cli.commands.plan_print import Form
from foretrain.cli.common import ERR
from foretrain.config import writer as config_writer
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.catalogue import Gpu, find
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The options of `plan` about money and limits, as they were typed."""

    price: str | None = None
    co2: float | None = None
    within: str | None = None
    tokens: str | None = None
    best: bool = False
    data_tokens: str | None = None
    write: Path | None = None
    given: frozenset[str] = frozenset()  # knobs that the user set, in a file or on the command line

    @property
    def asks(self) -> bool:
        """Whether an inverse question is asked instead of a plan."""
        return self.best or self.within is not None or self.tokens is not None

    def limit(self) -> Limit:
        if self.tokens is not None:
            count = _read(parse_count, self.tokens, "--tokens", "usage.bad_count")
            return Limit(kind="tokens", amount=count, text=self.tokens)
        return _read(parse_limit, self.within or "", "--within", "usage.bad_limit")


def _read(parse: Callable[[str], T], text: str, option: str, id: str) -> T:
    """What a parser makes of an option's text; its ValueError as a sentence."""
    try:
        return parse(text)
    except ValueError:
        raise UserError(id, option=option, value=text[:80]) from None


def check_limits(limits: Limits, targets: int, traces: bool) -> None:
    """What can be wrong with these options, before anything is computed. Raises UserError."""
    if limits.asks and traces:
        raise UserError("usage.two_questions")
    if limits.within is not None and limits.tokens is not None:
        raise UserError("usage.two_limits")
    if limits.asks and targets > 1:
        raise UserError("usage.one_card_limits", count=targets)
    if limits.best and limits.within is None:
        raise UserError("usage.best_within")
    if limits.write is not None:
        if not limits.asks:
            raise UserError("usage.write_nothing")
        check_writable(limits.write)
    if limits.asks:
        limits.limit()


def check_writable(path: Path, *, python: bool = False) -> None:
    """Whether a config can be written there; `python`: as nanoGPT's .py too. Raises UserError."""
    if path.suffix == ".py" and python:
        pass
    elif path.suffix != ".toml":
        raise UserError("usage.cannot_write_file", path=str(path), reason="its name must end in .toml")
    if not path.parent.is_dir():
        raise UserError("usage.cannot_write_file", path=str(path), reason="its folder is not there")
    if path.exists():
        raise UserError("usage.cannot_write_file", path=str(path), reason="it is there already; give another name")


def priced(resolved: ResolvedConfig, limits: Limits) -> ResolvedConfig:
    """The config with --price (where it is one price for all cards), --co2 and --data-tokens put into their knobs."""
    update: dict[str, Any] = {}
    sources = dict(resolved.sources)
    if limits.price is not None and "=" not in limits.price:
        if resolved.sources.get("price_per_kwh", "").startswith("--"):
            raise UserError("usage.price_and_power")
        update["price_per_hour"] = _price(limits.price, limits.price, resolved.config)
        sources["price_per_hour"] = f"--price {limits.price}"
    if limits.co2 is not None:
        if not 0 < limits.co2 <= 1e5:
            raise UserError("usage.bad_co2", value=limits.co2)
        update["co2_per_kwh"] = limits.co2
        sources["co2_per_kwh"] = f"--co2 {limits.co2:g}"
    if limits.data_tokens is not None:
        update["dataset_tokens"] = _read(parse_count, limits.data_tokens, "--data-tokens", "usage.bad_count")
        sources["dataset_tokens"] = f"--data-tokens {limits.data_tokens}"
    return replace(resolved, config=resolved.config.model_copy(update=update), sources=sources)


def _price(text: str, typed: str, config: RunConfig) -> float:
    """The price in a text, which is all or a part of what was typed."""
    try:
        money = parse_price(text)
    except ValueError:
        raise UserError("usage.bad_price", option="--price", value=typed[:80]) from None
    if money.currency and money.currency != currency_code(config.currency):
        raise UserError("usage.currency", text=f"--price {typed[:80]}", typed=money.currency, currency=config.currency)
    return money.amount


def _is(name: str, gpu: Gpu) -> bool:
    """Whether a card goes by this name; a name of several cards is meant for each of them."""
    if name.lower() == "cpu":
        return gpu.kind == "cpu"
    try:
        return find(name).name == gpu.name
    except UserError as error:
        return gpu.name in error.values.get("choices", ())


def prices_of(limits: Limits, config: RunConfig, gpus: list[Gpu]) -> list[float]:
    """The rent of each card, from --price \"4090=0.35,A100=1.2\"; the config's own where none is given."""
    found = [config.price_per_hour] * len(gpus)
    if limits.price is None or "=" not in limits.price:
        return found
    for part in limits.price.split(","):
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise UserError("usage.bad_price", option="--price", value=limits.price[:80])
        hit = [i for i, gpu in enumerate(gpus) if _is(name.strip(), gpu)]
        if not hit:
            raise UserError("usage.price_of_no_card", name=name.strip()[:80], cards=[gpu.name for gpu in gpus])
        for i in hit:
            found[i] = _price(text.strip(), limits.price, config)
    return found


def write_config(config: RunConfig, path: Path, asked: Asked, before: dict[str, str] | None = None) -> None:
    """The config as a file that `plan` and `train` read: what differs from the defaults, and where it is from."""
    config_writer.write_text(config_writer.short_toml(config, origin(asked), before), path)
    tell_written(path, quiet=asked.quiet)


def origin(asked: Asked) -> tuple[str, ...]:
    """What a written file says of where it is from."""
    command = shlex.join(("foretrain", asked.command, *asked.words, *asked.card_options()))
    return (say("written.origin", command=command, version=version("foretrain")),)


def tell_written(path: Path, *, quiet: bool) -> None:
    """A line on stderr."""
    if not quiet:
        ERR.print(printable(say("within.written", path=str(path))), soft_wrap=True, markup=False)


def within_command(plan: Plan, step: StepName, limits: Limits, form: Form) -> None:
    """Answer --within and --tokens."""
    from foretrain.predict.within import within

    found = within(plan, limits.limit(), step)
    if limits.write is not None:
        before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in found.changed}
        write_config(found.config, limits.write, form.asked, before)
    plan_print.within(plan, found, form)


def answer(plan: Plan, step: StepName, limits: Limits, form: Form) -> None:
    """Answer the inverse question that was asked."""
    command = best_command if limits.best else within_command
    command(plan, step, limits, form)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that counts; nothing where nobody watches."""
    if quiet or not ERR.is_terminal:
        yield lambda done, of: None
        return
    with ERR.status(say("best.searching", share=0.0)) as status:
        yield lambda done, of: status.update(say("best.searching", share=done / of))


def best_command(plan: Plan, step: StepName, limits: Limits, form: Form) -> None:
    """Answer --best."""
    from foretrain.advice.best import best

    if plan.timing is not None and plan.timing.source.startswith("measured"):
        raise UserError("usage.best_speed")
    with _progress(form.asked.quiet) as listen:
        found = best(plan, limits.limit(), step, limits.given, listen)
    if limits.write is not None:
        write_config(found.candidates[0].config, limits.write, form.asked)
    plan_print.best(plan, found, form)

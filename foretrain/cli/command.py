"""A command as click has it: how options and arguments are declared, and what all commands share, such as `--lang`."""

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from foretrain.base.errors import ConfigError, UserError
from foretrain.base.installation import GPU_FILE_VARIABLE, Later
from foretrain.cli import common, completion
from foretrain.cli.common import own_words, wrong_value

config, hardware = Later("foretrain.config.resolve"), Later("foretrain.hardware.catalogue")
shown = Later("foretrain.cli.help")
_UNKNOWN = ("config.unknown_key", "config.unknown_key_near")
_CLOSE = 0.1  # what is this much less like it than the best is not named


def sentence(error: click.UsageError, ctx: click.Context) -> UserError:
    command, params = ctx.command_path, ctx.command.get_params(ctx)
    if isinstance(error, click.NoSuchOption):
        near = nearest(error.option_name, _spellings(params))
        id = "usage.no_such_option_near" if near else "usage.no_such_option"
        return UserError(id, near=near, option=error.option_name, command=command)
    if isinstance(error, click.BadOptionUsage):
        flags = [param for param in params if isinstance(param, click.Option) and param.is_flag]
        id = "usage.takes_no_value" if error.option_name in _spellings(flags) else "usage.requires_argument"
        return UserError(id, option=error.option_name, command=command)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        if isinstance(error.param, click.Option):
            return UserError("usage.missing", what=error.param.opts[0], command=command)
        return UserError("usage.missing", what=error.param.human_readable_name, command=command)
    return UserError("usage.other", text=error.format_message(), command=command)


def no_such_command(name: str, names: Sequence[str], ctx: click.Context) -> UserError:
    if name == "help":
        return UserError("usage.help_command", name=name, command=ctx.find_root().command_path)
    near = difflib.get_close_matches(name, names)
    id = "usage.no_such_command_near" if near else "usage.no_such_command"
    return UserError(id, near=near, name=name, command=ctx.command_path)


def of_an_option(problem: UserError, ctx: click.Context) -> UserError:
    """Return the same as an unknown option: commands hand what they do not know on to the config."""
    option = str(problem.values.get("source", "")).partition("=")[0].partition(" ")[0]
    typed = option.startswith("-") and any(word.partition("=")[0] == option for word in own_words())
    if problem.id not in _UNKNOWN or not typed:
        return problem
    known = [f"--{name}" for name in (*config.OPTIONS, *config.ALIASES)]
    near = nearest(option, _spellings(ctx.command.get_params(ctx)) + known)
    id = "config.no_such_option_near" if near else "config.no_such_option"
    return UserError(id, option=option, near=near, command=ctx.command_path)


def _spellings(params: Sequence[click.Parameter]) -> list[str]:
    return [word for param in params for word in param.opts]


def nearest(option: str, spellings: Sequence[str]) -> list[str]:
    typed = _squeezed(option)
    alike = {word: _likeness(typed, _squeezed(word)) for word in spellings if word.startswith("--")}
    best = max(alike.values())
    found = [word for word in alike if alike[word] >= max(0.6, best - _CLOSE)]
    return sorted(found, key=lambda word: -alike[word])[:3]


def _squeezed(option: str) -> str:
    return option.lstrip("-").replace("-", "").replace("_", "").lower()


def _likeness(typed: str, name: str) -> float:
    """From 0 to 1; the beginning of a name is much like it."""
    begins = 0.8 if len(typed) >= 3 and name.startswith(typed) else 0.0
    return max(begins, difflib.SequenceMatcher(None, typed, name).ratio())


Declaration = Callable[[Any], Any]

# Commands that take a card, beside those with --gpu.
TAKE_A_CARD = ("gpus", "serve", "train", "demo", "calibrate")
# Unknown options go, in their order, to the config: --batch_size=8, --batch-size 8, --compile.
OF_CONFIG = {"ignore_unknown_options": True}


class Number(click.ParamType):
    """A number within limits. A wrong one is refused in a sentence of ours, not in one of click's."""

    def __init__(self, kind: type, low: float | None, high: float | None) -> None:
        self.kind, self.low, self.high = kind, low, high
        self.is_range = low is not None or high is not None
        self.name = f"{kind.__name__} range" if self.is_range else kind.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = param.opts[0] if param else ""
        try:
            number = self.kind(value)
        except ValueError:
            number = None
        if number is None or (number != number and self.is_range):  # nan is within no limits
            raise wrong_value(option, value, "whole_plain" if self.kind is int else "number_plain")
        if self.low is not None and number < self.low:
            raise wrong_value(option, value, "at_least", low=self.low)
        if self.high is not None and number > self.high:
            raise wrong_value(option, value, "at_most", high=self.high)
        return number


class Option(click.Option):
    """An option of a command. `group`: where the short help lists it; without one, only --help-all does."""

    def __init__(self, *words: Any, group: str = "", **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.group = group


def _kind(type: type, low: float | None = None, high: float | None = None) -> click.ParamType:
    if type in (int, float):
        return Number(type, low, high)
    return click.Path(path_type=Path) if type is Path else click.STRING


def _listed(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    return list(value)


def _settings(kind: click.ParamType, help: str, metavar: str, given: dict[str, Any]) -> dict[str, Any]:
    many = given.get("multiple") or given.get("nargs") == -1
    known = {"type": kind, "help": help, "metavar": metavar or None, "callback": _listed if many else None}
    # A default counts as a value, also if it is None.
    return known | given if given.get("required") else known | {"required": False, "default": None} | given


def option(
    words: str,
    help: str,
    *,
    name: str = "",
    type: type | None = None,
    low: float | None = None,
    high: float | None = None,
    **settings: Any,
) -> Declaration:
    """Declare an option of a command. `words`: its spelling, then what stands for its value in the help."""
    spelling, _, metavar = words.partition(" ")
    kind = type or (str if settings.get("default") is None else settings["default"].__class__)
    if spelling == "--gpu":
        settings["shell_complete"] = lambda ctx, param, incomplete: completion.cards(incomplete)
    declared = _settings(_kind(kind, low, high), help, metavar, settings)
    return click.option(*filter(None, (spelling, name)), cls=Option, **declared)


def flag(spelling: str, help: str, *, name: str = "", group: str = "") -> Declaration:
    words = filter(None, (spelling, name))
    return click.option(*words, cls=Option, is_flag=True, default=False, help=help, group=group)


def argument(words: str, help: str, *, type: type = str, **settings: Any) -> Declaration:
    """Declare an argument of a command. `words`: its name, then what stands for it in the help."""
    name, _, metavar = words.partition(" ")
    settings = {"required": settings.get("nargs") != -1} | settings
    return click.argument(name, **_settings(_kind(type), help, metavar, settings))


words_argument = argument(
    "words [CONFIG]... [--KEY=VALUE]...",
    "A preset, a TOML file, a nanoGPT config/*.py (parsed, never run), or - for stdin; later ones override earlier "
    "ones. Then any option of the config, such as --batch_size=8 or --batch-size 8.",
    nargs=-1,
    shell_complete=completion.configs,
)
json_option = flag(
    "--json", "Print one JSON object to stdout; everything else goes to stderr.", name="as_json", group="output"
)
quiet_option = flag("--quiet", "Print only results and errors.")
gpu_option = option(
    "--gpu CARD",
    "The card, such as 'RTX 4070'; 3060,4070 compares cards. cpu means this machine.",
    default="auto",
    group="card",
)
gpus_option = option(
    "--gpus CARDS",
    "Cards that train one model together, such as '2 x RTX 4090'. Or '2 nodes x 8 x A100'; a count alone is of each "
    "card of --gpu.",
    default="",
    group="card",
)
link_option = option(
    "--link NAME",
    "With --gpus: what connects the cards of a machine, such as pcie4x8 or nvlink. Default: what such cards usually "
    "have.",
    default="",
)
network_option = option(
    "--network NAME",
    "With --gpus: what connects the machines, such as 10GbE, ib-400 or '8 x ib-200'. Default: what such machines "
    "usually have.",
    default="",
)
others_option = option(
    "--used-by-others SIZE",
    "Memory used by other programs on the card, such as 2GB. On this machine's card foretrain measures it.",
    name="others",
    default="",
    group="card",
)
price_option = option(
    "--price PRICE",
    "Rent per hour of the card or machine, such as 0.35/h. Or '$0.35/h'; for several cards also "
    "'4090=0.35,A100=1.2'; with --gpus of each card. A rented card costs its rent and no electricity.",
    group="card",
)


def _choose_language(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        common.speak(value, "--lang")


def _choose_cards(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Child processes read the file, too. Raises UserError 'gpu.bad_file'."""
    if value is not None:
        os.environ[GPU_FILE_VARIABLE] = str(value.absolute())
        hardware.catalogue()


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(shown.shown(ctx.command, ctx, whole=True), color=ctx.color)
        ctx.exit()


def at_once(words: str, callback: Callable[..., None], help: str, type: type = str) -> click.Option:
    """Return an option that does its work before the command; a flag where nothing stands for a value in `words`."""
    spelling, _, metavar = words.partition(" ")
    value: dict[str, Any] = {"metavar": metavar, "type": _kind(type), "default": None} if metavar else {"is_flag": True}
    return click.Option([spelling], expose_value=False, is_eager=True, callback=callback, help=help, **value)


LANG = at_once(
    "--lang LANGUAGE",
    _choose_language,
    f"The language, such as ar; else {common.VARIABLE}, else en. `foretrain languages` lists them.",
)
GPU_FILE = at_once(
    "--gpu-file FILE",
    _choose_cards,
    f"A TOML file with cards of your own, written like gpus.toml; else {GPU_FILE_VARIABLE}.",
    Path,
)
HELP_ALL = at_once("--help-all", _show_all, "Show every option, of the config too, and exit.")


class Command(click.Command):
    """A command whose help is in the language that is spoken, and whose errors are sentences of ours."""

    allow_extra_args = True  # parse_args refuses them

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.params.append(LANG)
        if name in TAKE_A_CARD or any(each.name == "gpu" for each in self.params):
            self.params.append(GPU_FILE)
        if self.is_grouped:
            self.params.append(HELP_ALL)

    @property
    def is_grouped(self) -> bool:
        """Return whether --help lists what people use, and --help-all the rest."""
        return any(getattr(each, "group", "") in ("questions", "run") for each in self.params)

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["--help", "-h"]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(shown.shown(self, ctx))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            left = super().parse_args(ctx, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            common.speak_typed()
            raise sentence(error, ctx) from None
        if left and not ctx.resilient_parsing and not isinstance(self, click.Group):
            raise UserError("usage.extra_argument", words=" ".join(left), command=ctx.command_path)
        return left

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise ConfigError([of_an_option(problem, ctx) for problem in error.problems]) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        found = super().shell_complete(ctx, incomplete)
        if ctx.ignore_unknown_options and incomplete.startswith("-"):
            found += [CompletionItem(word) for word in completion.config_options(incomplete, self.name or "")]
        return found


class Group(Command, click.Group):
    command_class = Command

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(
            name,
            callback=_need_a_command,
            no_args_is_help=True,
            invoke_without_command=True,
            subcommand_metavar="COMMAND [ARGS]...",
            **settings,
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def summaries(self) -> dict[str, str]:
        return {name: each.help or "" for name, each in self.commands.items()}

    def heads(self) -> dict[str, str]:
        """Return {the first command of a group: the heading of that in the help}."""
        return {}

    def members(self) -> dict[str, click.Command]:
        ctx = click.Context(self)
        return {name: each for name in self.list_commands(ctx) if (each := self.get_command(ctx, name))}

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.list_commands(ctx) and not ctx.resilient_parsing:
            common.speak_typed()
            raise no_such_command(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        options = click.Command.shell_complete(self, ctx, incomplete)  # click's groups import all of their commands
        return [*completion.commands(self.summaries(), ctx, incomplete), *options]


@click.pass_context
def _need_a_command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        common.speak_typed()
        raise UserError("usage.missing_command", command=ctx.command_path)


def command(name: str, epilog: str, **settings: Any) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function, whose docstring says what it does. `settings`: of its context, as click has it."""
    return click.command(name, Command, epilog=epilog, context_settings=settings)

"""A command line that click refuses, as one sentence in the language that is spoken: what is wrong, and what to do."""

import difflib
from collections.abc import Sequence

import click

from foretrain.base.errors import UserError
from foretrain.cli.common import own_words
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ALIASES

_UNKNOWN = ("config.unknown_key", "config.unknown_key_near")
_CLOSE = 0.1  # what is this much less like it than the best is not named


def sentence(error: click.UsageError, ctx: click.Context) -> UserError:
    """What click found wrong while it read the words of a command."""
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
            return UserError("usage.missing_option", what=error.param.opts[0], command=command)
        return UserError("usage.missing_argument", what=error.param.human_readable_name, command=command)
    return UserError("usage.other", text=error.format_message(), command=command)


def no_such_command(name: str, names: Sequence[str], ctx: click.Context) -> UserError:
    if name == "help":
        return UserError("usage.help_command", name=name, command=ctx.find_root().command_path)
    near = difflib.get_close_matches(name, names)
    id = "usage.no_such_command_near" if near else "usage.no_such_command"
    return UserError(id, near=near, name=name, command=ctx.command_path)


def of_an_option(problem: UserError, ctx: click.Context) -> UserError:
    """The same, where it is about an unknown key of the config, said of a mistyped option of the command line.

    Commands hand what they do not know on to the config, which knows only its own options.
    """
    option = str(problem.values.get("source", "")).partition("=")[0].partition(" ")[0]
    typed = option.startswith("-") and any(word.partition("=")[0] == option for word in own_words())
    if problem.id not in _UNKNOWN or not typed:
        return problem
    near = nearest(option, [*_spellings(ctx.command.get_params(ctx)), *(f"--{name}" for name in (*OPTIONS, *ALIASES))])
    id = "config.no_such_option_near" if near else "config.no_such_option"
    return UserError(id, option=option, near=near, command=ctx.command_path)


def _spellings(params: Sequence[click.Parameter]) -> list[str]:
    return [word for param in params for word in param.opts]


def nearest(option: str, spellings: Sequence[str]) -> list[str]:
    """The options that look like this one, the most alike first, three at most."""
    typed = _squeezed(option)
    alike = {word: _likeness(typed, _squeezed(word)) for word in spellings if word.startswith("--")}
    best = max(alike.values())
    found = [word for word in alike if alike[word] >= max(0.6, best - _CLOSE)]
    return sorted(found, key=lambda word: -alike[word])[:3]


def _squeezed(option: str) -> str:
    """'--used-by-others' -> 'usedbyothers'."""
    return option.lstrip("-").replace("-", "").replace("_", "").lower()


def _likeness(typed: str, name: str) -> float:
    """From 0 to 1; the beginning of a name is much like it."""
    begins = 0.8 if len(typed) >= 3 and name.startswith(typed) else 0.0
    return max(begins, difflib.SequenceMatcher(None, typed, name).ratio())

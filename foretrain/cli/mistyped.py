"""A mistyped option of a command, said as one: with those that look like it, of the command and of the config.

Commands hand what they do not know on to the config (`CONFIG_CONTEXT`), which knows only its own options.
"""

import difflib
from functools import partial
from typing import Any

from foretrain.base.errors import ConfigError, UserError
from foretrain.cli.common import own_words
from foretrain.cli.old_options import OLD
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ALIASES

_UNKNOWN = ("config.unknown_key", "config.unknown_key_near")
_CLOSE = 0.1  # what is this much less like it than the best is not named


def watch(command: Any) -> None:
    """Have this command, as click has it, say so of an option that neither it nor the config has."""
    command.invoke = partial(_invoke, command)


def _invoke(command: Any, ctx: Any) -> Any:
    try:
        return type(command).invoke(command, ctx)
    except ConfigError as error:
        raise ConfigError([_said(problem, ctx) for problem in error.problems]) from None


def _said(problem: UserError, ctx: Any) -> UserError:
    option = str(problem.values.get("source", "")).partition("=")[0].partition(" ")[0]
    typed = option.startswith("-") and any(word.partition("=")[0] == option for word in own_words())
    if problem.id not in _UNKNOWN or not typed:
        return problem
    near = nearest(option, [word for each in ctx.command.get_params(ctx) for word in each.opts])
    id = "config.no_such_option_near" if near else "config.no_such_option"
    return UserError(id, option=option, near=near, command=_command(ctx))


def _command(ctx: Any) -> str:
    """'foretrain plan', however it was started."""
    return f"{_command(ctx.parent)} {ctx.info_name}" if ctx.parent else "foretrain"


def nearest(option: str, own: list[str], *, of_config: bool = True) -> list[str]:
    """The options that look like this one: of a command's `own` and of the config, the most alike first, three at
    most."""
    options = [word for word in own if word.startswith("--") and word not in OLD.values()]
    options += [f"--{name}" for name in (*OPTIONS, *ALIASES)] if of_config else []
    typed = _squeezed(option)
    alike = {word: _likeness(typed, _squeezed(word)) for word in options}
    best = max(alike.values())
    found = [word for word in options if alike[word] >= max(0.6, best - _CLOSE)]
    return sorted(found, key=lambda word: -alike[word])[:3]


def _squeezed(option: str) -> str:
    """'--used-by-others' -> 'usedbyothers'."""
    return option.lstrip("-").replace("-", "").replace("_", "").lower()


def _likeness(typed: str, name: str) -> float:
    """From 0 to 1; the beginning of a name is much like it."""
    begins = 0.8 if len(typed) >= 3 and name.startswith(typed) else 0.0
    return max(begins, difflib.SequenceMatcher(None, typed, name).ratio())

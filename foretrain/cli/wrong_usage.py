"""A command line that the framework refuses, as one sentence in the language that is spoken.

The framework says it in its own English, in a box, and in other words from version to version. Here its error becomes
a `UserError`: what is wrong, and what to do.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from foretrain.base.errors import ConfigError, UserError
from foretrain.cli.common import own_words, wrong_value
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ALIASES

# A mistyped option of a command, said as one: with those that look like it, of the command and of the config.
#
# Commands hand what they do not know on to the config (`CONFIG_CONTEXT`), which knows only its own options.

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
    return UserError(id, option=option, near=near, command=_typed_command(ctx))


def _typed_command(ctx: Any) -> str:
    """'foretrain plan', however it was started."""
    return f"{_typed_command(ctx.parent)} {ctx.info_name}" if ctx.parent else "foretrain"


def nearest(option: str, own: list[str], *, of_config: bool = True) -> list[str]:
    """The options that look like this one: of a command's `own` and of the config, the most alike first, three at
    most."""
    options = [word for word in own if word.startswith("--")]
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


# What the framework says, and the text that says it here; the groups are its values.
SAID = {
    r"No such option:? '?(?P<option>[^\s']+?)'?(?: .*|\..*)?": "no_such_option",
    r"No such command '(?P<name>.+?)'\..*": "no_such_command",
    r"Option '(?P<option>.+?)' requires an argument\.": "requires_argument",
    r"Option '(?P<option>.+?)' does not take a value\.": "takes_no_value",
    r"Missing argument '(?P<what>.+?)'\..*": "missing_argument",
    r"Missing (?:option|parameter) '(?P<what>.+?)'\..*": "missing_option",
    r"Missing command\.": "missing_command",
    r"Got unexpected extra arguments?(?:\(s\))? \((?P<words>.+)\)": "extra_argument",
    r"Invalid value for '?(?P<option>.+?)'?: (?P<reason>.+)": "bad_value",
}
# What it expects of a value, likewise.
EXPECTED = {
    r"valid int": "whole_plain",
    r"valid (?:number|float)": "number_plain",
    r"greater than or equal to (?P<low>[\d.]+)": "at_least",
    r"less than or equal to (?P<high>[\d.]+)": "at_most",
    r"(?P<low>[\d.]+)<=x<=(?P<high>[\d.]+)": "from_to",
    r"x>=(?P<low>[\d.]+)": "at_least",
    r"x<=(?P<high>[\d.]+)": "at_most",
}


@contextmanager
def told(root: Any, speak: Callable[[], None]) -> Iterator[None]:
    """What the framework refuses of a command line is raised as a UserError. `speak`: the language that was typed."""
    try:
        yield
    except Exception as error:
        # Its classes have moved between versions; a group that is asked nothing shows its help.
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        speak()
        raise _sentence(error, root) from None


def _sentence(error: Any, root: Any) -> UserError:
    said = str(error.format_message())
    command, path = _command(root)
    for pattern, id in SAID.items():
        if found := re.fullmatch(pattern, said, re.DOTALL):
            return _made(id, {**found.groupdict(), "command": path}, command, error)
    return UserError("usage.other", text=said, command=path)


def _made(id: str, values: dict[str, str], command: Any, error: Any) -> UserError:
    if id == "no_such_option":
        near = nearest(values["option"], [w for each in command.params for w in each.opts], of_config=False)
        return UserError("usage.no_such_option_near" if near else "usage.no_such_option", near=near, **values)
    if id == "no_such_command" and values["name"] == "help":
        return UserError("usage.help_command", name="help", command="foretrain")
    if id == "no_such_command":
        near = difflib.get_close_matches(values["name"], [*getattr(command, "commands", {})])
        return UserError("usage.no_such_command_near" if near else "usage.no_such_command", near=near, **values)
    if id == "bad_value":
        reason = values.pop("reason")
        for pattern, expected in EXPECTED.items():
            if found := re.search(pattern, reason):
                value = _typed(getattr(getattr(error, "param", None), "opts", [values["option"]]))
                if value.lower().strip("+-") == "nan":  # beyond whichever limit was compared first
                    expected = "number_plain"
                return wrong_value(values["option"], value, expected, **found.groupdict())
        return UserError("usage.bad_value_of", reason=reason.rstrip("."), **values)
    return UserError(f"usage.{id}", **values)


def _command(root: Any) -> tuple[Any, str]:
    """The command that was typed, as far as there is one of that name, and its words."""
    command, path = root, ["foretrain"]
    for word in own_words():
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            path.append(word)
    return command, " ".join(path)


def _typed(options: list[str]) -> str:
    """What was typed last, which counts, behind one of these spellings of an option; … where another program runs the
    command."""
    found = "…"
    for word, after in pairwise([*own_words(), ""]):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else after
    return found

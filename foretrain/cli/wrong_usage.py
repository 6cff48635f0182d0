"""A command line that the framework refuses, as one sentence in the language that is spoken.

The framework says it in its own English, in a box, and in other words from version to version. Here its error becomes
a `UserError`: what is wrong, and what to do.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from foretrain.base.errors import UserError
from foretrain.cli import mistyped
from foretrain.cli.common import own_words, wrong_value

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
        near = mistyped.nearest(values["option"], [w for each in command.params for w in each.opts], of_config=False)
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

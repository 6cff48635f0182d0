"""The language of the command line: `--lang` of every command, and FORETRAIN_LANG.

English unless another one is asked for, whatever the system's locale says: most terminals cannot show Arabic in its
order, and logs and errors are read by others and looked up. With --json all is English, for programs read it.
"""

import os
from functools import cache
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.cli import gpu_file, help, wrong_usage
from foretrain.cli import help as spoken_help
from foretrain.cli.commands import Commands
from foretrain.cli.common import option_of, own_words

VARIABLE = "FORETRAIN_LANG"


class Group(TyperGroup):
    """A group of commands that each take --lang, and --gpu-file where they take a card. Help is in that language."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _give_options(self)
        if not self.commands:  # a group of commands within a command has its own
            self.commands = Commands(_give_options)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with wrong_usage.told(self, _speak_typed):
            return super().make_context(*args, **kwargs)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        if not isinstance(self.commands, Commands):
            return super().shell_complete(ctx, incomplete)
        options = super(TyperGroup, self).shell_complete(ctx, incomplete)
        return [*help.commands(incomplete), *options]

    def invoke(self, ctx: Any) -> Any:
        with wrong_usage.told(self, _speak_typed):
            return super().invoke(ctx)


def _give_options(command: Any) -> None:
    names = {parameter.name for parameter in command.params}
    command.params.append(_option())
    if "gpu" in names or command.name in gpu_file.COMMANDS:
        command.params.append(gpu_file.option())
    spoken_help.speak(command)
    wrong_usage.watch(command)
    help.complete(command)
    for each in getattr(command, "commands", {}).values():
        _give_options(each)


@cache
def _option() -> Any:
    return option_of(_only_this, "lang")


def _chosen(value: str | None) -> None:
    if value is not None:
        speak(value, "--lang")


def _only_this(
    lang: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="LANGUAGE",
            expose_value=False,
            is_eager=True,
            callback=_chosen,
            show_default=False,
            help=f"The language, such as ar; else {VARIABLE}, else en. `foretrain languages` lists them.",
        ),
    ] = None,
) -> None:
    """Nothing; see _option."""


def speak(word: str, source: str) -> None:
    """Speak the language of this word, and have child processes speak it. Raises UserError where it is not known."""
    id = messages.matching(word)
    if id is None:
        raise UserError("usage.unknown_language", source=source, word=word[:40], known=list(messages.languages()))
    os.environ[VARIABLE] = id
    messages.set_language(messages.ENGLISH if "--json" in own_words() else id)


def from_environment() -> None:
    """Speak what the environment asks for, or --lang behind --help, which answers before it is read. Raises
    UserError."""
    word = os.environ.get(VARIABLE, "")
    if word:
        speak(word, VARIABLE)
    if not {"--help", "-h"}.isdisjoint(own_words()):
        _speak_typed()


def _speak_typed() -> None:
    """Speak what --lang asks for, wherever it stands: before anything else is read."""
    words = own_words()
    for number, each in enumerate(words):
        name, equals, value = each.partition("=")
        if name == "--lang" and (value or (not equals and number + 1 < len(words))):
            speak(value or words[number + 1], "--lang")


def asked_for() -> str | None:
    """The language that was asked for, by option or environment; None where none was."""
    return messages.matching(os.environ.get(VARIABLE, ""))

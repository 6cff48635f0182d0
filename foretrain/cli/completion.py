"""Shell completion of what typer cannot know: cards after --gpu, options of the config on every command that takes
them, and the names of commands without importing the commands."""

from types import MethodType
from typing import Any, NamedTuple

from foretrain.base import languages
from foretrain.cli.commands import SUMMARIES


class Item(NamedTuple):
    """A word that is offered; of the framework's own kind it is only in some versions, and click's in others."""

    value: str
    type: str = "plain"
    help: str | None = None


def cards(incomplete: str) -> list[str]:
    """Names of cards that begin with this, in a form without blanks; the last one of a list such as 3060,40."""
    from foretrain.hardware.catalogue import catalogue

    before, comma, last = incomplete.rpartition(",")
    names = ["auto", "cpu", *(name.replace(" ", "-") for name in catalogue())]
    if last[:1].isdigit():
        names = [name.removeprefix("RTX-") for name in names]
    return [before + comma + name for name in names if name.lower().startswith(last.lower())]


def config_options(incomplete: str) -> list[str]:
    """Options of the config that begin with this, in either spelling: --n_layer=, --n-layer=."""
    from foretrain.config.options import OPTIONS

    written = "--" + incomplete.removeprefix("--").replace("-", "_")
    return [f"--{name}=" for name in OPTIONS if f"--{name}".startswith(written)]


def commands(incomplete: str) -> list[Any]:
    """Commands that begin with this, each with its summary. Importing all of them would take as long as a plan."""
    said = languages.texts(languages.current().id)
    begun = [name for name in SUMMARIES if name.startswith(incomplete)]
    return [Item(name, help=said.get(f"cli_help.{name}.summary", SUMMARIES[name])) for name in begun]


def complete(command: Any) -> None:
    """Have a command complete --gpu, and the config's options where it takes them."""
    for parameter in command.params:
        if parameter.name == "gpu":
            parameter.shell_complete = lambda ctx, incomplete: _items(cards(incomplete))
    if command.context_settings.get("ignore_unknown_options"):
        own = command.shell_complete

        def shell_complete(self: Any, ctx: Any, incomplete: str) -> list[Any]:
            more = config_options(incomplete) if incomplete.startswith("-") else []
            return [*own(ctx, incomplete), *_items(more)]

        command.shell_complete = MethodType(shell_complete, command)


def _items(words: list[str]) -> list[Any]:
    return [Item(word) for word in words]

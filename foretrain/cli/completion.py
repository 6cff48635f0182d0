"""Shell completion of what typer cannot know: cards after --gpu, and options of the config on every command that takes
them."""

from types import MethodType
from typing import Any


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
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words]

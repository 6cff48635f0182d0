"""`foretrain top`: what this machine's cards and runs do now."""

from foretrain.cli.commands.top.command import add_to

__all__ = ["add_to"]

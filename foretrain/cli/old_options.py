"""Old spellings of options: still understood, shown by no help."""

from foretrain.cli.common import own_words

OLD = {"--used-by-others": "--others", "--auto-restart": "--keep-going", "--options": "--knobs"}


def spellings(option: str) -> tuple[str, str]:
    """The declarations of an option: its name, and the old one."""
    return option, OLD[option]


def typed(option: str) -> str:
    """The spelling that the user typed, for an error that names it."""
    old = OLD[option]
    return old if any(word.partition("=")[0] == old for word in own_words()) else option

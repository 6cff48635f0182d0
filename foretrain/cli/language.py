"""The language of the command line: `--lang` of every command, and FORETRAIN_LANG.

English unless another one is asked for, whatever the system's locale says: most terminals cannot show Arabic in its
order, and logs and errors are read by others and looked up. With --json all is English, for programs read it.
"""

import os

from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.cli.common import own_words

VARIABLE = "FORETRAIN_LANG"


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
        speak_typed()


def speak_typed() -> None:
    """Speak what --lang asks for, wherever it stands: before anything else is read."""
    words = own_words()
    for number, each in enumerate(words):
        name, equals, value = each.partition("=")
        if name == "--lang" and (value or (not equals and number + 1 < len(words))):
            speak(value or words[number + 1], "--lang")


def asked_for() -> str | None:
    """The language that was asked for, by option or environment; None where none was."""
    return messages.matching(os.environ.get(VARIABLE, ""))

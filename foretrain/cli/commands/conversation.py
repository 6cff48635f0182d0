"""A conversation with a model that continues text: a line in, what follows out, until the input ends."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.signals import StopFlag
from foretrain.cli.common import ERR, noted, print_error
from foretrain.model.sampling import Sampling

if TYPE_CHECKING:
    from foretrain.app.opened import RunWriter

PROMPT = "> "
MOST_TOKENS = 100_000
# What can be set within a conversation, with its limits.
SETTINGS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 10), "top_k": (int, 0, 2**31), "top_p": (float, 0, 1), "tokens": (int, 1, MOST_TOKENS),
}  # fmt: skip


class Conversation:
    """A model, how it is sampled, and what is said of both on stderr."""

    def __init__(self, writer: RunWriter, sampling: Sampling, tokens: int, *, quiet: bool) -> None:
        self.writer, self.sampling, self.tokens, self.quiet = writer, sampling, tokens, quiet
        self._dropped = 0
        self._open_line = False  # whether the last reply ended within a line

    def tell(self, id: str, **values: object) -> None:
        """A sentence beside the text."""
        if not self.quiet:
            ERR.print(noted(say(f"chat.{id}", **values)), soft_wrap=True)

    def answer(self, line: str) -> None:
        """Read a line and write what follows, as it is made; the first Ctrl-C ends the reply."""
        try:
            self.writer.read("\n" * self._open_line + line + "\n")
        except UserError as error:
            print_error(error, as_json=False)
            return
        self._tell_dropped()
        self._open_line = False
        with StopFlag() as stop:
            for piece in self.writer.write(self.sampling, self.tokens, until_end=True):
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
                self._open_line = not piece.endswith("\n")
                if stop.stopping:
                    break
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._tell_dropped()
        if stop.signal_name not in ("", "SIGINT"):
            raise KeyboardInterrupt

    def _tell_dropped(self) -> None:
        if self.writer.dropped > self._dropped:
            self.tell("dropped", count=self.writer.dropped - self._dropped)
        self._dropped = self.writer.dropped

    def obey(self, words: list[str]) -> bool:
        """Do what a line that begins with / asks for; False ends the conversation."""
        name = words[0].removeprefix("/").replace("-", "_").lower() if words else ""
        if name in ("quit", "exit", "bye"):
            return False
        if name == "reset":
            self.writer.forget()
            self._open_line = False
            self.tell("reset")
        elif name in SETTINGS:
            self._set(name, words[1] if len(words) == 2 else "")
        else:
            if name not in ("help", "?"):
                self.tell("unknown", command=printable(words[0] if words else "/")[:40])
            values = {each: f"{getattr(self.sampling, each, self.tokens):g}" for each in SETTINGS}
            self.tell("help", **values)
        return True

    def _set(self, name: str, text: str) -> None:
        kind, least, most = SETTINGS[name]
        value = None
        with suppress(ValueError):
            value = kind(text)
        if value is None or not least <= value <= most:
            self.tell("bad_value", name=name, value=printable(text)[:40], least=f"{least:g}", most=f"{most:g}")
            return
        if name == "tokens":
            self.tokens = int(value)
        else:
            self.sampling = replace(self.sampling, **{name: value})
        self.tell("set", name=name, value=f"{value:g}")


def talk(writer: RunWriter, sampling: Sampling, tokens: int, *, quiet: bool = False) -> None:
    """Read lines from stdin until it ends, and continue each. A line that begins with / is a command; // is a text."""
    conversation = Conversation(writer, sampling, tokens, quiet=quiet)
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # arrows and history at the prompt, where Python has them
            import_module("readline")
    conversation.tell("welcome")
    while (line := _line(typed=typed)) is not None:
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.obey(line.split()):
                return
        else:
            conversation.answer(line[1:] if line.startswith("//") else line)


def _line(*, typed: bool) -> str | None:
    """The next line without its end; None where there is none. Ctrl-C at the prompt clears it."""
    while True:
        try:
            if typed:
                return input(PROMPT)
            found = sys.stdin.readline()
            return found.rstrip("\r\n") if found else None
        except EOFError:
            sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            if not typed:
                raise
            ERR.print()
            ERR.print(noted(say("chat.leave")), soft_wrap=True)

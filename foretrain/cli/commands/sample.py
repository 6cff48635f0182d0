"""`foretrain sample` and `foretrain chat`: text from a run's checkpoint as it is made, and a conversation with it."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from foretrain.app.sample import SCHEMA, Sample, opened
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.signals import StopFlag
from foretrain.cli.command import command, flag, json_option, option, quiet_option
from foretrain.cli.commands.runs import run_argument
from foretrain.cli.common import ERR, noted, print_error, print_json, print_shown
from foretrain.model.sampling import Sampling

if TYPE_CHECKING:
    from foretrain.app.opened import Opened, RunWriter


PROMPT = "> "
MOST_TOKENS = 100_000
# What can be set within a conversation, with its limits.
SETTINGS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 10), "top_k": (int, 0, 2**31), "top_p": (float, 0, 1), "tokens": (int, 1, MOST_TOKENS),
}  # fmt: skip


class Conversation:
    def __init__(self, writer: RunWriter, sampling: Sampling, tokens: int, *, quiet: bool) -> None:
        self.writer, self.sampling, self.tokens, self.quiet = writer, sampling, tokens, quiet
        self._dropped = 0
        self._open_line = False  # whether the last reply ended within a line

    def tell(self, id: str, **values: object) -> None:
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


EPILOG = """Examples:
foretrain sample out-baby
foretrain sample out-baby --prompt "class " --tokens 500 --temperature 0.7 --top-p 0.9
foretrain sample out-baby --interactive   (as `foretrain chat out-baby`)"""


CHAT_EPILOG = """Examples:
foretrain chat out-baby
foretrain chat out-baby --temperature 0.7 --top-p 0.9 --tokens 100
echo "def area(r):" | foretrain chat out-baby --quiet   (also from a pipe)
Within: /help, /reset, /temperature 0.7, /top_k 40, /top_p 0.9, /tokens 100. Ctrl-C stops a reply, Ctrl-D ends."""
temperature_option = option(
    "--temperature", "Sampling temperature; 0 always picks the most likely token.", default=0.8, low=0, high=10
)
top_k_option = option("--top-k", "Sample from this many most likely tokens; 0: all.", default=50, low=0)
top_p_option = option(
    "--top-p",
    "Sample from the fewest most likely tokens with this probability together; 1: all.",
    default=1.0,
    low=0,
    high=1,
)


@command("sample", EPILOG)
@run_argument
@option("--prompt", "Text to continue.", default="\n")
@option("--tokens", "Tokens to generate.", default=400, low=1, high=100_000)
@temperature_option
@top_k_option
@top_p_option
@option("--seed", "Random seed; the same seed gives the same text.", default=1337, low=0, high=2**63 - 1)
@flag("--interactive", "Read lines and continue each, as `foretrain chat` does.")
@json_option
@quiet_option
def sample_command(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    interactive: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Generate text with the newest intact checkpoint of a run."""
    sampling = Sampling(temperature, top_k, top_p)
    if interactive and as_json:
        raise UserError("usage.two_forms", options=["--interactive", "--json"])
    found = opened(run)
    warn_of_skipped(found.checkpoint, list(found.skipped))
    say_needs(found, quiet=quiet or as_json)
    writer = found.load(seed)
    if interactive:
        talk(writer, sampling, tokens, quiet=quiet)
        return
    writer.read(prompt)
    pieces = writer.write(sampling, tokens)
    if as_json:
        text = "".join(pieces)
        made = Sample(checkpoint=found.checkpoint, skipped=found.skipped, prompt=prompt, text=text)
        print_json(made.to_json(schema=SCHEMA))
        return
    sys.stdout.write(printable(prompt))
    for piece in pieces:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


def warn_of_skipped(used: str, skipped: list[str]) -> None:
    """Say on stderr that newer checkpoints are damaged, also where the answer is JSON."""
    if skipped:
        ERR.print(Text(printable(say("save.older_used", used=used, problems=skipped)), "yellow"), soft_wrap=True)


@command("chat", CHAT_EPILOG)
@run_argument
@option("--tokens", "Most tokens of a reply.", default=200, low=1, high=MOST_TOKENS)
@temperature_option
@top_k_option
@top_p_option
@option("--seed", "Random seed.", default=1337, low=0, high=2**63 - 1)
@quiet_option
def chat_command(run: Path, tokens: int, temperature: float, top_k: int, top_p: float, seed: int, quiet: bool) -> None:
    """Talk to a run's newest checkpoint: it continues each line, and remembers the conversation."""
    found = opened(run)
    warn_of_skipped(found.checkpoint, list(found.skipped))
    say_needs(found, quiet=quiet)
    talk(found.load(seed), Sampling(temperature, top_k, top_p), tokens, quiet=quiet)


def say_needs(found: Opened, *, quiet: bool) -> None:
    """What it needs, before its weights are loaded, and what gave way to the memory that is free, on stderr."""
    if quiet:
        return
    fitted = found.fitted
    values = {
        "checkpoint": found.checkpoint, "params": found.n_params, "context": fitted.context,
        "weights": fitted.memory.bytes_of("weights"), "cache": fitted.memory.bytes_of("kv_cache"),
        "needed": fitted.memory.needed_expected_bytes, "device": found.device.type,
    }  # fmt: skip
    ERR.print(noted(say("sample.needs", **values)), soft_wrap=True)
    print_shown(fitted.notes, quiet=quiet)

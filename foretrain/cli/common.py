"""What the commands share: consoles, options, printing of errors and JSON."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foretrain.base import messages
from foretrain.base.bugs import redacted_message
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.installation import Later
from foretrain.base.messages import listed, printable, say

if TYPE_CHECKING:
    from foretrain.base.records import Note, Record
    from foretrain.reports import text as reports
    from foretrain.reports.document import Document
else:
    reports = Later("foretrain.reports.text")

bars: Any = Later("rich.progress")
OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
for _console in (OUT, ERR):
    if _console.width < 20:  # COLUMNS=0 would show nothing at all
        _console.width = 80


def wrong_value(option: str, value: object, expects: str, **values: Any) -> UserError:
    return UserError("usage.bad_value", option=option, value=value, expected=say(f"expects.{expects}", **values))


def need_one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise wrong_value(option, value, "one_of", choices=listed(choices))


# What JSON need not escape, but a terminal would obey (DEL, the C1 controls, marks of direction) or UTF-8 cannot hold
# (half characters).
_UNPRINTABLE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def own_words() -> list[str]:
    """The words of the command line that are ours: those behind -- are another program's."""
    words = sys.argv[1:]
    return words[: words.index("--")] if "--" in words else words


def print_json(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    sys.stdout.write(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()


def print_answer(
    record: "Record", schema: str, document: "Callable[[], Document]", *, as_json: bool, **beside: Any
) -> None:
    """Print an answer as one object with what stands `beside` it, or as a document."""
    if as_json:
        print_json({**record.to_json(schema=schema), **beside})
    else:
        reports.render(document(), OUT)


def print_error(error: UserError, *, as_json: bool) -> None:
    if as_json:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        listed = [{"id": p.id, "message": redacted_message(str(p)), **_plain(p.values)} for p in problems]
        print_json(
            {
                "schema": "foretrain.error/1",
                "id": error.id,
                "exit_code": int(error.exit_code),
                "message": redacted_message(str(error)),
                "problems": listed,
            }
        )
    text = Text(say("label.error") + " ", style="bold red")
    text.append(printable(redacted_message(str(error))), style="not bold default")
    ERR.print(text, soft_wrap=True)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {"values": json.loads(redacted_message(json.dumps(values, default=str)), parse_constant=str)}


def print_shown(notes: "Iterable[Note]", *, quiet: bool) -> None:
    for note in () if quiet else notes:
        ERR.print(noted(say(f"note.{note.id}", **note.values)), soft_wrap=True)


def rewrites_lines(*, terminal: bool) -> bool:
    """Whether a line can be written again: on a terminal, and none that calls itself dumb, as an editor's may."""
    return terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class LiveLine:
    def __init__(self, console: Console) -> None:
        self._console, self._shown = console, False

    def show(self, text: str) -> None:
        self._write(text[: max(20, self._console.width - 1)])
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._write("")
            self._shown = False

    def leave(self) -> None:
        if self._shown:
            self._console.file.write("\n")
            self._shown = False

    def _write(self, text: str) -> None:
        self._console.file.write("\r\x1b[2K" + text)
        self._console.file.flush()


class Status:
    """A line on stderr that moves with what is being done now, on a terminal."""

    def __init__(self) -> None:
        self._status: Any = None

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(printable(text)))
        elif ERR.is_terminal:
            self._status = ERR.status(Text(printable(text)))
            self._status.start()

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """What changes the text of a line on stderr that moves as long as this lasts; nothing where nobody watches."""
    if quiet or not ERR.is_terminal:
        yield lambda text: None
        return
    with ERR.status(Text(printable(text))) as status:
        yield lambda text: status.update(Text(printable(text)))


def noted(what: object, style: str = "dim") -> Text:
    return Text(printable(say("label.note", text=str(what))), style=style)


def print_notes(notes: tuple[UserError, ...], *, quiet: bool) -> None:
    if not quiet:
        for note in notes:
            ERR.print(noted(note), soft_wrap=True)


@contextmanager
def bytes_bar(label: str, total: int, *, quiet: bool) -> Iterator["Bar"]:
    if quiet or not total or not ERR.is_terminal:
        yield Bar(None, None)
        return
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(20), bars.DownloadColumn())
    columns += (bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=ERR, transient=True) as progress:
        yield Bar(progress, progress.add_task(printable(label), total=total))


class Bar:
    def __init__(self, progress: Any, task: int | None) -> None:
        self._progress, self._task = progress, task

    def __call__(self, count: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, count)


# English unless another language is asked for, whatever the system's locale says: most terminals cannot show Arabic in
# its order, and logs and errors are read by others and looked up. With --json all is English, for programs read it.
VARIABLE = "FORETRAIN_LANG"


def speak(word: str, source: str) -> None:
    """Speak the language of this word, and have child processes speak it. Raises UserError where it is not known."""
    id = messages.matching(word)
    if id is None:
        raise UserError("usage.unknown_language", source=source, word=word[:40], known=list(messages.languages()))
    os.environ[VARIABLE] = id
    messages.set_language(messages.ENGLISH if "--json" in own_words() else id)


def from_environment() -> None:
    """Speak what the environment asks for, or --lang behind --help, which answers first. Raises UserError."""
    word = os.environ.get(VARIABLE, "")
    if word:
        speak(word, VARIABLE)
    if not {"--help", "-h", "--help-all"}.isdisjoint(own_words()):
        speak_typed()


def speak_typed() -> None:
    words = own_words()
    for number, each in enumerate(words):
        name, equals, value = each.partition("=")
        if name == "--lang" and (value or (not equals and number + 1 < len(words))):
            speak(value or words[number + 1], "--lang")


def asked_for() -> str | None:
    return messages.matching(os.environ.get(VARIABLE, ""))

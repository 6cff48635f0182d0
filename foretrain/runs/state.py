"""A run's label, and where the run stands."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from foretrain.base.errors import UserError
from foretrain.base.files import not_written, read_text, replace, replace_text
from foretrain.base.process_memory import system
from foretrain.base.records import Record

# A label is the user's words about a run: neither a resume nor a comparison of settings reads it. It may be anything,
# so a view makes it printable.

LABEL_FILE = "label.json"
LABEL_SCHEMA = "foretrain.label/1"
MOST_NAME, MOST_NOTE, MOST_TAG, MOST_TAGS = 80, 2000, 40, 20  # characters; the last one: tags
_MOST_LABEL_BYTES = 65536
Tag = Annotated[str, Field(min_length=1, max_length=MOST_TAG)]


class Label(Record):
    name: str = Field(default="", max_length=MOST_NAME)
    note: str = Field(default="", max_length=MOST_NOTE)
    tags: tuple[Tag, ...] = Field(default=(), max_length=MOST_TAGS)

    def __bool__(self) -> bool:
        return self != Label()

    @property
    def title(self) -> str:
        return " ".join(self.name.split())

    def with_more(self, other: "Label") -> "Label":
        """Add the other's. Raises UserError where these are too many tags."""
        return changed(self, name=other.name or None, note=other.note or None, tags=other.tags)


UNSAID = Label()


def read_label(folder: Path) -> Label:
    try:
        return Label.from_json(read_text(folder / LABEL_FILE, _MOST_LABEL_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return UNSAID


def write(folder: Path, label: Label) -> None:
    """Write the label; an empty one removes the file. Raises UserError where it cannot be written."""
    file = folder / LABEL_FILE
    try:
        if label:
            replace_text(file, json.dumps(label.to_json(schema=LABEL_SCHEMA), ensure_ascii=False, indent=1) + "\n")
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise not_written(file, error) from None
    except UnicodeEncodeError as error:
        raise UserError("environment.cannot_write", path=str(file), reason=str(error)) from None


def changed(
    label: Label,
    *,
    name: str | None = None,
    note: str | None = None,
    tags: Iterable[str] = (),
    without: Iterable[str] = (),
) -> Label:
    """Return the label with these changes; None leaves as it is, "" removes. Raises UserError."""
    if name is not None and len(name.strip()) > MOST_NAME:
        raise UserError("usage.label_name", length=len(name.strip()), most=MOST_NAME)
    if note is not None and len(note.strip()) > MOST_NOTE:
        raise UserError("usage.label_note", length=len(note.strip()), most=MOST_NOTE)
    more, less = [tag.strip() for tag in tags], {tag.strip() for tag in without}
    for tag in more:
        if not 0 < len(tag) <= MOST_TAG:
            raise UserError("usage.label_tag", tag=tag[:MOST_TAG], length=len(tag), most=MOST_TAG)
    kept = tuple(tag for tag in dict.fromkeys([*label.tags, *more]) if tag not in less)
    if len(kept) > MOST_TAGS:
        raise UserError("usage.label_tags", count=len(kept), most=MOST_TAGS)
    return Label(
        name=label.name if name is None else name.strip(), note=label.note if note is None else note.strip(), tags=kept
    )


# now.json is for `foretrain top` and the page; nothing of the run depends on it. So it is not synced, disk errors are
# ignored, and it goes with the lock. A killed run leaves it behind; its process then tells that it has ended.

NOW_FILE = "now.json"
NOW_SCHEMA = "foretrain.now/1"
SHORT_S = 0.1  # a phase that was so short is not worth a write the next time
_SAME_START_S = 2.0  # the system counts a process's start in ticks since its own
_MOST_NOW_BYTES = 4096
Phase = Literal["starting", "compiling", "training", "evaluating", "saving", "running"]


class Now(Record):
    """A run at one moment. `running`: of a program that reports no more. `since_s`: Unix time at which the phase began;
    `process_began_s`: identifies a reused `pid`; `numbers`: where pids are valid: a boot and a container."""

    phase: Phase
    since_s: float
    step: int = 0
    pid: int
    process_began_s: float
    host: str
    numbers: str = ""


class Teller:
    def __init__(self, folder: Callable[[], Path], clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._phase, self._written = "", ""
        self._since_s = 0.0
        self._short: set[str] = set()

    def tell(self, phase: Phase, step: int = 0, pid: int | None = None) -> None:
        """Write that the run is in this phase. `pid`: of the process that does it, by default this one."""
        if phase == self._phase:
            return
        now_s = self._clock()
        quick = self._short.add if now_s - self._since_s < SHORT_S else self._short.discard
        quick(self._phase)
        self._phase, self._since_s = phase, now_s
        if phase == self._written or phase in self._short:
            return
        self._written = phase
        with contextlib.suppress(OSError):
            self._write(phase, now_s, step, pid or os.getpid())

    def _write(self, phase: Phase, now_s: float, step: int, pid: int) -> None:
        now = Now(
            phase=phase, since_s=round(now_s, 3), step=step, pid=pid, process_began_s=_began_s(pid) or 0.0,
            host=socket.gethostname(), numbers=_numbers(),
        )  # fmt: skip
        replace(self._folder() / NOW_FILE, f"{json.dumps(now.to_json(schema=NOW_SCHEMA))}\n".encode(), sync=False)

    def end(self) -> None:
        if self._written:
            self._phase = self._written = ""
            with contextlib.suppress(OSError):
                (self._folder() / NOW_FILE).unlink()


def read_now(folder: Path) -> Now | None:
    try:
        return Now.from_json(read_text(folder / NOW_FILE, _MOST_NOW_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_here(now: Now) -> bool:
    return now.host == socket.gethostname() and now.numbers == _numbers()


def lives(now: Now) -> bool | None:
    if not is_here(now):
        return None
    began_s = _began_s(now.pid)
    return began_s is not None and abs(began_s - now.process_began_s) < _SAME_START_S


def seconds_since(now: Now) -> float:
    return time.time() - now.since_s


def _began_s(pid: int) -> float | None:
    try:
        return system().Process(pid).create_time()
    except (system().Error, OSError, ValueError, OverflowError):
        return None


def _numbers() -> str:
    """Return where process numbers are valid; "" where the system has no name for it."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        found.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    return " ".join(found)

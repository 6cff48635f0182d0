"""`label.json` in a run's folder: the name, the note and the tags that its user gave it.

They are the user's words about a run and no part of it: neither a resume nor a comparison of settings reads them. They
may be anything, so whoever shows them makes them printable.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from foretrain.base.durable import not_written, replace_text
from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.safe_read import read_text

FILE = "label.json"
SCHEMA = "foretrain.label/1"
MOST_NAME, MOST_NOTE, MOST_TAG, MOST_TAGS = 80, 2000, 40, 20  # characters; the last one: tags
_MOST_BYTES = 65536
Tag = Annotated[str, Field(min_length=1, max_length=MOST_TAG)]


class Label(Record):
    """What a user says of a run; empty where nothing is said."""

    name: str = Field(default="", max_length=MOST_NAME)
    note: str = Field(default="", max_length=MOST_NOTE)
    tags: tuple[Tag, ...] = Field(default=(), max_length=MOST_TAGS)

    def __bool__(self) -> bool:
        return self != Label()

    @property
    def title(self) -> str:
        return " ".join(self.name.split())

    def with_more(self, other: "Label") -> "Label":
        """This one with what the other says, too. Raises UserError where that are too many tags."""
        return changed(self, name=other.name or None, note=other.note or None, tags=other.tags)


UNSAID = Label()


def read(folder: Path) -> Label:
    """The label of a run; an empty one where there is none, or none that can be read."""
    try:
        return Label.from_json(read_text(folder / FILE, _MOST_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return UNSAID


def write(folder: Path, label: Label) -> None:
    """Keep the label; an empty one is no file. Raises UserError where it cannot be written."""
    file = folder / FILE
    try:
        if label:
            replace_text(file, json.dumps(label.to_json(schema=SCHEMA), ensure_ascii=False, indent=1) + "\n")
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
    """The label with another name or note, with more tags and without some; None leaves as it is, "" takes away.

    Raises UserError where something is too long, or there are too many tags.
    """
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

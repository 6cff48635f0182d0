"""JSON lines that the workers read by themselves: this process only finds a line's end near each MiB of a file.

So text goes through no pipe, all cores parse, and there is no reader process. A range ends with a line, so its
documents are those that reading the file from its beginning finds.
"""

from dataclasses import dataclass
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.data.prepare.formats import documents
from foretrain.data.prepare.ipc import limited_memory
from foretrain.data.prepare.opened import BUFFER, Format, OpenFile, Place, SourceFile, reason_of
from foretrain.data.prepare.reader import MEMORY_BYTES, Job, Position

TAIL_BYTES = 2**16


class Range(Record):
    """The lines of a file from byte `offset` up to byte `end`.

    `val_share` of its documents, by their hash, are for validation.
    """

    file: SourceFile
    offset: int
    end: int
    text_column: str
    split_documents: str
    max_document_bytes: int
    skip_bad: bool
    val_share: float

    @property
    def format(self) -> Format:
        return Format(self.text_column, self.split_documents, self.max_document_bytes, self.skip_bad)


def can_serve(job: Job, *, dedup: bool) -> bool:
    """Whether workers can read this source: plain JSON lines on this machine, in their own order.

    Which texts are duplicates must be known in the order of the documents, before they are tokenized.
    """
    plain = all(file.kind == "jsonl" and not file.compression and not file.remote for file in job.files)
    return plain and not job.shuffle_buffer and not dedup


class Ranges:
    """Stands where the reader process does: `next` gives ranges in the order of the files."""

    def __init__(self, job: Job, val_share: float) -> None:
        self.job, self.val_share = job, val_share
        self.file, self.offset, self.window = job.position.file, job.position.offset, job.position.window
        self.finished_bytes = sum(file.size_bytes or 0 for file in job.files[: self.file])
        self._opened: OpenFile | None = None

    def next(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next frame: a range, or the end. Raises UserError 'data.source_…'."""
        while self.file < len(self.job.files):
            if self._opened is None:
                self._opened = OpenFile(self.job.files[self.file])
            if frame := self._range(self._opened):
                return frame, b""
            self._opened.close()
            self.finished_bytes += self.job.files[self.file].size_bytes or 0
            self._opened, self.offset, self.file = None, 0, self.file + 1
        return {"type": "end"}, b""

    def _range(self, opened: OpenFile) -> dict[str, Any] | None:
        """The lines that end in the next MiB, or the one that goes on beyond it; None at the file's end."""
        start = self.offset
        if start >= (opened.file.size_bytes or 0):
            return None
        try:
            self.offset = _end_of_line(opened.raw, start + BUFFER, opened.file.size_bytes or 0)
        except OSError as error:
            raise UserError("data.source_corrupt", path=opened.file.path, reason=reason_of(error)) from None
        self.window += 1
        part = Range(
            file=opened.file, offset=start, end=self.offset, text_column=self.job.text_column,
            split_documents=self.job.split_documents, max_document_bytes=self.job.max_document_bytes,
            skip_bad=self.job.skip_bad, val_share=self.val_share,
        )  # fmt: skip
        after = Position(file=self.file, offset=self.offset, window=self.window)  # who reads the lines counts them
        return {
            "type": "range", "range": part.to_json(), "position": after.to_json(),
            "read_bytes": self.finished_bytes + self.offset,
        }  # fmt: skip

    def end(self) -> None:
        if self._opened is not None:
            self._opened.abandon()
            self._opened = None


def _end_of_line(raw: Any, wanted: int, size: int) -> int:
    """A place shortly before `wanted` where a line ends; the first one behind it where none is near."""
    if wanted >= size:
        return size
    raw.seek(wanted - TAIL_BYTES)
    tail = raw.read(TAIL_BYTES)
    if (at := tail.rfind(b"\n")) >= 0:
        return wanted - TAIL_BYTES + at + 1
    raw.seek(wanted)
    while piece := raw.read(BUFFER):
        if (at := piece.find(b"\n")) >= 0:
            return wanted + at + 1
        wanted += len(piece)
    return size


@dataclass
class Lines:
    """The documents of a range, the number of its lines, and how many of these were empty, bad or had text replaced."""

    documents: list[bytes]
    records: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0


def read(part: Range) -> Lines:
    """The documents of a range, parsed with limited memory. Raises UserError 'data.source_…'; lines count from it."""
    found = Lines([])
    before = Place(min(part.offset, 1), part.offset)  # the first line of a file alone is the first
    at = before
    opened = OpenFile(part.file)
    try:
        with limited_memory(MEMORY_BYTES + 4 * part.max_document_bytes):
            for document in documents(opened, part.format, before):
                at = document.place
                if document.text is not None:
                    found.documents.append(document.text)
                    found.replaced += document.replaced
                elif document.bad:
                    found.bad += 1
                else:
                    found.empty += 1
                if at.offset >= part.end:
                    break
        opened.close()
    except UserError as error:
        raise counted(error, -before.records) from None
    finally:
        opened.abandon()
    if at.offset != part.end:  # the same size and time as before, and other lines
        raise UserError("data.source_changed", path=part.file.path)
    found.records = at.records - before.records
    return found


def counted(error: UserError, before: int) -> UserError:
    """The same error, where there are `before` more lines in front of the one that it names."""
    named = {key: error.values[key] + before for key in ("line", "number") if key in error.values}
    return UserError(error.id, **{**error.values, **named})

"""A look at a source before anything is prepared: how much text its files hold, from a few of them. Reader process."""

from typing import BinaryIO

import numpy as np

from foretrain.base.records import Record
from foretrain.data.prepare.formats import OpenFile, Place, documents
from foretrain.data.prepare.ipc import send
from foretrain.data.prepare.reader import BATCH_DOCUMENTS, Job

MOST_FILES, MOST_REMOTE_FILES = 200, 4
MOST_BYTES = 4 * 2**20  # of text, from all of them together


class FileSample(Record):
    """What was read of one file: `text_bytes` in `documents`; `file_text_bytes` and `read_bytes` are for all of it.

    read_bytes: of the file itself, what has to be read (or fetched) for its text.
    """

    size_bytes: int
    text_bytes: int
    documents: int
    whole_text_bytes: float
    whole_documents: float
    whole_read_bytes: float


def spread(count: int, most: int) -> list[int]:
    """Places of up to `most` files, from the first to the last."""
    return sorted({i * (count - 1) // max(1, min(most, count) - 1) for i in range(min(most, count))})


def serve_sample(job: Job, pipe: BinaryIO) -> None:
    """One frame with texts for each sampled file; its header is the FileSample."""
    most = MOST_REMOTE_FILES if any(file.remote for file in job.files) else MOST_FILES
    chosen = spread(len(job.files), most)
    wanted = (job.sample_bytes or MOST_BYTES) // len(chosen)
    for number in chosen:
        file = job.files[number]
        send(pipe, {"type": "file", "path": file.path})
        opened = OpenFile(file)
        texts: list[bytes] = []
        size, place, complete = 0, Place(), True
        for document in documents(opened, job.format, Place()):
            place = document.place
            if document.text is not None:
                texts.append(document.text)
                size += len(document.text)
            if size >= wanted or len(texts) >= BATCH_DOCUMENTS:
                complete = False
                break
        sample = _scaled(opened, job, size, len(texts), place, complete=complete)
        send(
            pipe, {"type": "sample", "count": len(texts), "sample": sample.to_json()},
            np.array([len(text) for text in texts], "<u4").tobytes(), b"".join(texts),
        )  # fmt: skip
    send(pipe, {"type": "end"})


def _scaled(opened: OpenFile, job: Job, size: int, count: int, place: Place, *, complete: bool) -> FileSample:
    file, factor = opened.file, 1.0
    file_size = file.size_bytes or 0
    read: float = file_size
    if file.kind == "parquet":
        from foretrain.data.prepare.parquet import open_parquet

        parquet, leaf = open_parquet(opened, job.text_column)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        factor = parquet.metadata.num_rows / max(1, place.records)
        read = sum(group.column(leaf).total_compressed_size for group in groups)
    elif not complete:
        part: float = place.offset
        if opened.unpacked is not None:  # what was unpacked and not yet used counts for its share
            part = opened.read_bytes() * place.offset / max(1, opened.unpacked.total)
        factor = max(1.0, file_size / max(1, part))
    opened.abandon()
    return FileSample(
        size_bytes=file_size, text_bytes=size, documents=count, whole_text_bytes=size * factor,
        whole_documents=count * factor, whole_read_bytes=read,
    )  # fmt: skip

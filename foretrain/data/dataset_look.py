"""A look into a dataset: documents found by their separator, ids at a place, counts of what has no index. No numpy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.data.dataset import DatasetInfo
from foretrain.data.shards import HISTOGRAM_BINS, DatasetIndex, histogram_bin
from foretrain.data.token_layout import Layout, read_layout
from foretrain.data.token_reader import TokenReader

_PIECE_TOKENS = 2**19
_SEPARATORS = {"gpt2": 50256, "byte": 0}


class SplitSummary(Record):
    """What is known of a split. None: its files do not say, and it was not counted.

    `length_histogram`: bin b has the documents of 2^(b-1) to 2^b - 1 tokens, separator included.
    """

    tokens: int
    files: int
    size_bytes: int
    documents: int | None = None
    source_bytes: int | None = None
    min_id: int | None = None
    max_id: int | None = None
    length_histogram: tuple[int, ...] | None = None

    @property
    def tokens_per_byte(self) -> float | None:
        return self.tokens / self.source_bytes if self.source_bytes else None


class DatasetSummary(Record):
    """`foretrain data info`: a dataset and its splits; of a mixture, its parts."""

    dataset: DatasetInfo
    splits: dict[str, SplitSummary]
    source: str | None = None
    shard_tokens: int | None = None
    has_checksums: bool = False
    duplicates: int | None = None
    parts: "tuple[DatasetSummary, ...]" = ()


def summarize(info: DatasetInfo, *, count: bool = False) -> DatasetSummary:
    """What the files say; with `count` the documents of a dataset without an index are counted too."""
    if info.parts:
        parts = tuple(summarize(part.dataset, count=count) for part in info.parts)
        splits = {
            name: SplitSummary(
                tokens=sum(p.splits[name].tokens for p in parts), files=sum(p.splits[name].files for p in parts),
                size_bytes=sum(p.splits[name].size_bytes for p in parts),
            )
            for name in ("train", "val")
        }  # fmt: skip
        digests = all(p.has_checksums for p in parts)
        return DatasetSummary(dataset=info, splits=splits, parts=parts, has_checksums=digests)
    layout = read_layout(Path(info.path), info.dtype, present=info.remote is None)
    splits = {}
    for name, segments in layout.splits.items():
        size = sum(segment.end for segment in segments)
        known: dict[str, Any] = {"tokens": layout.tokens(name), "files": len(segments), "size_bytes": size}
        if layout.index is not None:
            known |= _from_index(layout.index, name)
        elif count:
            known |= _counted(layout, name, separator_of(info))
        splits[name] = SplitSummary(**known)
    index = layout.index
    if index is None:
        return DatasetSummary(dataset=info, splits=splits)
    return DatasetSummary(
        dataset=info, splits=splits, source=index.source.description, shard_tokens=index.settings.shard_tokens,
        has_checksums=True, duplicates=index.counts.duplicates if index.settings.dedup else None,
    )  # fmt: skip


def _from_index(index: DatasetIndex, name: str) -> dict[str, Any]:
    split = index.splits[name]
    keys = ("documents", "source_bytes", "min_id", "max_id", "length_histogram")
    return {key: getattr(split, key) for key in keys}


def _counted(layout: Layout, name: str, separator: int | None) -> dict[str, Any]:
    """Every id looked at: least, largest, and documents where their separator is known."""
    reader, low, high = TokenReader(layout.splits[name]), None, None
    for position in range(0, reader.tokens, _PIECE_TOKENS):
        ids = memoryview(reader.read(position, _PIECE_TOKENS)).cast("H" if reader.item_bytes == 2 else "I")
        least, largest = min(ids), max(ids)
        low, high = least if low is None else min(low, least), largest if high is None else max(high, largest)
    found: dict[str, Any] = {"min_id": low, "max_id": high}
    if separator is None:
        return found
    histogram, last = [0] * HISTOGRAM_BINS, 0
    for end in separators(reader, separator):
        if end:  # a separator at the very start has no document before it
            histogram[histogram_bin(end + 1 - last)] += 1
        last = end + 1
    if last < reader.tokens and not ends_documents(reader, separator):
        histogram[histogram_bin(reader.tokens - last)] += 1
    return {**found, "documents": sum(histogram), "length_histogram": tuple(histogram)}


def separator_of(info: DatasetInfo) -> int | None:
    """The id between documents: the index says it, or the tokenizer's name; None where neither does."""
    layout = read_layout(Path(info.path), info.dtype, present=False)
    return layout.index.tokenizer.separator if layout.index else _SEPARATORS.get(info.tokenizer or "")


def documents_of(info: DatasetInfo, split: str) -> tuple[int, ...]:
    """How many documents end in each file of a split, where an index says it."""
    layout = read_layout(Path(info.path), info.dtype, present=False)
    return tuple(shard.documents for shard in layout.index.splits[split].shards) if layout.index else ()


def ends_documents(reader: TokenReader, separator: int) -> bool:
    """Whether a separator is behind its document, as in foretrain's and nanoGPT's sets, or before it, as in llm.c's."""
    return reader.ids(0, 1) != [separator]


def separators(reader: TokenReader, separator: int, start: int = 0) -> Iterator[int]:
    """The positions of a separator from `start` on."""
    item = reader.item_bytes
    pattern = separator.to_bytes(item, "little")
    for position in range(start, reader.tokens, _PIECE_TOKENS):
        data = reader.read(position, _PIECE_TOKENS)
        at = data.find(pattern)
        while at >= 0:
            if at % item == 0:
                yield position + at // item
            at = data.find(pattern, at + 1)


def document_at(reader: TokenReader, separator: int, number: int, index_documents: tuple[int, ...] = ()) -> int:
    """Where document `number`, counted from 0, begins. `index_documents`: how many end in each segment.

    Raises UserError 'data.no_document'.
    """
    before = start = 0
    for count, end in zip(index_documents, reader.ends, strict=False):
        if before + count >= number:
            break
        before, start = before + count, end
    wanted = number if ends_documents(reader, separator) else number + 1
    if wanted == 0:
        return 0
    for found, position in enumerate(separators(reader, separator, start), start=before + 1):
        before = found
        if found == wanted and position + 1 < reader.tokens:
            return position + 1
    path = str(reader.segments[0].path.parent)
    raise UserError("data.no_document", path=path, number=number, count=before)

"""What a dataset holds: a look at it, its checksums, its statistics."""

import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.records import Record
from foretrain.data.dataset import DatasetInfo, read_meta
from foretrain.data.shards import HISTOGRAM_BINS, DatasetIndex, histogram_bin, is_block
from foretrain.data.token_layout import Layout, Segment, read_layout
from foretrain.data.token_reader import TokenReader, fetch_of, read_at, readers
from foretrain.data.tokenizer import tokenizer_of
from foretrain.hardware.cpu import usable_cores

if TYPE_CHECKING:
    import numpy as np

_PIECE_TOKENS = 2**19
_SEPARATORS = {"gpt2": 50256, "byte": 0}


class SplitSummary(Record):
    """A split's figures; None: not counted. `length_histogram`: bin b has documents of 2^(b-1) to 2^b - 1 tokens."""

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
    dataset: DatasetInfo
    splits: dict[str, SplitSummary]
    source: str | None = None
    shard_tokens: int | None = None
    has_checksums: bool = False
    duplicates: int | None = None
    parts: "tuple[DatasetSummary, ...]" = ()


def summarize(info: DatasetInfo, *, count: bool = False) -> DatasetSummary:
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
    layout = read_layout(Path(info.path), info.dtype, present=False)
    return layout.index.tokenizer.separator if layout.index else _SEPARATORS.get(info.tokenizer or "")


def documents_of(info: DatasetInfo, split: str) -> tuple[int, ...]:
    layout = read_layout(Path(info.path), info.dtype, present=False)
    return tuple(shard.documents for shard in layout.index.splits[split].shards) if layout.index else ()


def ends_documents(reader: TokenReader, separator: int) -> bool:
    """Return whether a separator is behind its document, as foretrain's and nanoGPT's, or before it, as llm.c's."""
    return reader.ids(0, 1) != [separator]


def separators(reader: TokenReader, separator: int, start: int = 0) -> Iterator[int]:
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
    """Return where document `number` begins. `index_documents`: how many end in each segment. Raises UserError."""
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


# Only foretrain's own index has digests. Without one, headers and the meta file are checked.

_PIECE_BYTES = 2**20
Progress = Callable[[int], None]  # bytes looked at since the last call


@dataclass(frozen=True)
class Verified:
    files: int
    size_bytes: int
    checked_bytes: int
    took_s: float
    problems: tuple[UserError, ...]


def segments_of(info: DatasetInfo) -> list[tuple[DatasetInfo, Segment]]:
    """Return every file of a dataset with its dataset. Raises UserError where the index itself is wrong."""
    if info.parts:
        return [pair for part in info.parts for pair in segments_of(part.dataset)]
    folder = Path(info.path)
    layout = read_layout(folder, info.dtype, present=False)
    splits = {} if layout.index else read_meta(folder).get("splits")
    found = []
    for split, segments in layout.splits.items():
        known = splits.get(split) if isinstance(splits, dict) else None
        digest = known.get("sha256") if isinstance(known, dict) else None
        own = isinstance(digest, str) and len(segments) == 1 and layout.format == "nanogpt"
        found += [(info, replace(s, sha256=str(digest)) if own else s) for s in segments]
    return found


def verify(info: DatasetInfo, progress: Progress = lambda count: None, threads: int = 0) -> Verified:
    """Check all of a dataset. `threads` 0: one for each core. Raises UserError where the index itself is wrong."""
    started, found = time.monotonic(), segments_of(info)
    lock = threading.Lock()

    def tell(count: int) -> None:
        with lock:
            progress(count)

    def one(pair: tuple[DatasetInfo, Segment]) -> list[UserError]:
        return _problems(*pair, tell)

    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        try:
            problems = [problem for result in pool.map(one, found) for problem in result]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    problems += [problem for own in {id(own): own for own, _ in found}.values() for problem in _of_tokenizer(own)]
    checked = sum(s.end for _, s in found if s.blocks or s.sha256)
    size = sum(s.end for _, s in found)
    return Verified(len(found), size, checked, time.monotonic() - started, tuple(problems))


def _of_tokenizer(info: DatasetInfo) -> list[UserError]:
    try:
        if info.tokenizer_sha256 is not None:
            tokenizer_of(info)
    except UserError as error:
        return [error] if error.exit_code == ExitCode.DATA else []
    return []


def _problems(info: DatasetInfo, segment: Segment, progress: Progress) -> list[UserError]:
    path, found = str(segment.path), []
    try:
        fetch = fetch_of(info)
        if fetch is not None and not segment.path.is_file():
            fetch(segment)
        with segment.path.open("rb", buffering=0) as file:
            if (have := os.fstat(file.fileno()).st_size) != segment.end:
                found.append(UserError("data.wrong_size", path=path, have=have, want=segment.end))
            whole, buffer = hashlib.sha256(), memoryview(bytearray(segment.block_bytes or _PIECE_BYTES))
            for number, first in enumerate(range(0, segment.end, len(buffer))):
                view = buffer[: segment.end - first]
                size = read_at(file, first, view)
                if segment.blocks and (size < len(view) or not is_block(view, segment.blocks, number)):
                    last = first + len(view) - 1
                    found.append(UserError("data.bad_block", path=path, block=number, first=first, last=last))
                elif segment.sha256 and not segment.blocks:
                    whole.update(view[:size])
                progress(size)
            if segment.sha256 and not segment.blocks and whole.hexdigest() != segment.sha256:
                found.append(UserError("data.bad_digest", path=path))
    except FileNotFoundError:
        found.append(UserError("data.missing_file", path=path))
    except OSError as error:
        found.append(UserError("data.unreadable", path=path, reason=error.strerror or str(error)))
    except UserError as error:
        found.append(error)
    return found


_MAX_TOKENS = 50_000_000
_COUNTED_TOKENS = 2**22


def unigram_entropy(info: DatasetInfo) -> float | None:
    """Return the cross-entropy (nats per token) of the validation split under the training split's frequencies, of at
    most 50 M tokens; None where the files or numpy are missing."""
    fetched = info.remote or any(part.dataset.remote for part in info.parts)
    if importlib.util.find_spec("numpy") is None or fetched:
        return None
    import numpy as np

    try:
        counts = [_counts(info, split) for split in ("train", "val")]
    except (UserError, OSError):
        return None
    size = max(len(c) for c in counts)
    train, val = (np.pad(c, (0, size - len(c))) for c in counts)
    smoothed = (train + 1) / (train.sum() + size)  # add-one, so that a token seen only in val has a probability
    return float(-(val * np.log(smoothed)).sum() / val.sum())


def _counts(info: DatasetInfo, split: str) -> "np.ndarray":
    import numpy as np

    parts = list(zip(readers(info, split, verify=False), [p.weight for p in info.parts] or [1.0], strict=True))
    looked_at = min(_MAX_TOKENS, *(reader.tokens / share for reader, share in parts))
    total = np.zeros(info.vocab_size or 0)
    for reader, share in parts:
        tokens = round(looked_at * share)
        for position in range(0, tokens, _COUNTED_TOKENS):
            piece = reader.read(position, min(_COUNTED_TOKENS, tokens - position))
            ids = np.frombuffer(piece, dtype=f"<u{reader.item_bytes}")
            found = np.bincount(ids, minlength=len(total)).astype(np.float64)
            found[: len(total)] += total
            total = found
    return total

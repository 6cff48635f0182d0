"""Is a dataset what was written? Every block of every shard against its digest, on all cores; no numpy.

Digests are of foretrain's own index, which has one of itself. What has no index is held against what its headers and
its meta file say.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.dataset import DatasetInfo, read_meta
from foretrain.data.shards import is_block
from foretrain.data.token_layout import Segment, read_layout
from foretrain.data.token_reader import fetch_of, read_at
from foretrain.data.tokenizer import tokenizer_of
from foretrain.hardware.cpu import usable_cores

_PIECE_BYTES = 2**20
Progress = Callable[[int], None]  # bytes looked at since the last call


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what is wrong. `checked_bytes` were held against a digest."""

    files: int
    size_bytes: int
    checked_bytes: int
    took_s: float
    problems: tuple[UserError, ...]


def segments_of(info: DatasetInfo) -> list[tuple[DatasetInfo, Segment]]:
    """Every file of a dataset with the dataset that it belongs to. Raises UserError where the index itself is wrong."""
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
    """Look at all of a dataset. `threads` 0: one for each core. Raises UserError where the index itself is wrong."""
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
    """Of the files beside the shards; where its library is not here, nothing can be said."""
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

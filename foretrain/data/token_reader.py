"""Token ids by position, over the files of a layout: read with pread, never mapped; a file that shrinks is an error.
Where the index has digests, a block is verified at its first read. No numpy."""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from foretrain.base.errors import UserError
from foretrain.data.dataset import DatasetInfo
from foretrain.data.shards import block_count, is_block
from foretrain.data.token_layout import Segment, read_layout

_MOST_OPEN = 128  # files; a process has 1,024 on most systems

Fetch = Callable[[Segment], None]


class TokenReader:
    def __init__(self, segments: Sequence[Segment], *, verify: bool = True, fetch: Fetch | None = None) -> None:
        """`fetch` brings the file of a segment that is not here. All segments have one dtype."""
        self.segments = tuple(segments)
        self.ends = tuple(accumulate(segment.tokens for segment in segments))
        self.tokens = self.ends[-1] if self.ends else 0
        self.item_bytes = segments[0].item_bytes if segments else 2
        self.verified_bytes = 0
        self._fetch = fetch
        self._unseen = [bytearray([verify]) * block_count(s.blocks) for s in segments]
        self._left = [sum(unseen) for unseen in self._unseen]
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()
        self._lock = threading.Lock()

    def hold(self, most: int) -> int:
        here = [n for n, segment in enumerate(self.segments) if segment.path.is_file()][: max(0, min(most, _MOST_OPEN))]
        with self._lock:
            for number in here:
                self._file(number)
        return len(here)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill `view`, bytes, with ids from a position on. Raises UserError 'data.bad_block' and others."""
        done = 0
        with self._lock:
            while done < len(view):
                number = bisect_right(self.ends, position)
                if number >= len(self.ends):
                    raise IndexError(f"position {position} is behind the last of {self.tokens} tokens")
                segment = self.segments[number]
                inside = position - (self.ends[number] - segment.tokens)
                size = min(len(view) - done, (segment.tokens - inside) * self.item_bytes)
                self._read(number, segment.offset + inside * self.item_bytes, view[done : done + size])
                done, position = done + size, position + size // self.item_bytes

    def read(self, position: int, count: int) -> bytes:
        buffer = bytearray(max(0, min(count, self.tokens - position)) * self.item_bytes)
        self.read_into(position, memoryview(buffer))
        return bytes(buffer)

    def ids(self, position: int, count: int) -> list[int]:
        data, item = self.read(position, count), self.item_bytes
        return [int.from_bytes(data[i : i + item], "little") for i in range(0, len(data), item)]

    def _read(self, number: int, offset: int, view: memoryview) -> None:
        segment, file = self.segments[number], self._file(number)
        if self._left[number]:
            self._check(number, file, offset, offset + len(view))
        if read_at(file, offset, view) != len(view):
            raise self._shrunk(segment)

    def _check(self, number: int, file: BinaryIO, start: int, end: int) -> None:
        segment, unseen = self.segments[number], self._unseen[number]
        for block in range(start // segment.block_bytes, -(-end // segment.block_bytes)):
            if unseen[block]:
                first = block * segment.block_bytes
                data = memoryview(bytearray(min(segment.block_bytes, segment.end - first)))
                if read_at(file, first, data) != len(data):
                    raise self._shrunk(segment)
                if not is_block(data, segment.blocks, block):
                    raise UserError(
                        "data.bad_block", path=str(segment.path), block=block, first=first, last=first + len(data) - 1
                    )
                unseen[block] = 0
                self._left[number] -= 1
                self.verified_bytes += len(data)

    def _shrunk(self, segment: Segment) -> UserError:
        return UserError("data.shrunk", path=str(segment.path), tokens=segment.tokens)

    def _file(self, number: int) -> BinaryIO:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        segment = self.segments[number]
        if self._fetch is not None and not segment.path.is_file():
            self._fetch(segment)
        try:
            self._open[number] = file = segment.path.open("rb", buffering=0)
        except FileNotFoundError:
            raise UserError("data.missing_file", path=str(segment.path)) from None
        except OSError as error:
            raise UserError("data.unreadable", path=str(segment.path), reason=error.strerror or str(error)) from None
        return file


def read_at(file: BinaryIO, offset: int, view: memoryview) -> int:
    done = 0
    try:
        while done < len(view):
            if hasattr(os, "preadv"):
                got = os.preadv(file.fileno(), [view[done:]], offset + done)
            else:
                file.seek(offset + done)
                got = file.readinto(view[done:]) or 0  # type: ignore[attr-defined]
            if not got:
                break
            done += got
    except OSError as error:
        raise UserError("data.unreadable", path=str(file.name), reason=error.strerror or str(error)) from None
    return done


def readers(info: DatasetInfo, split: str, *, verify: bool = True) -> list[TokenReader]:
    """Return the readers of a split, in the order of the parts. Raises UserError 'data.…'."""
    if info.parts:
        return [reader for part in info.parts for reader in readers(part.dataset, split, verify=verify)]
    layout = read_layout(Path(info.path), info.dtype, present=info.remote is None)
    return [TokenReader(layout.splits[split], verify=verify, fetch=fetch_of(info))]


def fetch_of(info: DatasetInfo) -> Fetch | None:
    if info.remote is None:
        return None
    from foretrain.data.remote import fetch_shard

    remote = info.remote
    return lambda segment: fetch_shard(remote, segment)

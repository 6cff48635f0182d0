"""Batches of a split's tokens: which rows a step sees, and tensors of them, made where they are used."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from foretrain.base.errors import UserError
from foretrain.data.dataset import DatasetInfo
from foretrain.data.token_reader import TokenReader, readers

Order = Literal["random", "epochs"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6
_EPOCH, _OFFSET = 0x45504F43, 0x4F464653  # streams of their own: 'EPOC', 'OFFS'
_SHARE_BITS = 20  # weights are shares in 1/2^20


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64-bit words that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*words: int) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = _mix(state + _GOLDEN + np.uint64(word))
    return state


def starts(seed: int, stream: int, step: int, rows: int, positions: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        draws = _mix(_key(seed, stream, step) + np.arange(1, rows + 1, dtype=np.uint64) * _GOLDEN)
    return (draws % np.uint64(positions)).astype(np.int64)


def windows(tokens: int, block: int) -> int:
    return max(1, (tokens - block) // block)


def offset(seed: int, stream: int, epoch: int, tokens: int, block: int) -> int:
    room = min(block, tokens - windows(tokens, block) * block)
    return int(starts(seed, _OFFSET ^ stream, epoch, 1, room)[0])


def permuted(index: np.ndarray, count: int, seed: int, stream: int, epoch: int) -> np.ndarray:
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    with np.errstate(over="ignore"):
        keys = _mix(_key(seed, _EPOCH ^ stream, epoch) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)

        def once(x: np.ndarray) -> np.ndarray:
            left, right = x >> half, x & mask
            for key in keys:
                left, right = right, left ^ (_mix(right + key) & mask)
            return (left << half) | right

        found = once(index.astype(np.uint64))
        while (outside := found >= count).any():
            found[outside] = once(found[outside])
    return found.astype(np.int64)


def epoch_starts(seed: int, stream: int, rows: np.ndarray, tokens: int, block: int) -> np.ndarray:
    count = windows(tokens, block)
    epochs, inside = np.divmod(rows, count)
    found = np.empty(len(rows), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places = permuted(inside[here], count, seed, stream, epoch)
        found[here] = offset(seed, stream, epoch, tokens, block) + places * block
    return found


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    rest = [sum(weights[i:]) for i in range(len(weights))]
    return tuple(
        min(1 << _SHARE_BITS, round(weight / left * (1 << _SHARE_BITS)))
        for weight, left in zip(weights[:-1], rest, strict=False)
    )


def dealt(rows: np.ndarray, weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return (the part that each row comes from, how many rows of that part came before it). After any number of rows a
    part has its share, to less than a row for each part and to one in a million."""
    part = np.full(len(rows), len(weights) - 1, dtype=np.int64)
    counted, left = rows.astype(np.int64), np.ones(len(rows), dtype=bool)
    for number, share in enumerate(shares(weights)):
        before, after = _share_of(counted, share), _share_of(counted + 1, share)
        taken = left & (after > before)
        part[taken] = number
        counted = np.where(taken, before, np.where(left, counted - before, counted))
        left &= ~taken
    return part, counted


def _share_of(count: np.ndarray, share: int) -> np.ndarray:
    low = (1 << _SHARE_BITS) - 1
    return (count >> _SHARE_BITS) * share + (((count & low) * share) >> _SHARE_BITS)


Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and the ids that follow them, each B x T, int64

TRAIN, EVAL_TRAIN, EVAL_VAL = 0, 1, 2  # streams of random rows
_PART_STREAMS = 16  # the streams of a mixture's parts begin here
_SCAN_LIMIT_BYTES = 512 * 2**20
_SCAN_TOKENS = 2**23


class TokenFile:
    """Token ids of one split, the parts of a mixture one after the other; a file that shrinks is an error."""

    def __init__(self, info: DatasetInfo, split: str, vocab_size: int, *, verify: bool = True) -> None:
        self.path, self.vocab_size = Path(info.path), vocab_size
        self.readers = readers(info, split, verify=verify)
        self.weights = tuple(part.weight for part in info.parts) or (1.0,)
        self.sizes = tuple(reader.tokens for reader in self.readers)
        self.ends = tuple(accumulate(self.sizes))
        self.tokens = self.ends[-1]
        self._dtypes = [np.dtype(f"<u{reader.item_bytes}") for reader in self.readers]
        self._dtype = max(self._dtypes, key=lambda dtype: dtype.itemsize)
        for reader, known in zip(self.readers, [p.dataset.max_id for p in info.parts] or [info.max_id], strict=True):
            if known is None and reader.tokens * reader.item_bytes <= _SCAN_LIMIT_BYTES:
                self._scan(reader)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` ids from each start: len(starts) x length. Raises UserError where a file has changed."""
        rows = np.empty((len(starts), length), dtype=self._dtype)
        for row, start in zip(rows, starts.tolist(), strict=True):
            part = bisect_right(self.ends, start)
            inside = start - self.ends[part] + self.sizes[part]
            if self._dtypes[part] == self._dtype:
                self.readers[part].read_into(inside, row.view(np.uint8).data)
            else:
                row[:] = np.frombuffer(self.readers[part].read(inside, length), dtype=self._dtypes[part])
        return rows

    def checked_rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        rows = self.rows(starts, length)
        self._check(rows, self.path)
        return rows

    def _scan(self, reader: TokenReader) -> None:
        for position in range(0, reader.tokens, _SCAN_TOKENS):
            ids = np.frombuffer(reader.read(position, _SCAN_TOKENS), dtype=f"<u{reader.item_bytes}")
            self._check(ids, reader.segments[0].path)

    def _check(self, ids: np.ndarray, path: Path) -> None:
        """Raise UserError for an id without a row in the embedding, which would crash a CUDA process."""
        if ids.size and (largest := int(ids.max())) >= self.vocab_size:
            raise UserError("data.id_beyond_vocab", path=str(path), id=largest, vocab_size=self.vocab_size)

    def batch(self, starts: np.ndarray, block: int, device: torch.device) -> Batch:
        """Return rows of block + 1 tokens as (inputs, targets): len(starts) x block, int64."""
        return to_batch(self.checked_rows(starts, block + 1), device)

    def starts(self, order: Order, seed: int, stream: int, step: int, rows: int, block: int) -> np.ndarray:
        if len(self.sizes) == 1:
            return self._part_starts(0, order, seed, stream, step, rows, block, np.arange(rows) + step * rows)
        parts, counted = dealt(np.arange(rows, dtype=np.int64) + step * rows, self.weights)
        found = np.empty(rows, dtype=np.int64)
        for part in range(len(self.sizes)):
            here = parts == part
            own = _PART_STREAMS * (part + 1) + stream
            drawn = self._part_starts(part, order, seed, own, step, rows, block, counted[here], here)
            found[here] = drawn + self.ends[part] - self.sizes[part]
        return found

    def _part_starts(
        self, part: int, order: Order, seed: int, stream: int, step: int, rows: int, block: int,
        numbers: np.ndarray, here: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        if order == "epochs":
            return epoch_starts(seed, stream, numbers, self.sizes[part], block)
        drawn = starts(seed, stream, step, rows, self.sizes[part] - block)
        return drawn if here is None else drawn[here]


def to_batch(rows: np.ndarray, device: torch.device) -> Batch:
    """Make rows of ids to (inputs, targets), each one token shorter, int64, on the device."""
    if device.type == "cuda":  # one pinned copy, asynchronous
        return from_pinned(pinned(rows), device)
    inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
    return inputs.to(device), targets.to(device)


def pinned(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64)).pin_memory()


def from_pinned(rows: torch.Tensor, device: torch.device) -> Batch:
    data = rows.to(device, non_blocking=True)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def train_starts(
    tokens: TokenFile,
    seed: int,
    step: int,
    *,
    batch_size: int,
    accumulation: int,
    block: int,
    order: Order = "random",
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[np.ndarray]:
    """Yield the first tokens of each micro-batch of a step; `rank` takes every `world_size`-th of the cuts."""
    first = tokens.starts(order, seed, TRAIN, step, batch_size * accumulation * world_size, block)
    for micro in range(rank, accumulation * world_size, world_size):
        yield first[micro * batch_size : (micro + 1) * batch_size]


def evaluation_batches(
    tokens: TokenFile,
    seed: int,
    split: str,
    *,
    rows: int,
    batch_size: int,
    block: int,
    device: torch.device,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield the same rows at every evaluation. `part`: (which, of how many): every so many-th batch from it on."""
    stream = EVAL_TRAIN if split == "train" else EVAL_VAL
    first = tokens.starts("random", seed, stream, 0, rows, block)
    which, parts = part
    for start in range(which * batch_size, rows, parts * batch_size):
        yield tokens.batch(first[start : start + batch_size], block, device)

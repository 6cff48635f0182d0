"""Batches of a token file. Which tokens a step sees is a function of (seed, step) alone.

Rows are drawn as in nanoGPT, at random with replacement, but by hashing (seed, stream, step, row): the draw needs no
state, resumes anywhere, is the same for every micro-batch size and in every version of numpy.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from foretrain.errors import UserError
from foretrain.lm.dataset import ITEM_BYTES, DatasetInfo
from foretrain.lm.step import Batch

TRAIN, EVAL_TRAIN, EVAL_VAL = 0, 1, 2  # streams of random rows
_SCAN_LIMIT_BYTES = 512 * 2**20


class TokenFile:
    """Token ids of one split, read by position. Reads copy: a file that shrinks is an error, not a crash."""

    def __init__(self, info: DatasetInfo, split: str, vocab_size: int) -> None:
        self.path = Path(info.path) / f"{split}.bin"
        self.tokens = info.train_tokens if split == "train" else info.val_tokens
        self.vocab_size = vocab_size
        self._dtype = np.dtype(info.dtype)
        self._item = ITEM_BYTES[info.dtype]
        self._file = self.path.open("rb", buffering=0)
        if info.max_id is None and self.tokens * self._item <= _SCAN_LIMIT_BYTES:
            self._check(np.fromfile(self.path, dtype=self._dtype))

    def close(self) -> None:
        """Give the file back; a closed file reads nothing."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` ids from each start, as they lie in the file: len(starts) x length. Read straight into place.

        Raises UserError when the file is shorter than it was.
        """
        rows = np.empty((len(starts), length), dtype=self._dtype)
        for row, offset in zip(rows, (starts * self._item).tolist(), strict=True):
            if self._read_into(row, offset) != row.nbytes:
                raise UserError("data.shrunk", path=str(self.path), tokens=self.tokens)
        return rows

    def _read_into(self, row: np.ndarray, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [row.data], offset)
        self._file.seek(offset)
        return self._file.readinto(row.data) or 0

    def _check(self, ids: np.ndarray) -> None:
        """An id without a row in the embedding would kill a CUDA process; here it is a sentence."""
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise UserError("data.id_beyond_vocab", path=str(self.path), id=int(ids.max()), vocab_size=self.vocab_size)

    def batch(self, starts: np.ndarray, block: int, device: torch.device) -> Batch:
        """Rows of block + 1 tokens from each start, as (inputs, targets): len(starts) x block, int64."""
        rows = self.rows(starts, block + 1)
        self._check(rows)
        if device.type == "cuda":  # one pinned copy, asynchronous
            data = torch.from_numpy(rows.astype(np.int64)).pin_memory().to(device, non_blocking=True)
            return data[:, :-1].contiguous(), data[:, 1:].contiguous()
        inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
        return inputs.to(device), targets.to(device)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64-bit words that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def starts(seed: int, stream: int, step: int, rows: int, positions: int) -> np.ndarray:
    """First tokens of the rows of a step, each in [0, positions): a pure function of its arguments."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in (seed, stream, step):
            state = _mix(state + golden + np.uint64(word))
        counter = np.arange(1, rows + 1, dtype=np.uint64)
        draws = _mix(state + counter * golden)
    return (draws % np.uint64(positions)).astype(np.int64)


def train_batches(
    tokens: TokenFile,
    seed: int,
    step: int,
    *,
    batch_size: int,
    accumulation: int,
    block: int,
    device: torch.device,
) -> Iterator[Batch]:
    """The micro-batches of one optimizer step. Batch size and accumulation only cut the same rows differently."""
    first = starts(seed, TRAIN, step, batch_size * accumulation, tokens.tokens - block)
    for micro in range(accumulation):
        yield tokens.batch(first[micro * batch_size : (micro + 1) * batch_size], block, device)


def evaluation_batches(
    tokens: TokenFile,
    seed: int,
    split: str,
    *,
    rows: int,
    batch_size: int,
    block: int,
    device: torch.device,
) -> Iterator[Batch]:
    """The same rows at every evaluation, so that two differ by the model alone; the last batch may be a smaller one."""
    stream = EVAL_TRAIN if split == "train" else EVAL_VAL
    first = starts(seed, stream, 0, rows, tokens.tokens - block)
    for start in range(0, rows, batch_size):
        yield tokens.batch(first[start : start + batch_size], block, device)

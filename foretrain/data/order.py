"""Which rows a step sees, as a pure function of (seed, step): no state, so a run resumes anywhere.

`random` draws rows as nanoGPT does, with replacement, by hashing (seed, stream, step, row). `epochs` goes through
every window of the data once before any comes again. Neither depends on how a step is cut into micro-batches, nor on
how many processes share it.

An epoch. The tokens are cut into windows of `block` ids, each with the one that follows it, from an offset on that is
drawn anew for each epoch; a permutation of the windows' numbers orders them. It is a Feistel network (Luby and
Rackoff 1988) over the next power of four, walked until it is back inside (Black and Rogaway 2002), so it needs no
memory, however many windows there are. Fewer than two windows' tokens, at the two ends, are left out of an epoch, and
others in the next.
"""

from typing import Literal

import numpy as np

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
    """First tokens of the rows of a step, each in [0, positions): a pure function of its arguments."""
    with np.errstate(over="ignore"):
        draws = _mix(_key(seed, stream, step) + np.arange(1, rows + 1, dtype=np.uint64) * _GOLDEN)
    return (draws % np.uint64(positions)).astype(np.int64)


def windows(tokens: int, block: int) -> int:
    """Windows of one epoch: as many as there is room for wherever the first of them begins."""
    return max(1, (tokens - block) // block)


def offset(seed: int, stream: int, epoch: int, tokens: int, block: int) -> int:
    """Where the first window of an epoch begins."""
    room = min(block, tokens - windows(tokens, block) * block)
    return int(starts(seed, _OFFSET ^ stream, epoch, 1, room)[0])


def permuted(index: np.ndarray, count: int, seed: int, stream: int, epoch: int) -> np.ndarray:
    """The places of `index`, each in [0, count), in the permutation of an epoch: a bijection of [0, count)."""
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
    """First tokens of the rows with these numbers, counted from the beginning of the run."""
    count = windows(tokens, block)
    epochs, inside = np.divmod(rows, count)
    found = np.empty(len(rows), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places = permuted(inside[here], count, seed, stream, epoch)
        found[here] = offset(seed, stream, epoch, tokens, block) + places * block
    return found


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """For each part but the last: its share in 1/2^20 of what the parts before it have left."""
    rest = [sum(weights[i:]) for i in range(len(weights))]
    return tuple(
        min(1 << _SHARE_BITS, round(weight / left * (1 << _SHARE_BITS)))
        for weight, left in zip(weights[:-1], rest, strict=False)
    )


def dealt(rows: np.ndarray, weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(the part that each row comes from, how many rows of that part came before it).

    Rows are dealt evenly: after any number of them a part has its share, to less than a row for each part and to one
    in a million, as shares are kept in 1/2^20.
    """
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
    """floor(count x share / 2^20), in words that cannot overflow."""
    low = (1 << _SHARE_BITS) - 1
    return (count >> _SHARE_BITS) * share + (((count & low) * share) >> _SHARE_BITS)

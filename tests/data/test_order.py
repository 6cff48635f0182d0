"""The order of rows: a pure function of (seed, step); an epoch is a bijection; mixtures are dealt exactly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrain.data.batches import TokenFile, dealt, epoch_starts, offset, permuted, train_starts, windows
from foretrain.data.dataset import read_info
from tests.kit.tiny import write_dataset

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(1, 3000), st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(seed: int, count: int, epoch: int) -> None:
    found = permuted(np.arange(count), count, seed, 0, epoch)
    assert np.array_equal(np.sort(found), np.arange(count))


@given(seeds, st.integers(1, 2**60), st.integers(0, 2**60))
def test_places_of_huge_datasets_are_inside_and_differ(seed: int, count: int, first: int) -> None:
    index = np.unique((first + np.arange(64)) % count)
    found = permuted(index, count, seed, 0, 3)
    assert found.min() >= 0
    assert found.max() < count
    assert len(np.unique(found)) == len(index)


@given(seeds, st.integers(1, 40), st.integers(2, 2000), st.integers(1, 30), st.integers(1, 4))
def test_no_token_is_lost_or_repeated_in_an_epoch(seed: int, block: int, tokens: int, rows: int, epochs: int) -> None:
    """Rows taken a step at a time, of any number a step; each epoch's targets, counted one by one."""
    tokens = max(tokens, block + 1)
    count = windows(tokens, block)
    asked = np.concatenate([np.arange(rows) + step * rows for step in range(-(-count * epochs // rows))])
    first = epoch_starts(seed, 0, asked, tokens, block)[: count * epochs].reshape(epochs, count)
    for epoch in range(epochs):
        seen = np.zeros(tokens, dtype=np.int64)
        for start in first[epoch]:
            seen[start + 1 : start + block + 1] += 1
        assert first[epoch].min() >= 0
        assert first[epoch].max() + block + 1 <= tokens
        assert seen.max() == 1  # none is repeated
        begin = offset(seed, 0, epoch, tokens, block)
        assert seen[begin + 1 : begin + count * block + 1].all()  # none is lost between the first and the last
        assert begin < block
        assert tokens - (begin + count * block) <= max(block * 2, 1)
        assert seen[0] == 0
        assert tokens - seen.sum() <= 2 * block  # the two ends


def test_epochs_differ_in_order_and_in_their_cuts() -> None:
    tokens, block = 100_000, 64
    count = windows(tokens, block)
    first = epoch_starts(1, 0, np.arange(4 * count), tokens, block).reshape(4, count)
    assert len({int(row[0] % block) for row in first}) > 1
    assert not np.array_equal(first[0] - first[0].min(), first[1] - first[1].min())
    correlation = np.corrcoef(np.arange(count), first[0])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(count)


def test_the_permutation_is_pinned() -> None:
    """A resumed run must see the same data in every version."""
    assert permuted(np.arange(6), 1000, 1337, 0, 0).tolist() == [833, 567, 415, 76, 250, 174]


weights_of = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6).map(lambda w: tuple(x / sum(w) for x in w))


@given(weights_of, st.integers(0, 10**12), st.integers(1, 300))
def test_dealt_rows_count_on_without_gaps(weights: tuple[float, ...], first: int, rows: int) -> None:
    part, counted = dealt(np.arange(rows, dtype=np.int64) + first, weights)
    for number in range(len(weights)):
        own = counted[part == number]
        assert np.array_equal(own, own[:1] + np.arange(len(own)))
        if len(own):
            expected = (first + rows) * weights[number]
            assert abs(own[-1] + 1 - expected) <= len(weights) + rows + 2e-6 * (first + rows)


def test_dealt_is_exact_for_halves() -> None:
    part, _ = dealt(np.arange(1000, dtype=np.int64), (0.25, 0.25, 0.5))
    assert np.abs(np.bincount(part) - [250, 250, 500]).max() <= 1
    part, _ = dealt(np.arange(1000, dtype=np.int64), (0.5, 0.5))
    assert np.bincount(part).tolist() == [500, 500]


@pytest.mark.parametrize("order", ["random", "epochs"])
@given(world=st.integers(1, 5), accumulation=st.integers(1, 4), batch=st.integers(1, 3), step=st.integers(0, 500))
def test_ranks_share_one_order(order: str, world: int, accumulation: int, batch: int, step: int) -> None:
    """The ranks' micro-batches, one after the other, are those of one process with all of them."""
    file = _file()
    options = {"batch_size": batch, "block": 8, "order": order}

    def rows(rank: int, size: int, count: int) -> list[np.ndarray]:
        return list(train_starts(file, 5, step, accumulation=count, rank=rank, world_size=size, **options))

    alone = rows(0, 1, accumulation * world)
    shared = [rows(rank, world, accumulation) for rank in range(world)]
    together = [shared[rank][micro] for micro in range(accumulation) for rank in range(world)]
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


_made: list[TokenFile] = []


def _file() -> TokenFile:
    if not _made:
        _made.append(TokenFile(read_info(write_dataset(Path("data/toy").absolute())), "train", 96))
    return _made[0]


def test_epochs_do_not_depend_on_the_cut() -> None:
    file = TokenFile(read_info(write_dataset(Path("data/toy"))), "train", 96)

    def rows(batch: int, accumulation: int) -> np.ndarray:
        found = train_starts(file, 1, 7, batch_size=batch, accumulation=accumulation, block=8, order="epochs")
        return np.concatenate(list(found))

    assert np.array_equal(rows(8, 1), rows(2, 4))
    assert np.array_equal(rows(8, 1), rows(1, 8))
    assert torch.tensor(rows(8, 1)).unique().numel() == 8

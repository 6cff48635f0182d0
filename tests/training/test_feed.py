"""Reading ahead: the same batches, bitwise; errors are the trainer's; no thread is left behind; waits are counted."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.batches import TokenFile
from foretrain.data.dataset import read_info
from foretrain.runs.folder import create
from foretrain.training.device import place
from foretrain.training.feed import Ahead, Feed, token_files
from foretrain.training.trainer import Trainer
from tests.kit.batches import train_batches
from tests.kit.command import foretrain, refused
from tests.kit.data import shards
from tests.kit.tiny import tiny, write_dataset

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "foretrain-data"]


def test_files_are_open_from_the_beginning() -> None:
    """A process that can open no more later, or whose files lose their names, goes on: also to its first evaluation."""
    info = read_info(write_dataset(Path("data/toy")))
    both = token_files(tiny(), info)
    wanted = [np.fromfile(f"data/toy/{split}.bin", np.uint16)[:5] for split in ("train", "val")]
    for split in ("train", "val"):
        Path(f"data/toy/{split}.bin").unlink()
    for file, ids in zip(both, wanted, strict=True):
        assert file.rows(np.array([0]), 5)[0].tolist() == ids.tolist()
        file.close()


def tokens() -> TokenFile:
    return TokenFile(read_info(write_dataset(Path("data/toy"))), "train", 96)


def plain(file: TokenFile, config: Any, step: int) -> list[torch.Tensor]:
    found = train_batches(
        file, config.seed, step, batch_size=config.batch_size, accumulation=config.gradient_accumulation_steps,
        block=config.block_size, device=CPU, order=config.data_order,
    )  # fmt: skip
    return [torch.stack(batch) for batch in found]


def fed(feed: Feed, config: Any, step: int) -> list[torch.Tensor]:
    return [torch.stack(batch) for batch in feed.batches(config, step)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_batches_are_the_same_with_and_without_the_thread(order: str) -> None:
    file, config = tokens(), tiny(data_order=order)
    with Feed(file, CPU) as feed:
        for step in range(config.max_iters):
            assert same(fed(feed, config, step), plain(file, config, step))
    with Feed(file, CPU) as feed:  # begun anywhere
        assert same(fed(feed, config, 7), plain(file, config, 7))
        assert same(fed(feed, config, 3), plain(file, config, 3))


def test_a_step_that_is_taken_back_is_read_again_and_cut_anew() -> None:
    """What an out-of-memory does: the step breaks off after some micro-batches, and comes back smaller."""
    file, config = tokens(), tiny()
    smaller = tiny(batch_size=2, gradient_accumulation_steps=4)
    with Feed(file, CPU) as feed:
        fed(feed, config, 0)
        broken = feed.batches(config, 1)
        next(broken)
        assert same(fed(feed, smaller, 1), plain(file, smaller, 1))
        assert same(fed(feed, smaller, 2), plain(file, smaller, 2))
        again = feed.batches(smaller, 3)
        next(again)
        assert same(fed(feed, smaller, 3), plain(file, smaller, 3))
        whole = [torch.cat(fed(feed, c, 4), dim=1) for c in (config, smaller)]
        assert torch.equal(*whole)


def test_ranks_are_fed_their_own_rows() -> None:
    file, config = tokens(), tiny(gradient_accumulation_steps=1)
    alone = tiny(gradient_accumulation_steps=3)
    feeds = [Feed(file, CPU, rank, 3) for rank in range(3)]
    shared = [fed(feed, config, 5)[0] for feed in feeds]
    for feed in feeds:
        feed.close()
    assert same(shared, plain(file, alone, 5))


def test_reading_ahead_is_bounded() -> None:
    made: list[int] = []

    def items() -> Iterator[torch.Tensor]:
        for number in range(100):
            made.append(number)
            yield torch.tensor([number])

    ahead = Ahead(items(), 3)
    while len(made) < 4:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == 4  # three wait, and one is in hand
    assert [int(ahead.get()[0]) for _ in range(10)] == list(range(10))
    ahead.close()
    assert len(made) < 100


def test_a_wait_is_counted() -> None:
    file, config = tokens(), tiny()
    read: Callable[..., np.ndarray] = file.checked_rows

    def slow(*words: Any) -> np.ndarray:
        time.sleep(0.02)
        return read(*words)

    file.checked_rows = slow  # type: ignore[method-assign]
    with Feed(file, CPU) as feed:
        assert feed.mean_wait_s is None
        for step in range(6):
            fed(feed, config, step)
        assert feed.take_wait_s() > 0.02  # two micro-batches a step
        assert feed.take_wait_s() == 0
        assert feed.mean_wait_s > 0.02


def trainer(**changes: Any) -> Trainer:
    config = tiny(dataset="toy", **changes)
    folder = Path("data/toy")
    if not folder.exists():
        shards(folder, 200)
    return Trainer(config, read_info(folder), create("out"), place(config))


@pytest.mark.fault(
    "a flipped bit in a shard of foretrain's", row="B.4",
    sees="exit code 7 with file and block",
    safe="everything up to the last checkpoint: its tokens were not used",
)  # fmt: skip
def test_a_flipped_bit_ends_a_run_with_its_sentence() -> None:
    own = trainer(max_iters=60, vocab_size=256)
    path = Path("data/toy/train-00003.bin")
    data = bytearray(path.read_bytes())
    data[50] ^= 4
    path.write_bytes(data)
    with refused("data.bad_block", code=ExitCode.DATA):
        own.run()
    record = own.directory.read_record()
    assert (record.status, record.reason) == ("failed", "data.bad_block")


@pytest.mark.fault(
    "a data file shrinks under the run", row="B.4",
    sees="exit code 7 with the file",
    safe="everything up to the last checkpoint",
)  # fmt: skip
def test_a_shard_cut_short_during_a_run_is_a_sentence() -> None:
    own = trainer(max_iters=60, vocab_size=256, verify_data=False)
    for path in Path("data/toy").glob("train*.bin"):
        os.truncate(path, 40)
    with pytest.raises(UserError, match="is shorter than"):
        own.run()


def test_a_run_records_what_it_waited() -> None:
    record = trainer(vocab_size=256).run()
    assert 0 <= record.data_wait_s <= record.wall_s
    assert '"data_wait_s"' in Path("out/metrics.jsonl").read_text()


def test_an_error_in_the_step_leaves_no_thread() -> None:
    own = trainer(vocab_size=256)

    def broken(event: Any) -> None:
        raise KeyboardInterrupt

    own.listen = broken
    with pytest.raises(KeyboardInterrupt):
        own.run()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_stopped_run_goes_on_bitwise(order: str) -> None:
    whole = trainer(vocab_size=256, data_order=order)
    whole.run()
    half = trainer(vocab_size=256, data_order=order)
    half.listen = lambda event: half.flag.request("SIGTERM") if getattr(event, "step", 0) == 6 else None
    half.run()
    half.directory.release()
    again = Trainer(half.config, half.info, half.directory, place(half.config))
    again.run(resume=True)
    for a, b in zip(whole.state.model.parameters(), again.state.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bad_shards_on_the_command_line() -> None:
    shards(Path("data/toy"), 200)
    path = Path("data/toy/train-00001.bin")
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    model = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=16", "--device=cpu", "--compile=false"]
    result = foretrain(
        "train",
        "--dataset=toy",
        *model,
        "--decay_lr=false",
        "--max_iters=50",
        "--eval_iters=1",
        "--batch_size=8",
        code=7,
    )
    assert "train-00001.bin: block 1 (bytes 256 to 511)" in result.stderr

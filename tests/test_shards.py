"""Checkpoints that several ranks write and any number of ranks reads: over gloo, in processes of their own."""

from itertools import product
from pathlib import Path

import pytest
import torch

from foretrain.training import checkpoint
from tests.kit.gloo import MICRO_BATCHES, on_ranks, train_and_save
from tests.kit.tiny import tiny, write_dataset

# 33 and 17 are cut unevenly by 2, 3 and 4.
CONFIG = tiny(n_layer=2, n_head=3, n_embd=33, vocab_size=97, block_size=17, batch_size=1, dropout=0.1)
FOLDER = Path("checkpoints")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(write_dataset(tmp_path / "data"))


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, each as a whole."""
    path, found = checkpoint.path_of(folder, step), {}
    assert checkpoint.problem_of(path) is None
    for kind in checkpoint.KINDS:
        with checkpoint.tensors_in(path, kind) as tensors:
            found |= {f"{kind}/{name}": split.whole().clone() for name, split in tensors.items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def assert_switched(first: tuple[str, int], second: tuple[str, int], data: str, more: int = 3) -> None:
    """Train 2 steps with one strategy on so many ranks, and go on with another on others."""
    whole = on_ranks(train_and_save, first[1], CONFIG, first[0], data, "whole", 0, 2, 2 + more)
    on_ranks(train_and_save, second[1], CONFIG, second[0], data, "whole", 2, 2, 2, "copy")
    assert_same(tensors_of(Path("whole"), 2), tensors_of(Path("copy"), 2))
    onward = on_ranks(train_and_save, second[1], CONFIG, second[0], data, "whole", 2, 2 + more, 2 + more)
    expected, found = whole[0]["losses"][2:], onward[0]["losses"]
    if first == second:
        assert found == expected
        on_ranks(train_and_save, first[1], CONFIG, first[0], data, "unbroken", 0, 2 + more, 2 + more)
        assert_same(tensors_of(Path("unbroken"), 2 + more), tensors_of(Path("whole"), 2 + more))
    for a, b in zip(expected, found, strict=True):
        assert float.fromhex(b) == pytest.approx(float.fromhex(a), rel=1e-6)
    seen = sorted(tuple(each[:2]) for rank in whole for each in rank["seen"] if each[0] < 2)
    seen += sorted(tuple(each[:2]) for rank in onward for each in rank["seen"])
    assert seen == list(product(range(2 + more), range(MICRO_BATCHES)))
    rows = {tuple(each[:2]): each[2] for rank in whole for each in rank["seen"]}
    assert all(each[2] == rows[tuple(each[:2])] for rank in onward for each in rank["seen"])


QUICK = [
    (("ddp", 2), ("ddp", 1)), (("ddp", 1), ("fsdp", 3)), (("fsdp", 3), ("zero1", 2)), (("fsdp", 2), ("fsdp", 2)),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), QUICK)
def test_any_number_of_ranks_goes_on(first: tuple[str, int], second: tuple[str, int], data: str) -> None:
    assert_switched(first, second, data)

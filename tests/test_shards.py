"""Checkpoints that several ranks write and any number of ranks reads: over gloo, in processes of their own."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from foretrain.config.weights_file import WeightsFile, look
from foretrain.model.step import build
from foretrain.training import checkpoint, starting
from foretrain.training.export import export
from tests.kit.gloo import MICRO_BATCHES, loaded, misfortunes, on_ranks, saved_beside_steps, started, train_and_save
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import tensors_of as kept
from tests.kit.training import train

# 33 and 17 are cut unevenly by 2, 3 and 4.
CONFIG = tiny(n_layer=2, n_head=3, n_embd=33, vocab_size=97, block_size=17, batch_size=1, dropout=0.1)
FOLDER = Path("checkpoints")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of two ranks after the first step and the second."""
    folder = tmp_path_factory.mktemp("two")
    data = str(write_dataset(folder / "data"))
    for step in (1, 2):
        on_ranks(train_and_save, 2, CONFIG, "fsdp", data, str(folder / "checkpoints"), step - 1, step, step)
    return folder / "checkpoints"


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(("before", "after"), list(product(range(1, 5), repeat=2)))
def test_every_number_of_ranks_goes_on_from_every_other(before: int, after: int, strategy: str, data: str) -> None:
    assert_switched((strategy, before), (strategy, after), data, more=50)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("strategy", ["zero1", "fsdp_no_reshard", "hsdp"])
def test_what_is_saved_beside_steps_is_the_state_of_its_moment(strategy: str) -> None:
    """Held against what torch itself gathers, and read by torch's own reader of such files."""
    world = 4 if strategy == "hsdp" else 2
    states = on_ranks(saved_beside_steps, world, CONFIG, strategy, "checkpoints")
    before = {name: torch.from_numpy(array) for state in states for name, array in state.items()}
    assert_same(tensors_of(FOLDER, 1), before)
    found = {name.split("/", 1)[1]: torch.empty_like(tensor) for name, tensor in before.items()}
    reader = HuggingFaceStorageReader(str(checkpoint.path_of(FOLDER, 1)))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, {name.split("/", 1)[1]: tensor for name, tensor in before.items()})


def test_what_fails_on_one_rank_is_heard_on_all_and_harms_no_checkpoint(data: str) -> None:
    ranks = started(misfortunes, 2, CONFIG, "checkpoints")
    done, heard = ranks[0][1].recv()
    for process, _ in ranks:
        process.join()
    assert done, heard
    assert {word: heard[word][0] for word in heard if heard[word] != "nothing" and word != "told"} == {
        "full": "disk.full", "last": "disk.full", "start": "environment.not_shared",
        "unshared save": "environment.not_shared", "unshared load": "environment.not_shared",
        "nan": "diverged.weights", "gone": "gone",
    }  # fmt: skip
    assert heard["told"] == ["save_failed"] * 2
    assert "rank 1" in heard["unshared save"][1]
    assert checkpoint.steps_in(FOLDER) == [1]
    assert on_ranks(loaded, 1, CONFIG, "ddp", "checkpoints") == [(1, ())]
    checkpoint.sweep(FOLDER)  # as a start does
    assert [path.name for path in FOLDER.iterdir()] == ["step-0000000001"]


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "manifest cut", "rank left out"])
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(damage: str, two: Path) -> None:
    shutil.copytree(two, FOLDER)
    path = checkpoint.path_of(FOLDER, 2)
    part, manifest = path / "optimizer.rank-1.safetensors", path / "manifest.json"
    content = part.read_bytes()
    if damage == "missing":
        part.unlink()
    elif damage == "flipped":
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        part.write_bytes(content[:-1])
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:-100])
    else:
        told = json.loads(manifest.read_text())
        del told["files"][part.name]
        manifest.write_text(json.dumps(told, indent=1))
    expected = {
        "missing": "optimizer.rank-1.safetensors is missing", "flipped": f"{part.name} does not match its digest",
        "cut": f"{part.name} has {len(content) - 1} bytes instead of {len(content)}",
        "manifest cut": "its manifest cannot be read (JSONDecodeError)", "rank left out": "its manifest is incomplete",
    }[damage]  # fmt: skip
    if damage in ("missing", "flipped"):
        found = on_ranks(loaded, 3, CONFIG, "ddp", str(FOLDER))
        assert found == [(1, ((path.name, expected),))] * 3
    assert checkpoint.newest_valid(FOLDER) == (checkpoint.path_of(FOLDER, 1), ((path.name, expected),))


def test_every_command_reads_what_ranks_wrote(data: str) -> None:
    """The newest checkpoint of a run on one card, written again by three ranks: all that reads it finds the same."""
    config = CONFIG.model_copy(update={"max_iters": 2, "init_optimizer": True})
    run = Path(train(config).id)
    path = checkpoint.path_of(run / "checkpoints", 2)

    def read(name: str) -> tuple[dict[str, bytes], WeightsFile, dict[str, torch.Tensor]]:
        made = [export(run, form, Path(f"{name}-{form}")) for form in ("safetensors", "nanogpt", "hf")]
        files = {f"{each.form} {file}": Path(each.path, file).read_bytes() for each in made for file in each.files}
        weights = look(str(run))
        state = build(config.model_copy(update={"seed": 5}), torch.device("cpu"), torch.float32, compile=False)
        assert starting.put(weights, state, Path()).step == 2
        checkpoint.load_model(path, state.model)
        return files, weights.model_copy(update={"files": ()}), kept(state)

    one = read("one")
    on_ranks(train_and_save, 3, CONFIG, "fsdp", data, str(run / "checkpoints"), 2, 2, 2)
    assert len(list(path.glob("model.*.safetensors"))) == 3
    three = read("three")
    assert three[:2] == one[:2]
    assert_same(three[2], one[2])

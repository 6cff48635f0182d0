"""Checkpoints that several ranks write and any number of ranks reads: over gloo, in processes of their own."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from foretrain.config.weights_file import WeightsFile, inspect_weights
from foretrain.model.step import build
from foretrain.training import checkpoint, starting
from foretrain.training.exports.source import export
from tests.kit.gloo import (
    MICRO_BATCHES,
    loaded,
    misfortunes,
    not_finite,
    on_ranks,
    saved_beside_steps,
    started,
    train_and_save,
)
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import rewrite, train
from tests.kit.training import tensors_of as kept

# 33 and 17 are cut unevenly by 2, 3 and 4.
CONFIG = tiny(n_layer=2, n_head=3, n_embd=33, vocab_size=97, block_size=17, batch_size=1, dropout=0.1)
FOLDER = Path("checkpoints")


Unbroken = tuple[list[dict[str, Any]], Path]
AT = 2  # steps, after which others go on


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Unbroken]:
    """Runs that nothing interrupts, each trained once: (what each rank gave, a folder with checkpoints in `at` after
    AT steps, and in `end` of all)."""

    @cache
    def run(strategy: str, world: int, end: int) -> Unbroken:
        folder = tmp_path_factory.mktemp(f"{strategy}-{world}")
        saves = {AT - 1: str(folder / "at"), AT: str(folder / "at"), end: str(folder / "end")}
        data = str(write_dataset(folder / "data"))
        return on_ranks(train_and_save, world, CONFIG, strategy, data, 0, end, saves), folder

    return run


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(write_dataset(tmp_path / "data"))


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
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


def assert_switched(first: Unbroken, strategy: str, world: int, data: str, *, same: bool = False) -> None:
    """Go on from the middle of a run that was not interrupted. `same`: with its strategy and number of ranks."""
    whole, folder = first
    end, middle = len(whole[0]["losses"]), str(folder / "at")
    saves = {AT: "copy", end: "end"}
    onward = on_ranks(train_and_save, world, CONFIG, strategy, data, AT, end, saves, middle)
    assert_same(tensors_of(folder / "at", AT), tensors_of(Path("copy"), AT))
    expected, found = whole[0]["losses"][AT:], onward[0]["losses"]
    if same:
        assert found == expected
        assert_same(tensors_of(folder / "end", end), tensors_of(Path("end"), end))
    for a, b in zip(expected, found, strict=True):
        assert float.fromhex(b) == pytest.approx(float.fromhex(a), rel=1e-6)
    rows = {tuple(each[:2]): each[2] for rank in whole for each in rank["seen"]}
    assert len(rows) == end * MICRO_BATCHES
    seen = [each for rank in onward for each in rank["seen"]]
    assert sorted(tuple(each[:2]) for each in seen) == list(product(range(AT, end), range(MICRO_BATCHES)))
    assert all(each[2] == rows[tuple(each[:2])] for each in seen)


# Of three ranks the order of sums counts, of two it does not.
SWITCHES = [
    (("ddp", 3), ("ddp", 3)), (("ddp", 3), ("ddp", 1)), (("ddp", 1), ("fsdp", 2)), (("fsdp", 3), ("fsdp", 3)),
    (("fsdp", 3), ("zero1", 2)),
]  # fmt: skip


@pytest.mark.parametrize(("first", "then"), SWITCHES)
def test_any_number_of_ranks_goes_on(first: tuple[str, int], then: tuple[str, int], data: str, unbroken: Any) -> None:
    assert_switched(unbroken(*first, AT + 3), *then, data, same=first == then)


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


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_nonfinite_step_on_one_rank_changes_nothing_on_any(strategy: str) -> None:
    assert on_ranks(not_finite, 2, CONFIG, strategy) == [True, True]


@pytest.mark.fault(
    "of several ranks one cannot write, has a number that is not finite, or does not see the folder", row="B.3",
    sees="what one card's run would say, with the rank and its machine where the folder is not shared",
    safe="earlier checkpoints; all ranks decide alike",
)  # fmt: skip
def test_failure_of_one_rank_is_heard_and_harms_no_checkpoint(data: str) -> None:
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


@pytest.mark.fault(
    "a file of one rank in a checkpoint is missing, cut or has a flipped bit", row="B.3",
    sees="a note that names the file: the checkpoint is passed over",
    safe="the one before it, on any number of ranks",
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "manifest cut", "rank left out"])
def test_damaged_part_is_named_and_earlier_checkpoint_used(damage: str, unbroken: Any) -> None:
    shutil.copytree(unbroken("fsdp", 3, AT + 3)[1] / "at", FOLDER)
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
        found = on_ranks(loaded, 2, CONFIG, "ddp", str(FOLDER))
        assert found == [(1, ((path.name, expected),))] * 2
    assert checkpoint.newest_valid(FOLDER) == (checkpoint.path_of(FOLDER, 1), ((path.name, expected),))


def test_every_command_reads_what_ranks_wrote(data: str) -> None:
    """The newest checkpoint of a run on one card, written again by three ranks: all that reads it finds the same."""
    config = CONFIG.model_copy(update={"max_iters": 2, "init_optimizer": True})
    run = Path(train(config).id)
    path = checkpoint.path_of(run / "checkpoints", 2)

    def read(name: str) -> tuple[dict[str, bytes], WeightsFile, dict[str, torch.Tensor]]:
        made = [export(run, form, Path(f"{name}-{form}")) for form in ("safetensors", "nanogpt", "hf")]
        files = {f"{each.form} {file}": Path(each.path, file).read_bytes() for each in made for file in each.files}
        weights = inspect_weights(str(run))
        state = build(config.model_copy(update={"seed": 5}), torch.device("cpu"), torch.float32, compile=False)
        assert starting.put(weights, state, Path()).step == 2
        checkpoint.load_model(path, state.model)
        return files, weights.model_copy(update={"files": ()}), kept(state)

    one = read("one")
    folder = str(run / "checkpoints")
    on_ranks(train_and_save, 3, CONFIG, "fsdp", data, 2, 2, {2: folder}, folder)
    assert len(list(path.glob("model.*.safetensors"))) == 3
    three = read("three")
    assert three[:2] == one[:2]
    assert_same(three[2], one[2])


def test_one_card_that_goes_on_from_ranks_draws_their_dropout(data: str) -> None:
    """The trainer's own steps, against those of a rank that is alone."""
    config = CONFIG.model_copy(update={"gradient_accumulation_steps": MICRO_BATCHES, "decay_lr": False})
    run = Path(train(config.model_copy(update={"max_iters": AT})).id)
    path = checkpoint.path_of(run / "checkpoints", AT)
    told = json.loads((path / "state.json").read_text())
    assert told["dropout_by_number"] is False
    rewrite(path, "state.json", json.dumps({**told, "dropout_by_number": True}).encode())
    end = AT + 3
    alone = on_ranks(train_and_save, 1, CONFIG, "ddp", "data/toy", AT, end, {}, str(path.parent))[0]
    assert train(config.model_copy(update={"max_iters": end}), resume=True).steps_done == end
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    assert [losses[step] for step in range(AT, end)] == [float.fromhex(loss) for loss in alone["losses"]]

"""Checkpoints: whole or not there, verified before use, never pickle."""

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from foretrain.base import files as durable
from foretrain.base.errors import ExitCode, UserError
from foretrain.model.step import build, train_step
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from foretrain.training.tensor_files import pieces
from tests.kit.command import REPO, refused
from tests.kit.tiny import tiny
from tests.kit.training import FOLDER, rewrite, same_state, tensors_of, trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_round_trip_is_bit_for_bit(dtype: torch.dtype) -> None:
    state = trained(dtype)
    before = tensors_of(state)
    progress = Progress(step=2, best_val_loss=1.25, val_loss=1.5, evaluated=True, elapsed_s=3.5)
    checkpoint.save(FOLDER, state, progress)
    other = build(tiny(dropout=0.1, seed=99), torch.device("cpu"), dtype, compile=False)
    loaded = checkpoint.load(FOLDER, other)
    assert loaded.progress == progress
    assert same_state(before, tensors_of(other))
    if dtype == torch.float16:
        assert other.scaler.get_scale() == state.scaler.get_scale()
    idx = torch.arange(16).repeat(4, 1)
    torch.set_rng_state(before["rng"])
    a = train_step(state, [(idx, idx)] * 2, 1e-2).loss
    torch.set_rng_state(before["rng"])
    b = train_step(other, [(idx, idx)] * 2, 1e-2).loss
    assert torch.equal(a, b)


def test_nothing_of_it_is_a_pickle() -> None:
    path = checkpoint.save(FOLDER, trained(), Progress(step=2))
    names = {p.name for p in path.iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damage_is_found_and_the_one_before_is_used(name: str, damage: str) -> None:
    state = trained()
    checkpoint.save(FOLDER, state, Progress(step=1))
    good = tensors_of(state)
    idx = torch.arange(16).repeat(4, 1)
    train_step(state, [(idx, idx)] * 2, 1e-2)
    path = checkpoint.save(FOLDER, state, Progress(step=2)) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        if damage == "flip":
            position = random.Random(name).randrange(len(data))
            data[position] ^= 1 << 3
        path.write_bytes({"flip": bytes(data), "truncate": bytes(data[: len(data) // 2]), "empty": b""}[damage])
    other = trained(steps=0)
    loaded = checkpoint.load(FOLDER, other)
    assert loaded.progress.step == 1
    assert loaded.skipped[0][0] == "step-0000000002"
    del good["rng"]
    after = tensors_of(other)
    del after["rng"]
    assert same_state(good, after)


@pytest.mark.fault(
    "a flipped bit or a cut file in a checkpoint", row="B.3", sees="a note: it is passed over", safe="the one before it"
)
def test_every_flipped_bit_is_found() -> None:
    path = checkpoint.save(FOLDER, trained(), Progress(step=1))
    files = [p for p in path.iterdir() if p.name != "manifest.json"]
    chance = random.Random(0)
    for _ in range(200):
        target = chance.choice(files)
        data = bytearray(target.read_bytes())
        position = chance.randrange(len(data))
        data[position] ^= 1 << chance.randrange(8)
        original = target.read_bytes()
        target.write_bytes(bytes(data))
        assert checkpoint.problem_of(path)
        target.write_bytes(original)
    assert checkpoint.problem_of(path) is None


@pytest.mark.fault(
    "only damaged checkpoints are left", row="B.3",
    sees="exit code 7 with the reason for each",
    safe="what is there: nothing is deleted and nothing begun anew",
)  # fmt: skip
def test_all_damaged_is_a_stop_never_a_fresh_start() -> None:
    state = trained()
    for step in (1, 2):
        path = checkpoint.save(FOLDER, state, Progress(step=step))
        (path / "model.safetensors").write_bytes(b"x")
    with refused("checkpoint.none_valid", code=ExitCode.DATA) as caught:
        checkpoint.load(FOLDER, state)
    assert "step-0000000001" in str(caught.value)
    assert checkpoint.steps_in(FOLDER) == [1, 2]  # nothing deleted


def test_no_checkpoint_is_none() -> None:
    assert checkpoint.load(FOLDER, trained(steps=0)) is None


@pytest.fixture
def watch() -> Iterator[Callable[..., None]]:
    yield durable.watch
    durable.watch(None)


class Failing:
    """Counts the calls on files; the one at `fail_at` meets `error`."""

    def __init__(self, error: BaseException) -> None:
        self.count, self.fail_at, self.error = 0, 0, error

    def __call__(self, call: str, path: Path, size_bytes: int) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise self.error


@pytest.mark.parametrize(
    ("number", "id", "again"),
    [
        (28, "disk.full", False),
        (28, "disk.full", True),
        (122, "disk.limit", False),
        (27, "disk.limit", True),
        (5, "environment.cannot_write", False),
    ],
)
def test_a_save_that_fails_at_any_call_leaves_the_old_one(
    number: int, id: str, again: bool, watch: Callable[..., None]
) -> None:
    """Each call on files in turn; there is always a whole checkpoint. `again`: the same_state step is saved once more."""
    state, step = trained(), 1 if again else 2
    checkpoint.save(FOLDER, state, Progress(step=1))
    failing = Failing(OSError(number, "no"))
    watch(failing)
    points = 0
    for failing.fail_at in range(1, 100):
        failing.count = 0
        try:
            checkpoint.save(FOLDER, state, Progress(step=step))
        except UserError as error:
            points += 1
            assert error.id == id
            path, skipped = checkpoint.newest_valid(FOLDER)
            assert path in (checkpoint.path_of(FOLDER, 1), checkpoint.path_of(FOLDER, step))
            assert skipped == ()
            assert not list(FOLDER.glob(".staging-*"))
        else:
            if failing.count < failing.fail_at:
                break
    assert points >= 20
    watch(None)
    checkpoint.sweep(FOLDER)
    assert sorted({1, step}) == checkpoint.steps_in(FOLDER)


def test_a_limit_of_the_system_is_no_full_disk() -> None:
    """The system refuses to let a file grow beyond a limit, at many places of a save."""
    code = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {repo!r})
from tests.kit.training import trained, FOLDER
from foretrain.base.errors import UserError
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
state = trained()
checkpoint.save(FOLDER, state, Progress(step=1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
largest = max(p.stat().st_size for p in (FOLDER / "step-0000000001").iterdir())
for limit in range(0, largest, 16384):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoint.save(FOLDER, state, Progress(step=2))
    except UserError as error:
        assert error.id == "disk.limit", error.id
        assert "a checkpoint needs about" in str(error)
        assert "ulimit -f" in str(error)
        assert "The checkpoint of step 1 is intact" in str(error)
    else:
        raise AssertionError(limit)
    assert [p.name for p in FOLDER.iterdir()] == ["step-0000000001"]
assert checkpoint.problem_of(FOLDER / "step-0000000001") is None
"""
    result = subprocess.run(
        [sys.executable, "-c", code.format(repo=str(REPO))], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_what_we_write_is_safetensors() -> None:
    """Byte for byte a file that the format's own library reads, with every dtype and odd shapes."""
    from safetensors.torch import load

    chance = torch.Generator().manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    tensors = {f"{i}/é": torch.randn(3, 2 * i + 1, generator=chance).to(d) for i, d in enumerate(dtypes)}
    tensors |= {"u": torch.arange(7, dtype=torch.uint8), "b": torch.tensor([True, False]), "none": torch.zeros(0, 3)}
    tensors |= {"one": torch.tensor(3.5), "transposed": torch.arange(12.0).reshape(3, 4).T, "i8": torch.ones(5).char()}
    read = load(b"".join(bytes(piece) for piece in pieces(tensors, 0)))
    assert same_state(read, tensors)
    assert all(read[key].dtype == tensors[key].dtype for key in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_number_that_is_none_passes(dtype: torch.dtype, value: float) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.smallest_normal / 2, -0.0], dtype=dtype)
    assert b"".join(bytes(piece) for piece in pieces({"a": extremes}, 0))
    with pytest.raises(UserError, match="not finite"):
        list(pieces({"a": torch.tensor([0.0, value, 1.0]).to(dtype)}, 3))


def test_retention_keeps_the_newest_and_the_best() -> None:
    state = trained()
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(FOLDER, state, Progress(step=step))
        checkpoint.retain(FOLDER, 2, best_step=2)
    assert checkpoint.steps_in(FOLDER) == [2, 4, 5]
    (FOLDER / ".staging-step-0000000006").mkdir()
    (FOLDER / ".trash-step-0000000001").mkdir()
    checkpoint.sweep(FOLDER)
    assert sorted(p.name for p in FOLDER.iterdir()) == [f"step-{s:010d}" for s in (2, 4, 5)]


def test_retention_counts_what_is_right_alone() -> None:
    """A damaged checkpoint takes no other one's place, so there is always one to go on from."""
    state = trained()
    for step in (1, 2, 3):
        path = checkpoint.save(FOLDER, state, Progress(step=step))
        if step > 1:
            (path / "model.safetensors").write_bytes(b"x")
        assert checkpoint.retain(FOLDER, 1, best_step=None) == {1}
    assert checkpoint.steps_in(FOLDER) == [1, 2, 3]
    checkpoint.save(FOLDER, state, Progress(step=4))
    assert checkpoint.retain(FOLDER, 1, best_step=None, verified={1}) == {4}
    assert checkpoint.steps_in(FOLDER) == [4]


def test_weights_that_are_not_finite_are_never_saved() -> None:
    state = trained()
    with torch.no_grad():
        next(state.model.parameters())[0, 0] = float("nan")
    with refused(code=ExitCode.DIVERGED):
        checkpoint.save(FOLDER, state, Progress(step=3))
    assert list(FOLDER.iterdir()) == []


def test_another_models_checkpoint_is_refused() -> None:
    checkpoint.save(FOLDER, trained(), Progress(step=1))
    other = build(tiny(n_embd=64), torch.device("cpu"), torch.float32, compile=False)
    with refused("checkpoint.other_model"):
        checkpoint.load(FOLDER, other)


def test_a_manifest_cannot_point_outside() -> None:
    path = checkpoint.save(FOLDER, trained(), Progress(step=1))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../../etc/passwd"] = {"size_bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    assert "missing" in str(checkpoint.problem_of(path))


@pytest.mark.parametrize("at", [1, 2])
def test_saving_a_step_again_never_leaves_none(at: int, watch: Callable[..., None]) -> None:
    """A signal during an evaluation saves a step twice; death between the two renames must not cost it."""
    state = trained()
    checkpoint.save(FOLDER, state, Progress(step=2))
    count = 0

    def interrupt(call: str, path: Path, size_bytes: int) -> None:
        nonlocal count
        count += call == "rename"
        if count == at:
            raise KeyboardInterrupt  # no handler of save's own runs for it, as for a kill

    watch(interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(FOLDER, state, Progress(step=2))
    watch(None)
    checkpoint.sweep(FOLDER)
    path, skipped = checkpoint.newest_valid(FOLDER)
    assert path == checkpoint.path_of(FOLDER, 2)
    assert skipped == ()
    assert [entry.name for entry in FOLDER.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "5", '{"step": "x", "scaler": null, "torch": "2"}', "[" * 100_000, "not json"]
)
def test_a_state_that_nobody_wrote_is_passed_over(text: str) -> None:
    state = trained()
    checkpoint.save(FOLDER, state, Progress(step=1))
    rewrite(checkpoint.save(FOLDER, state, Progress(step=2)), "state.json", text.encode())
    path, skipped = checkpoint.newest_valid(FOLDER)
    assert path == checkpoint.path_of(FOLDER, 1)
    assert "state.json" in skipped[0][1]


def test_a_state_of_another_step_is_passed_over() -> None:
    state = trained()
    good = checkpoint.save(FOLDER, state, Progress(step=1))
    other = checkpoint.save(FOLDER, state, Progress(step=2))
    rewrite(other, "state.json", (good / "state.json").read_bytes())
    assert checkpoint.newest_valid(FOLDER)[0] == good


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize("content", ["garbage", "pickle", "other keys"])
def test_right_digests_over_wrong_contents_are_a_sentence(name: str, content: str) -> None:
    from safetensors.torch import save

    path = checkpoint.save(FOLDER, trained(), Progress(step=2))
    data = {"garbage": b"12345", "pickle": pickle.dumps({"a": 1}), "other keys": save({"a/b": torch.zeros(3)})}
    rewrite(path, name, data[content])
    with pytest.raises(UserError) as caught:
        checkpoint.load(FOLDER, build(tiny(), torch.device("cpu"), torch.float32, compile=False))
    assert caught.value.id.startswith("checkpoint.")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks /proc what is mapped")
def test_a_loaded_state_lives_in_memory_of_its_own(own_directory: Path) -> None:
    """Moments that are views of the mapped file would go with it: with what a disk does to it, and keep its space."""
    checkpoint.save(FOLDER, trained(), Progress(step=2))
    state = trained(steps=0)
    assert checkpoint.load(FOLDER, state)
    assert str(own_directory) not in Path("/proc/self/maps").read_text()

"""Checkpoints: whole or not there, verified before use, never pickle."""

import hashlib
import json
import pickle
import random
from pathlib import Path

import pytest
import torch

from foretrain.errors import ExitCode, UserError
from foretrain.lm.step import TrainState, build, train_step
from foretrain.run import checkpoint
from foretrain.run.checkpoint import Progress
from tests.helpers import tiny

FOLDER = Path("checkpoints")


def trained(dtype: torch.dtype = torch.float32, steps: int = 2) -> TrainState:
    state = build(tiny(dropout=0.1), torch.device("cpu"), dtype, compile=False)
    idx = torch.arange(16).repeat(4, 1)
    for _ in range(steps):
        train_step(state, [(idx, idx), (idx, idx)], 1e-2)
    return state


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            found[f"{key}/{name}"] = value.clone()
    return {**found, "rng": torch.get_rng_state()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_round_trip_is_bit_for_bit(dtype: torch.dtype) -> None:
    state = trained(dtype)
    before = tensors_of(state)
    progress = Progress(step=2, best_val_loss=1.25, val_loss=1.5, evaluated=True, elapsed_s=3.5)
    checkpoint.save(FOLDER, state, progress)
    other = build(tiny(dropout=0.1, seed=99), torch.device("cpu"), dtype, compile=False)
    loaded = checkpoint.load(FOLDER, other)
    assert loaded
    assert loaded.progress == progress
    assert same(before, tensors_of(other))
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
    assert loaded
    assert loaded.progress.step == 1
    assert loaded.skipped[0][0] == "step-0000000002"
    del good["rng"]
    after = tensors_of(other)
    del after["rng"]
    assert same(good, after)


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


def test_all_damaged_is_a_stop_never_a_fresh_start() -> None:
    state = trained()
    for step in (1, 2):
        path = checkpoint.save(FOLDER, state, Progress(step=step))
        (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        checkpoint.load(FOLDER, state)
    assert caught.value.id == "checkpoint.none_valid"
    assert caught.value.exit_code == ExitCode.DATA
    assert "step-0000000001" in str(caught.value)
    assert checkpoint.steps_in(FOLDER) == [1, 2]  # nothing deleted


def test_no_checkpoint_is_none() -> None:
    assert checkpoint.load(FOLDER, trained(steps=0)) is None


def test_a_save_that_fails_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at each file-system call of a save in turn; there is always a whole checkpoint."""
    state = trained()
    checkpoint.save(FOLDER, state, Progress(step=1))
    calls = {"count": 0, "fail_at": 0}
    originals = {name: getattr(checkpoint, name) for name in ("save_file", "_sync", "_sync_directory", "_digest")}

    def wrap(original):
        def call(*args, **kwargs):
            calls["count"] += 1
            if calls["count"] == calls["fail_at"]:
                raise OSError(28, "No space left on device")
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        monkeypatch.setattr(checkpoint, name, wrap(original))
    points = 0
    for fail_at in range(1, 40):
        calls.update(count=0, fail_at=fail_at)
        try:
            checkpoint.save(FOLDER, state, Progress(step=2))
        except UserError as error:
            points += 1
            assert error.id == "disk.full"
            assert error.exit_code == ExitCode.DISK_FULL
            assert not list(FOLDER.glob(".staging-*"))
            path, _ = checkpoint.newest_valid(FOLDER)
            assert path
            assert checkpoint.problem_of(path) is None
        else:
            break
    assert points >= 12
    assert checkpoint.steps_in(FOLDER) == [1, 2]


def test_a_full_disk_is_named() -> None:
    """A real one: /dev/full stands where the model should be written."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    state = trained()

    def to_full(tensors: object, path: Path) -> None:
        with Path("/dev/full").open("wb") as file:
            file.write(b"x" * 100_000)
            file.flush()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", to_full)
        with pytest.raises(UserError) as caught:
            checkpoint.save(FOLDER, state, Progress(step=1))
    assert caught.value.id == "disk.full"
    assert checkpoint.steps_in(FOLDER) == []


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


def test_weights_that_are_not_finite_are_never_saved() -> None:
    state = trained()
    with torch.no_grad():
        next(state.model.parameters())[0, 0] = float("nan")
    with pytest.raises(UserError) as caught:
        checkpoint.save(FOLDER, state, Progress(step=3))
    assert caught.value.exit_code == ExitCode.DIVERGED
    assert not FOLDER.exists()


def test_another_models_checkpoint_is_refused() -> None:
    checkpoint.save(FOLDER, trained(), Progress(step=1))
    other = build(tiny(n_embd=64), torch.device("cpu"), torch.float32, compile=False)
    with pytest.raises(UserError) as caught:
        checkpoint.load(FOLDER, other)
    assert caught.value.id == "checkpoint.other_model"


def test_a_manifest_cannot_point_outside() -> None:
    path = checkpoint.save(FOLDER, trained(), Progress(step=1))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../../etc/passwd"] = {"size_bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "missing" in str(checkpoint.problem_of(path))


@pytest.mark.parametrize("at", [1, 2])
def test_saving_a_step_again_never_leaves_none(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during an evaluation saves a step twice; death between the two renames must not cost it."""
    state = trained()
    checkpoint.save(FOLDER, state, Progress(step=2))
    original, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt  # no handler of save's own runs for it, as for a kill
        return original(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(FOLDER, state, Progress(step=2))
    checkpoint.sweep(FOLDER)
    path, skipped = checkpoint.newest_valid(FOLDER)
    assert path == checkpoint.path_of(FOLDER, 2)
    assert skipped == ()
    assert [entry.name for entry in FOLDER.iterdir()] == [path.name]


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Change a file of a checkpoint and its digest with it."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


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

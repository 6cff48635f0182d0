"""Checkpoints: a directory of safetensors and JSON with a manifest of SHA-256 digests. Never pickle.

A checkpoint is staged beside its place, synced, and renamed, so that it is there as a whole or not at all. Loading
verifies every digest first and falls back to the one before. Only complete checkpoints count in retention.
"""

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from foretrain.base import durable
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.base.records import Record
from foretrain.base.safe_read import read_text
from foretrain.model.step import TrainState
from foretrain.training.tensor_files import Snapshot, live, pieces

SCHEMA = "foretrain.checkpoint/1"
MANIFEST = "manifest.json"


class Progress(Record):
    """Where a run stands. `evaluated`: the evaluation of `step` is already in the metrics.

    `skipped`: steps of late that were passed over as not finite; `overflows`: float16's of late, one after the other.
    `recent_losses`: of the last steps; `last_spike`: the step whose loss was told to leap (divergence.py).
    """

    step: int
    best_val_loss: float | None = None
    best_step: int | None = None
    first_val_loss: float | None = None
    val_loss: float | None = None
    evaluated: bool = False
    elapsed_s: float = 0.0
    dataset_fingerprint: str | None = None
    config_digest: str = ""
    skipped: tuple[int, ...] = ()
    overflows: int = 0
    recent_losses: tuple[float, ...] = ()
    last_spike: int = -1000


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was put into a state, and those newer ones that could not be, with the reason."""

    progress: Progress
    path: Path
    skipped: tuple[tuple[str, str], ...]
    torch_version: str


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is; names sort as numbers do."""
    return folder / f"step-{step:010d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, oldest first."""
    numbers = (path.name[5:] for path in folder.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def kept_in(folder: Path) -> str:
    """What is safe there, for a sentence."""
    try:
        steps = steps_in(folder)
    except OSError:
        steps = []
    return say("nonfinite.kept", step=steps[-1]) if steps else say("nonfinite.kept_none")


# -- saving ------------------------------------------------------------------------------------------------


def save(folder: Path, state: TrainState, progress: Progress) -> Path:
    """Commit a checkpoint of this state as it is now. Raises as `commit` does."""
    return commit(folder, live(state), progress)


def commit(folder: Path, snapshot: Snapshot, progress: Progress) -> Path:
    """Write a checkpoint, whole or not at all.

    Raises UserError 'disk.full', 'disk.limit', 'environment.cannot_write', and 'diverged.weights' where a number is not
    finite.
    """
    final = path_of(folder, progress.step)
    staging, old = folder / f".staging-{final.name}", folder / f".old-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.remove_folder(staging)
        durable.make_folder(staging)
        _write(staging, snapshot, progress)
        if final.exists():  # the same step again: the old one keeps another name until the new one has this one
            durable.remove_folder(old)
            durable.rename(final, old)
        durable.rename(staging, final)
        durable.sync_folder(folder)
        durable.remove_folder(old)
    except OSError as error:
        with contextlib.suppress(OSError):  # gives the old one its name back, where that was taken already
            sweep(folder)
        raise _disk_error(error, folder, snapshot.size_bytes) from None
    except UserError:
        durable.remove_folder(staging)
        raise
    return final


def _disk_error(error: OSError, folder: Path, needs: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            free = 0
        full = error.errno == errno.ENOSPC or free < needs  # else a quota or `ulimit -f` says no
        return UserError(
            "disk.full" if full else "disk.limit", path=str(folder), needs=needs, free=free, saved=kept_in(folder)
        )
    return UserError("environment.cannot_write", path=str(folder), reason=error.strerror or str(error))


def _write(staging: Path, snapshot: Snapshot, progress: Progress) -> None:
    """All files, each synced; the manifest last, with the digests of what was meant to be in the others."""
    document = {**progress.to_json(schema=SCHEMA), "scaler": snapshot.scaler, "torch": torch.__version__}
    contents = {name: pieces(tensors, progress.step) for name, tensors in snapshot.files.items()}
    contents["state.json"] = iter([json.dumps(document, indent=1).encode()])
    manifest = {}
    for name, content in sorted(contents.items()):
        size, digest = durable.write(staging / name, content)
        manifest[name] = {"size_bytes": size, "sha256": digest}
    text = json.dumps({"step": progress.step, "files": manifest}, indent=1)
    durable.write(staging / MANIFEST, [text.encode()])
    durable.sync_folder(staging)


def _remove(path: Path) -> None:
    """Take the name away first, so that a half-removed checkpoint is never mistaken for one."""
    trash = path.with_name(f".trash-{path.name}")
    durable.remove_folder(trash)
    durable.rename(path, trash)
    durable.remove_folder(trash)


def retain(folder: Path, keep: int, best_step: int | None, verified: Set[int] = frozenset()) -> set[int]:
    """Keep the newest `keep` checkpoints whose digests are right, and the best one; remove what is older.

    A damaged one counts for nothing, so the newest that is right always stays. `verified`: steps known to be right;
    the others are read. Returns the steps that are.
    """
    right: set[int] = set()
    for step in reversed(steps_in(folder)):
        if len(right) < keep or step == best_step:
            if step in verified or problem_of(path_of(folder, step)) is None:
                right.add(step)
        else:
            _remove(path_of(folder, step))
    sweep(folder)
    return right


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-done; a checkpoint that lost its name to a new one gets it back."""
    for old in folder.glob(".old-*"):
        final = folder / old.name.removeprefix(".old-")
        if final.exists():
            durable.remove_folder(old)
        else:
            durable.rename(old, final)
    for pattern in (".staging-*", ".trash-*"):
        for path in folder.glob(pattern):
            durable.remove_folder(path)


# -- loading -----------------------------------------------------------------------------------------------


def problem_of(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None when every digest is right."""
    try:
        text = read_text(path / MANIFEST)
        manifest = json.loads(text)
        listed: dict[str, Any] = manifest["files"]
        if text != json.dumps(manifest, indent=1) or set(manifest) != {"step", "files"}:
            return "its manifest is not as it was written"
        if path_of(path.parent, manifest["step"]) != path:
            return f"its manifest is of step {manifest['step']}"
        for name, entry in listed.items():
            target = path / Path(name).name
            if not target.is_file():
                return f"{name} is missing"
            if target.stat().st_size != entry["size_bytes"]:
                return f"{name} has {target.stat().st_size} bytes instead of {entry['size_bytes']}"
            if durable.digest_of(target) != entry["sha256"]:
                return f"{name} does not match its digest"
        if not {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"} <= set(listed):
            return "its manifest is incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest cannot be read ({type(error).__name__})"
    try:
        progress = read_progress(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its state.json cannot be read ({type(error).__name__})"
    return None if path_of(path.parent, progress.step) == path else f"its state is of step {progress.step}"


def read_progress(path: Path) -> Progress:
    """The state.json of a checkpoint. Raises ValueError and the like where it is none."""
    document = json.loads(read_text(path / "state.json"))
    for key in ("scaler", "torch"):
        document.pop(key)
    return Progress.from_json(json.dumps(document))


def newest_valid(folder: Path) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The newest checkpoint whose digests are right, and the newer ones that were passed over.

    Raises UserError when there are checkpoints and none is valid: a run never silently starts over.
    """
    skipped: list[tuple[str, str]] = []
    for step in reversed(steps_in(folder)):
        path = path_of(folder, step)
        problem = problem_of(path)
        if problem is None:
            return path, tuple(skipped)
        skipped.append((path.name, problem))
    if skipped:
        raise UserError("checkpoint.none_valid", path=str(folder), problems=[f"{n}: {p}" for n, p in skipped])
    return None, ()


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Weights of a checkpoint into a model of the same shape. Raises UserError where it is another model's."""
    put_weights(load_file(path / "model.safetensors").items(), model, str(path))


def put_weights(tensors: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module, source: str) -> None:
    """Named weights into a model that has exactly these, one after the other. Raises UserError where it has others."""
    own = dict(model.named_parameters())
    lacking = set(own)
    with torch.no_grad():
        for name, tensor in tensors:
            if _shape(own, name) != tuple(tensor.shape):
                raise _other_model(source, name, tuple(tensor.shape), _shape(own, name))
            own[name].copy_(tensor)
            lacking.discard(name)
    if lacking:
        name = sorted(lacking)[0]
        raise _other_model(source, name, None, _shape(own, name))


def _other_model(source: str, name: str, has: tuple[int, ...] | None, needs: tuple[int, ...] | None) -> UserError:
    return UserError("checkpoint.other_model", path=source, tensor=name, has=str(has), needs=str(needs))


def _shape(tensors: dict[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def load(
    folder: Path, state: TrainState, compatible: Callable[[Progress], None] = lambda progress: None
) -> Loaded | None:
    """Put the newest valid checkpoint into `state`: weights, moments, scaler and RNG. None when there is none.

    `compatible` may raise when the checkpoint belongs to other data or another config.
    """
    path, skipped = newest_valid(folder)
    if path is None:
        return None
    progress = read_progress(path)
    compatible(progress)
    try:
        load_model(path, state.trained)
        if state.masters:
            state.masters.give_weights()
        _load_rest(path, state)
    except UserError:
        raise
    except Exception as error:  # digests are right, so somebody wrote it so: safetensors and torch raise what they like
        raise UserError("checkpoint.bad_contents", path=str(path), reason=str(error).splitlines()[0][:200]) from None
    written_by = json.loads(read_text(path / "state.json"))["torch"]
    return Loaded(progress, path, skipped, str(written_by))


def _load_rest(path: Path, state: TrainState) -> None:
    """Moments, scaler and RNG."""
    moments = load_file(path / "optimizer.safetensors")
    # Where an optimizer's states have other shapes than their parameters, it says which.
    shapes_of = getattr(state.optimizer, "state_shapes", None)
    state.optimizer.state.clear()
    for key, value in moments.items():
        kind, name = key.split("/", 1)
        parameter = state.trained.get_parameter(name)
        expected = shapes_of(parameter).get(kind) if shapes_of else tuple(parameter.shape)
        if value.dim() and tuple(value.shape) != expected:
            raise ValueError(f"{key} is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
        # The fused kernel wants its step count on the device, the plain one on the CPU: as it was saved.
        state.optimizer.state[parameter][kind] = value.to(state.device, copy=True)  # the file is only mapped
    lacking = [name for name, p in state.trained.named_parameters() if moments and p not in state.optimizer.state]
    if lacking:
        raise ValueError(f"it has no moments of {lacking[0]}")
    scaler = json.loads(read_text(path / "state.json"))["scaler"]
    if scaler is not None and state.scaler.is_enabled():
        state.scaler.load_state_dict(scaler)
    rng = load_file(path / "rng.safetensors")
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and state.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"], state.device)

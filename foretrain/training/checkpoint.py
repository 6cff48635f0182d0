"""Checkpoints: a directory of safetensors and JSON with SHA-256 digests, never pickle; staged, synced, and renamed.
Loading verifies every checksum and falls back to the one before. Any number of ranks reads any other number's."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from foretrain.base import files as durable
from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.messages import say
from foretrain.base.records import Record
from foretrain.hardware import accelerator
from foretrain.model.parts import Rows, Split, held_rows, is_sharded, opened, sharded_like, states_of
from foretrain.model.peers import ALONE, Peers
from foretrain.model.step import TrainState
from foretrain.training.place import host_name
from foretrain.training.tensor_files import Snapshot, file_name, live

SCHEMA = "foretrain.checkpoint/1"
MANIFEST = "manifest.json"
MOST_RANKS = 10_000  # whose manifest can still be read (base/files.py)


class Progress(Record):
    """Where a run stands. `evaluated`: the evaluation of `step` is already in the metrics. `skipped`: recent steps that
    were not finite; `overflows`: float16's in a row. `dropout_by_number`: dropout's seed is the number of the
    micro-batch (training/ranks.py), as with several ranks."""

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
    dropout_by_number: bool = False


@dataclass(frozen=True)
class Loaded:
    progress: Progress
    path: Path
    skipped: tuple[tuple[str, str], ...]
    torch_version: str


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}"


def steps_in(folder: Path) -> list[int]:
    numbers = (path.name[5:] for path in folder.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def kept_in(folder: Path) -> str:
    try:
        steps = steps_in(folder)
    except OSError:
        steps = []
    return say("nonfinite.kept", step=steps[-1]) if steps else say("nonfinite.kept_none")


def check_shared(folder: Path, peers: Peers) -> None:
    """Raise UserError on all ranks where one does not see the first one's files, or cannot write."""
    mark = folder / f".staging-shared-{os.getpid()}"  # swept, should it be left

    def make() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        durable.remove_folder(mark)
        durable.make_folder(mark)
        return mark.name

    def look(made: str) -> None:
        if not (folder / made).is_dir():
            raise _not_shared(folder, peers.rank, host_name())

    if peers.world == 1:
        return
    try:
        made = peers.agree(lambda: make() if peers.first else "")[0]
        peers.agree(lambda: look(made))
    except OSError as error:
        raise _disk_error(error, folder, 0) from None
    finally:
        if peers.first:
            durable.remove_folder(mark)


def _not_shared(folder: Path, rank: int, host: str) -> UserError:
    return UserError("environment.not_shared", path=str(folder), rank=rank, host=host)


def save(folder: Path, state: TrainState, progress: Progress, peers: Peers = ALONE) -> Path:
    return commit(folder, live(state), progress, peers)


def commit(folder: Path, snapshot: Snapshot, progress: Progress, peers: Peers = ALONE) -> Path:
    """Write a checkpoint, whole or not at all. Every rank calls it, and all raise the same: UserError 'disk.…',
    'environment.…', 'diverged.weights', or torch's RuntimeError where a rank is gone.
    """
    final = path_of(folder, progress.step)
    staging = folder / f".staging-{final.name}"
    try:
        with _disk_errors(folder, snapshot):
            peers.only_first(lambda: _make_staging(folder, staging))
            written = peers.agree(lambda: _write(staging, snapshot, progress.step, peers))
            peers.only_first(lambda: _finish(staging, final, snapshot, progress, written))
    except UserError:  # all ranks have heard it, so none of them is writing any more
        if peers.first:
            with contextlib.suppress(OSError):  # restores the old one's name, where that was taken already
                sweep(folder)
        raise
    return final


@contextlib.contextmanager
def _disk_errors(folder: Path, snapshot: Snapshot) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _disk_error(error, folder, snapshot.size_bytes) from None


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


def _make_staging(folder: Path, staging: Path) -> None:
    durable.refuse_links([folder])
    folder.mkdir(parents=True, exist_ok=True)
    durable.remove_folder(staging)
    durable.make_folder(staging)


Manifest = dict[str, dict[str, Any]]  # of each file its size_bytes, and the sha256 of its intended content


def _write(staging: Path, snapshot: Snapshot, step: int, peers: Peers) -> Manifest:
    if not staging.is_dir():  # which the first rank has made
        raise _not_shared(staging.parent, peers.rank, host_name())
    return {name: _written(staging / name, content) for name, content in sorted(snapshot.contents(step).items())}


def _written(path: Path, content: Iterable[memoryview | bytes]) -> dict[str, Any]:
    size, digest = durable.write(path, content)
    return {"size_bytes": size, "sha256": digest}


def _finish(staging: Path, final: Path, snapshot: Snapshot, progress: Progress, written: list[Manifest]) -> None:
    for rank, files in enumerate(written):
        if not all((staging / name).is_file() for name in files):
            raise _not_shared(final.parent, rank, host_name())
    document = {**progress.to_json(schema=SCHEMA), "scaler": snapshot.scaler, "torch": torch.__version__}
    manifest = {name: entry for files in written for name, entry in files.items()}
    manifest["state.json"] = _written(staging / "state.json", [json.dumps(document, indent=1).encode()])
    named: dict[str, Any] = {"step": progress.step}
    if len(written) > 1:
        named["ranks"] = len(written)
    text = json.dumps({**named, "files": dict(sorted(manifest.items()))}, indent=1)
    durable.write(staging / MANIFEST, [text.encode()])
    durable.sync_folder(staging)
    folder, old = final.parent, final.with_name(f".old-{final.name}")
    if final.exists() or final.is_symlink():  # the same step again: the old one keeps another name until then
        durable.remove_folder(old)
        durable.rename(final, old)
    durable.rename(staging, final)
    durable.sync_folder(folder)
    durable.remove_folder(old)


def _remove(path: Path) -> None:
    """Take the name away first, so that a half-removed checkpoint is never mistaken for one."""
    trash = path.with_name(f".trash-{path.name}")
    durable.remove_folder(trash)
    durable.rename(path, trash)
    durable.remove_folder(trash)


def retain(
    folder: Path, keep: int, best_step: int | None, verified: Set[int] = frozenset(), peers: Peers = ALONE
) -> set[int]:
    """Keep the newest `keep` intact checkpoints, and the best; return the intact steps. `verified`: known."""
    right: set[int] = set()
    older: list[int] = []
    steps, known = peers.agree(lambda: [steps_in(folder), sorted(verified)])[0]  # all follow the first one
    for step in reversed(steps):
        if len(right) < keep or step == best_step:
            if step in known or problem_of(path_of(folder, step), peers) is None:
                right.add(step)
        else:
            older.append(step)
    if peers.first:
        for step in older:
            _remove(path_of(folder, step))
        sweep(folder)
    return right


def sweep(folder: Path) -> None:
    """Remove a killed process's leftovers; a checkpoint that lost its name to a new one gets it back."""
    if folder.is_symlink():  # it is another run's, or nobody's
        return
    for old in folder.glob(".old-*"):
        final = folder / old.name.removeprefix(".old-")
        if final.exists():
            durable.remove_folder(old)
        else:
            durable.remove_folder(final)  # a dangling link
            durable.rename(old, final)
    for pattern in (".staging-*", ".trash-*"):
        for path in folder.glob(pattern):
            durable.remove_folder(path)


def problem_of(path: Path, peers: Peers = ALONE) -> str | None:
    """Return why a checkpoint cannot be trusted; None where every checksum is right. Ranks share the reading."""
    return next((each for each in peers.agree(lambda: _problem_of(path, peers)) if each), None)


def _problem_of(path: Path, peers: Peers) -> str | None:
    try:
        text = read_text(path / MANIFEST)
        manifest = json.loads(text)
        listed: Manifest = manifest["files"]
        if text != json.dumps(manifest, indent=1) or set(manifest) - {"ranks"} != {"step", "files"}:
            return "its manifest is not as it was written"
        if path_of(path.parent, manifest["step"]) != path:
            return f"its manifest is of step {manifest['step']}"
        for name in list(listed)[peers.rank :: peers.world]:
            if problem := _problem_of_file(path / Path(name).name, listed[name]):
                return problem
        needed = {"rng.safetensors", "state.json"}.union(*(files_of(path, kind) for kind in KINDS))
        if not needed <= set(listed):
            return "its manifest is incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest cannot be read ({type(error).__name__})"
    try:
        progress = read_progress(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its state.json cannot be read ({type(error).__name__})"
    return None if path_of(path.parent, progress.step) == path else f"its state is of step {progress.step}"


def _problem_of_file(target: Path, entry: dict[str, Any]) -> str | None:
    if not target.is_file():
        return f"{target.name} is missing"
    if target.stat().st_size != entry["size_bytes"]:
        return f"{target.name} has {target.stat().st_size} bytes instead of {entry['size_bytes']}"
    return None if durable.digest_of(target) == entry["sha256"] else f"{target.name} does not match its digest"


KINDS = ("model", "optimizer")  # of files that each rank writes its own of


def ranks_of(path: Path) -> int:
    """Return how many ranks wrote a checkpoint. Raises ValueError and the like where its manifest cannot be read."""
    ranks = json.loads(read_text(path / MANIFEST)).get("ranks", 1)
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{str(ranks)[:20]} ranks")
    return ranks


def files_of(path: Path, kind: str) -> list[str]:
    ranks = ranks_of(path)
    return [file_name(kind, rank, ranks) for rank in range(ranks)]


@contextlib.contextmanager
def tensors_in(path: Path, kind: str) -> Iterator[dict[str, Split]]:
    """Yield its weights ('model') or its moments ('optimizer') by name, whatever number of ranks wrote them."""
    with opened(path / name for name in files_of(path, kind)) as found:
        yield found


def read_progress(path: Path) -> Progress:
    """Read state.json. Raises ValueError and the like where it is none."""
    document = json.loads(read_text(path / "state.json"))
    for key in ("scaler", "torch"):
        document.pop(key)
    return Progress.from_json(json.dumps(document))


def newest_valid(folder: Path, peers: Peers = ALONE) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """Return the newest intact checkpoint, and the damaged newer ones. Raises UserError when there are some and none is
    intact: a run never silently starts over."""
    skipped: list[tuple[str, str]] = []
    for step in reversed(_seen_by_all(folder, peers)):
        path = path_of(folder, step)
        problem = problem_of(path, peers)
        if problem is None:
            return path, tuple(skipped)
        skipped.append((path.name, problem))
    if skipped:
        raise UserError("checkpoint.none_valid", path=str(folder), problems=[f"{n}: {p}" for n, p in skipped])
    return None, ()


def _seen_by_all(folder: Path, peers: Peers) -> list[int]:
    own = steps_in(folder)
    seen = peers.agree(lambda: {"steps": own, "host": host_name()})
    for rank, each in enumerate(seen):
        if each["steps"] != seen[0]["steps"]:
            raise _not_shared(folder, rank, each["host"])
    return own


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Load the weights of a checkpoint. Raises UserError where they are another model's."""
    with tensors_in(path, "model") as tensors:
        put_weights(tensors.items(), model, str(path))


def put_weights(tensors: Iterable[tuple[str, Rows]], model: torch.nn.Module, source: str) -> None:
    """Put named weights into a model that has exactly these; of a sharded one, its rows. Raises UserError."""
    own = dict(model.named_parameters())
    lacking = set(own)
    for name, tensor in tensors:
        if _shape(own, name) != tuple(tensor.shape):
            raise _other_model(source, name, tuple(tensor.shape), _shape(own, name))
        held_rows(own[name]).fill(tensor)
        lacking.discard(name)
    if lacking:
        name = sorted(lacking)[0]
        raise _other_model(source, name, None, _shape(own, name))


def put_moments(moments: Iterable[tuple[str, dict[str, torch.Tensor]]], state: TrainState) -> None:
    """Put AdamW's step counts and this rank's moments, by parameter. Raises ValueError for other optimizers."""
    optimizer = states_of(state.optimizer)
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError("its moments are plain AdamW's, which the optimizer of this config has not")
    own = _parameters(optimizer)
    for name, kinds in moments:
        if (parameter := state.trained.get_parameter(name)) in own:
            made = {
                kind: sharded_like(parameter, tensor, torch.float32) for kind, tensor in kinds.items() if kind != "step"
            }
            optimizer.state[parameter] = {"step": kinds["step"].float().to(state.device), **made}


def _parameters(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _other_model(source: str, name: str, has: tuple[int, ...] | None, needs: tuple[int, ...] | None) -> UserError:
    return UserError("checkpoint.other_model", path=source, tensor=name, has=str(has), needs=str(needs))


def _shape(tensors: dict[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def load(
    folder: Path,
    state: TrainState,
    compatible: Callable[[Progress], None] = lambda progress: None,
    peers: Peers = ALONE,
) -> Loaded | None:
    """Put the newest intact checkpoint into `state`: weights, moments, scaler and RNG. None when there is none.
    `compatible` may raise. Every rank calls it, and all raise the same."""
    path, skipped = newest_valid(folder, peers)
    if path is None:
        return None
    progress = read_progress(path)
    peers.agree(lambda: compatible(progress))
    if state.parallel:
        state.parallel.behind = progress.step > 0
    peers.agree(lambda: _put(path, state))
    written_by = json.loads(read_text(path / "state.json"))["torch"]
    return Loaded(progress, path, skipped, str(written_by))


def _put(path: Path, state: TrainState) -> None:
    try:
        load_model(path, state.trained)
        if state.masters:
            state.masters.give_weights()
        _load_rest(path, state)
    except UserError:
        raise
    except Exception as error:  # checksums are right, so it was written so: safetensors and torch raise anything
        raise UserError("checkpoint.bad_contents", path=str(path), reason=str(error).splitlines()[0][:200]) from None


def _load_rest(path: Path, state: TrainState) -> None:
    with tensors_in(path, "optimizer") as moments:
        _load_moments(moments, state)
    scaler = json.loads(read_text(path / "state.json"))["scaler"]
    if scaler is not None and state.scaler.is_enabled():
        state.scaler.load_state_dict(scaler)
    rng = load_file(path / "rng.safetensors")
    torch.set_rng_state(rng["cpu"])
    accelerator.accelerator_of(state.device).restore(rng)


def _load_moments(moments: dict[str, Split], state: TrainState) -> None:
    """Raise ValueError where they are not the moments of this rank's optimizer."""
    optimizer = states_of(state.optimizer)
    own = _parameters(optimizer)
    # An optimizer whose states have other shapes than their parameters tells which.
    shapes_of = getattr(optimizer, "state_shapes", None)
    optimizer.state.clear()
    for key, value in moments.items():
        kind, name = key.split("/", 1)
        parameter = state.trained.get_parameter(name)
        if parameter not in own:
            continue
        expected = shapes_of(parameter).get(kind) if shapes_of else tuple(parameter.shape)
        if value.shape and value.shape != expected:
            raise ValueError(f"{key} is {value.shape}, its parameter {tuple(parameter.shape)}")
        if value.shape and is_sharded(parameter):
            moment = sharded_like(parameter, value, value.dtype)
        else:
            # The fused kernel wants its step count on the device, the plain one on the CPU: as it was saved.
            moment = value.whole().to(state.device, copy=True)  # the file is only mapped
        optimizer.state[parameter][kind] = moment
    named = state.trained.named_parameters()
    lacking = [name for name, p in named if moments and p in own and p not in optimizer.state]
    if lacking:
        raise ValueError(f"it has no moments of {lacking[0]}")

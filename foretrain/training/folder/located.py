"""Which checkpoint is meant by the path of a run, or of one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.training import checkpoint
from foretrain.training.store import RunDirectory


@dataclass(frozen=True)
class Located:
    """A checkpoint whose checksums are right, and its run. `skipped`: newer ones that are damaged, and why."""

    path: Path
    run: RunDirectory
    skipped: tuple[str, ...] = ()


def locate(path: Path, *, best: bool) -> Located:
    """The newest intact checkpoint of a run, its best one, or the checkpoint at this path. Raises UserError."""
    if (path / "state.json").is_file() and not (path / "run.json").is_file():
        return _intact(path.resolve())
    run = RunDirectory(path)
    run.read_record()
    found, skipped = checkpoint.newest_valid(run.checkpoints)
    if found is None:
        raise UserError("usage.no_checkpoint", path=str(path))
    step = checkpoint.read_progress(found).best_step if best else None
    if step is not None:
        return _intact(checkpoint.path_of(run.checkpoints, step))
    return Located(found, run, tuple(f"{name}: {problem}" for name, problem in skipped))


def _intact(path: Path) -> Located:
    if problem := checkpoint.problem_of(path):
        raise UserError("checkpoint.none_valid", path=str(path), problems=[problem])
    return Located(path, RunDirectory(path.parent.parent))

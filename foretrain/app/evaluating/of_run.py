"""The checkpoint of a run that `eval` evaluates."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from foretrain.base.safe_read import read_text
from foretrain.training import checkpoint
from foretrain.training.folder.located import locate
from foretrain.training.store import RunDirectory, RunRecord


@dataclass(frozen=True)
class OfRun:
    """A checkpoint whose checksums are right, and its run. `skipped`: newer ones that are damaged, and why."""

    directory: RunDirectory
    record: RunRecord
    path: Path
    step: int
    skipped: tuple[str, ...] = ()

    @property
    def weights_sha256(self) -> str:
        """As `weights_sha256` of its path."""
        return weights_sha256(self.path)


def weights_sha256(path: Path) -> str:
    """Of a checkpoint, over the checksums of the files of its weights."""
    listed = json.loads(read_text(path / checkpoint.MANIFEST))["files"]
    digests = [listed[name]["sha256"] for name in checkpoint.files_of(path, "model")]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def of_run(path: Path, *, best: bool) -> OfRun:
    """The newest intact checkpoint of a run, its best one, or the checkpoint at this path. Raises UserError."""
    found = locate(path, best=best)
    step = checkpoint.read_progress(found.path).step
    return OfRun(found.run, found.run.read_record(), found.path, step, found.skipped)

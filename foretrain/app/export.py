"""A trained model in the files that others read. `foretrain.export` for Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.app.train import need_torch

if TYPE_CHECKING:
    from foretrain.training.export import Exported, Form

SCHEMA = "foretrain.export/1"


def export(
    run: str | Path, to: Form = "hf", out: str | Path | None = None, *, best: bool = False, force: bool = False
) -> Exported:
    """What was written, and from which checkpoint: `foretrain.export("out", "hf").path`.

    `run`: a run, or one of its checkpoints. `to`: "hf" for transformers, with the tokenizer; "nanogpt" for a ckpt.pt
    that nanoGPT resumes; "safetensors" for the weights under nanoGPT's names. `out`: a folder, by default in the run.
    `best`: the checkpoint of lowest validation loss instead of the newest. `force`: into a folder that is not empty.
    Raises UserError: nothing to export, or a folder that is taken 2, no torch 4, damaged files 7, disk full 8.
    """
    need_torch()
    from foretrain.training import export as files

    return files.export(Path(run), to, None if out is None else Path(out), best=best, force=force)

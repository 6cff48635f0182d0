"""The checkpoint that an export is made from: found, verified, its weights read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.data.tokenizer import Tokenizer, document_end, tokenizer_of
from foretrain.model.shape import ModelShape
from foretrain.training import checkpoint
from foretrain.training.exports.folder import check_free, write_all
from foretrain.training.exports.forms import Exported, Form, FormOptions, module_of, quantize_command
from foretrain.training.store import RunDirectory, RunRecord


class Source:
    """A checkpoint that was verified, and its run. `notes`: ids of what a form has to say about what it wrote."""

    def __init__(self, path: Path, run: RunDirectory) -> None:
        self.path, self.run = path, run
        self.record: RunRecord = run.read_record()
        self.config: RunConfig = self.record.config
        self.progress = checkpoint.read_progress(path)
        self.shape = ModelShape.of(self.config)
        with checkpoint.tensors_in(path, "model") as held:
            self.weights: dict[str, torch.Tensor] = {name: split.whole().float() for name, split in held.items()}
        self.notes: list[str] = []
        for parameter in self.shape.parameters():
            found = self.weights.get(parameter.name)
            if found is None or tuple(found.shape) != parameter.shape:
                shapes = {"has": str(None if found is None else tuple(found.shape)), "needs": str(parameter.shape)}
                raise UserError("checkpoint.other_model", path=str(path), tensor=parameter.name, **shapes)

    def tokenizer(self) -> Tokenizer | None:
        """The dataset's tokenizer, where its files are still there and say it."""
        try:
            return tokenizer_of(self.record.dataset)
        except (UserError, OSError, ValueError):
            return None

    def separator(self, words: Tokenizer | None) -> int | None:
        """The id that ends a document; None where the model has no such token."""
        end = None if words is None else document_end(words)
        return end if end is not None and end < self.config.vocab_size else None


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


def export(
    path: Path,
    form: Form,
    out: Path | None = None,
    *,
    best: bool = False,
    force: bool = False,
    options: FormOptions | None = None,
) -> Exported:
    """Write the model of a run (its newest intact checkpoint, or its best) or of a checkpoint's folder.

    `out` is made, and must be empty unless `force`, which replaces files of the same names only. Raises UserError.
    """
    found = locate(path, best=best)
    module = module_of(form)
    if error := module.refusal(found.run.read_record().config):
        raise error
    out = out or found.run.path / f"export-{form}"
    check_free(out, force=force)
    source, asked = Source(found.path, found.run), options or FormOptions()
    names = write_all(out, lambda folder: module.write(source, folder, asked))
    return Exported(
        form=form, path=str(out), checkpoint=found.path.name, step=source.progress.step, files=names,
        skipped=() if best else found.skipped, notes=tuple(source.notes),
        quantize=quantize_command(out, asked) if form == "gguf" else "",
    )  # fmt: skip

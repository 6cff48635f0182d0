"""The checkpoint that an export is made from: found, verified, its weights read."""

from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.data.tokenizer import Tokenizer
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.model.shape import ModelShape
from foretrain.training import checkpoint
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
        if words is None or words.name == "char" or words.separator >= self.config.vocab_size:
            return None  # nanoGPT's character tables have none of their own
        return words.separator


def locate(path: Path, *, best: bool) -> tuple[Path, RunDirectory, tuple[str, ...]]:
    """(a checkpoint whose digests are right, its run, newer ones that are damaged and why). Raises UserError."""
    if (path / "state.json").is_file() and not (path / "run.json").is_file():
        run = RunDirectory(path.resolve().parent.parent)
        if problem := checkpoint.problem_of(path.resolve()):
            raise UserError("checkpoint.none_valid", path=str(path), problems=[problem])
        return path.resolve(), run, ()
    run = RunDirectory(path)
    run.read_record()
    found, skipped = checkpoint.newest_valid(run.checkpoints)
    if found is None:
        raise UserError("usage.no_checkpoint", path=str(path))
    if best:
        step = checkpoint.read_progress(found).best_step
        chosen = checkpoint.path_of(run.checkpoints, step) if step is not None else found
        if problem := checkpoint.problem_of(chosen):
            raise UserError("checkpoint.none_valid", path=str(chosen), problems=[problem])
        found = chosen
    return found, run, () if best else tuple(f"{name}: {problem}" for name, problem in skipped)

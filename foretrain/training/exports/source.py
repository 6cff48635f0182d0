"""The checkpoint that an export is made from: found, verified, its weights read."""

from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.data.tokenizer import Tokenizer, document_end
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
        end = None if words is None else document_end(words)
        return end if end is not None and end < self.config.vocab_size else None

"""What `eval` evaluates: a checkpoint of a run with its tokenizer and its data, or a folder of Hugging Face's."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.config.resolve import from_values
from foretrain.data.tokenizer import JsonTokenizer, Tokenizer, document_end, tokenizer_of
from foretrain.evaluation.windows import HubModel, OwnModel, Predictor
from foretrain.model.language_model import make_model
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun, source_of
from foretrain.training import checkpoint
from foretrain.training.device import place
from foretrain.training.exports.source import locate


@dataclass(frozen=True)
class OfRun:
    """A checkpoint whose checksums are right, and its run. `skipped`: newer ones that are damaged, and why."""

    directory: RunDirectory
    record: TrainedRun
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


@dataclass(frozen=True)
class Subject:
    """A model on its device with its tokenizer. `begins`: the id before a text's first one; None: there is none."""

    model: Predictor
    words: Tokenizer
    begins: int | None
    device: str


def device_of(wanted: str) -> torch.device:
    """The device that is asked for; "auto": a card, if there is one. Raises UserError."""
    return place(from_values({"device": wanted, "dtype": "float32", "compile": False}).config).device


def _words(run: OfRun) -> Tokenizer:
    words = tokenizer_of(run.record.dataset)
    if words is None:
        raise UserError("data.no_tokenizer", path=run.record.dataset.path)
    return words


def loaded(run: OfRun, device: str) -> Subject:
    """The model of a checkpoint in single precision. Raises UserError where its tokenizer is not known."""
    words = _words(run)
    config, on = run.record.config, device_of(device)
    model = make_model(config)
    checkpoint.load_model(run.path, model)
    return Subject(OwnModel(model.to(on), config.vocab_size), words, document_end(words), str(on))


def is_hugging_face(path: Path) -> bool:
    """Whether a folder holds a model of Hugging Face's, and no run."""
    return (path / "config.json").is_file() and source_of(path) != "trained"


def loaded_folder(folder: Path, device: str) -> Subject:
    """The model of a Hugging Face folder in single precision. Raises UserError where it cannot be loaded."""
    if not (folder / JsonTokenizer.FILE).is_file():
        raise UserError("data.no_tokenizer_file", path=str(folder))
    words = JsonTokenizer.load(folder)
    on = device_of(device)
    return Subject(HubModel(folder, on), words, _begins(folder, words), str(on))


def _begins(folder: Path, words: JsonTokenizer) -> int:
    """bos_token of tokenizer_config.json, else what separates texts."""
    try:
        said: Any = json.loads(read_text(folder / JsonTokenizer.SETTINGS)).get("bos_token")
    except (OSError, ValueError, AttributeError):
        said = None
    name = said.get("content") if isinstance(said, dict) else said
    id = words.id_of(name) if isinstance(name, str) else None
    return words.separator if id is None else id

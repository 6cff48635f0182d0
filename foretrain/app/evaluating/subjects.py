"""What `eval` evaluates: a checkpoint of a run with its tokenizer and its data, or a folder of Hugging Face's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretrain.app.evaluating.of_run import OfRun
from foretrain.base.errors import UserError
from foretrain.base.safe_read import read_text
from foretrain.config.families import family_of
from foretrain.config.resolve import from_values
from foretrain.data.tokenizer import JsonTokenizer, TiktokenTokenizer, Tokenizer, document_end
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.evaluation.models import HubModel, OwnModel
from foretrain.evaluation.windows import Predictor
from foretrain.model.language_model import make_model
from foretrain.training import checkpoint
from foretrain.training.device import place


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
    return (path / "config.json").is_file() and not (path / "run.json").is_file()


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


def has_layout(run: OfRun) -> bool:
    """Whether lm-eval can run the Hugging Face export of a run.

    Its family must have a layout there, and its tokenizer a token that ends a text: lm-eval needs one as context of
    texts that have none.
    """
    return bool(family_of(run.record.config).hugging_face) and _ends_texts(_words(run))


def _ends_texts(words: Tokenizer) -> bool:
    """Of tiktoken's only GPT-2's can be exported."""
    return isinstance(words, JsonTokenizer) or (isinstance(words, TiktokenTokenizer) and words.name == "gpt2")

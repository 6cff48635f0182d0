"""The form `onnx`: a graph from token ids to logits in fp32, for any number of rows of any length. No KV cache."""

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from foretrain.base.errors import UserError, need_extra
from foretrain.config.options import RunConfig
from foretrain.data.hf_tokenizer import files_of
from foretrain.model.language_model import LanguageModel, make_model
from foretrain.training import checkpoint
from foretrain.training.exports.forms import FormOptions
from foretrain.training.exports.source import Source

FILE = "model.onnx"


def refusal(config: RunConfig) -> UserError | None:
    return None


def write(source: Source, folder: Path, options: FormOptions) -> None:
    """Write model.onnx, model.onnx.data and the tokenizer's files. Raises UserError where a package is missing."""
    for package in ("onnx", "onnxscript"):
        need_extra(package, "onnx")
    model = make_model(source.config).eval()
    checkpoint.put_weights(source.weights.items(), model, str(source.path))
    block = source.config.block_size
    dynamic = {"input_ids": {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens", max=block)}}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it deprecates within itself
        torch.onnx.export(
            _Logits(model), (torch.zeros(2, max(2, block // 2), dtype=torch.long),), folder / FILE, dynamo=True,
            input_names=["input_ids"], output_names=["logits"], dynamic_shapes=dynamic, external_data=True,
            verbose=False,
        )  # fmt: skip
    words = source.tokenizer()
    files = files_of(words, block) if words is not None else {}
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    if not files:
        source.notes.append("no_tokenizer")


class _Logits(nn.Module):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model.lm_head(self.model.hidden(input_ids))

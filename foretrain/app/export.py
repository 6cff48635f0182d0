"""A trained model in the files that others read. `foretrain.export` for Python."""

from pathlib import Path
from typing import Any

from foretrain.app.model_card import card_of, check_repository, facts_of, upload
from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.base.installation import Later, installed
from foretrain.training.exports.forms import Exported, Form, FormOptions, GgufType

SCHEMA = "foretrain.export/1"
_of_run: Any = Later("foretrain.app.evaluation")  # which imports torch


def export(
    run: str | Path,
    to: Form = "hf",
    out: str | Path | None = None,
    *,
    best: bool = False,
    force: bool = False,
    gguf_type: GgufType | None = None,
    push: str | None = None,
) -> Exported:
    """What was written, and from which checkpoint: `foretrain.export("out", "hf").path`.

    `run`: a run, or one of its checkpoints. `to`: "hf" for transformers, with the tokenizer and a model card; "gguf"
    for llama.cpp; "onnx" for ONNX Runtime; "nanogpt" for a ckpt.pt that nanoGPT resumes; "safetensors" for the weights
    under nanoGPT's names.
    `out`: a folder, by default in the run. `best`: the checkpoint of lowest validation loss instead of the newest.
    `force`: into a folder that is not empty. `gguf_type`: how GGUF stores matrices, f16 by default. `push`:
    owner/name on the Hub to upload the "hf" folder to. Raises UserError: nothing to export, or a folder that is taken
    2, no torch, no upload or no right to write 4, damaged files 7, disk full 8.
    """
    if gguf_type is not None and to != "gguf":
        raise UserError("usage.gguf_type_alone", form=to)
    if push is not None:
        if to != "hf":
            raise UserError("usage.push_form", form=to)
        check_repository(push)
    need_torch()
    from foretrain.training.exports.source import export as write_export

    card = _card if installed("huggingface-hub") else None
    made = write_export(
        Path(run), to, None if out is None else Path(out), best=best, force=force,
        options=FormOptions(gguf_type=gguf_type or "f16", card=card),
    )  # fmt: skip
    if to == "hf" and card is None:
        made = made.model_copy(update={"notes": (*made.notes, "no_card")})
    if push is None:
        return made
    address = upload(push, Path(made.path), made.files, f"{made.checkpoint} of a foretrain run")
    return made.model_copy(update={"pushed": address})


def _card(source: Any) -> str:
    lines, weights = source.run.read_lines("metrics"), _of_run.weights_sha256(source.path)
    scores = next((each for each in source.run.scores() if each.weights_sha256 == weights), None)
    return card_of(facts_of(source.record, source.progress, lines, "no_tokenizer" not in source.notes, scores))

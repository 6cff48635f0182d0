"""A trained model in the files that others read: Hugging Face's, nanoGPT's ckpt.pt, or plain safetensors.

Weights come from a checkpoint's files, after their digests. Files are staged beside their place and renamed.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.families import family_of
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.data import tokenizer
from foretrain.data.hf_tokenizer import files_of
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.model import foreign
from foretrain.model.optimizer import learning_rate
from foretrain.model.shape import ModelShape
from foretrain.training import checkpoint
from foretrain.training.store import RunDirectory, RunRecord

Form = Literal["hf", "nanogpt", "safetensors"]
_MOST_SUPPRESSED = 1000  # rows beyond the tokenizer that generation_config.json can name one by one


class Exported(Record):
    """What was written where, from which checkpoint; `notes` are ids of what the reader should know."""

    form: Form
    path: str
    checkpoint: str
    step: int
    files: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # newer checkpoints that are damaged, and why
    notes: tuple[str, ...] = ()


class _Source:
    """A checkpoint that was verified, and its run."""

    def __init__(self, path: Path, run: RunDirectory) -> None:
        self.path = path
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
                has = None if found is None else tuple(found.shape)
                raise UserError(
                    "checkpoint.other_model", path=str(path), tensor=parameter.name, has=str(has),
                    needs=str(parameter.shape),
                )  # fmt: skip


def export(path: Path, form: Form, out: Path | None = None, *, best: bool = False, force: bool = False) -> Exported:
    """Write the model of a run (its newest intact checkpoint, or its best) or of a checkpoint's folder.

    `out` is made, and must be empty unless `force`, which replaces files of the same names only. Raises UserError.
    """
    checkpoint_path, run, skipped = _locate(path, best=best)
    family = family_of(run.read_record().config)
    can = {"hf": bool(family.hugging_face), "nanogpt": family.name == "nanogpt", "safetensors": True}
    if not can[form]:
        raise UserError("usage.export_recipe", recipe=family.name, form=form)
    out = out or run.path / f"export-{form}"
    _check_free(out, force=force)
    source = _Source(checkpoint_path, run)
    write = {"hf": _hugging_face, "nanogpt": _nanogpt, "safetensors": _safetensors}[form]
    names = _write_all(out, lambda folder: write(source, folder))
    return Exported(
        form=form, path=str(out), checkpoint=checkpoint_path.name, step=source.progress.step, files=names,
        skipped=skipped, notes=tuple(source.notes),
    )  # fmt: skip


def _locate(path: Path, *, best: bool) -> tuple[Path, RunDirectory, tuple[str, ...]]:
    """(a checkpoint whose digests are right, its run, newer ones that are damaged and why)."""
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


def _check_free(out: Path, *, force: bool) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise UserError("usage.cannot_write_file", path=str(out), reason="it is a file")
        if not force and out.is_dir() and any(out.iterdir()):
            raise UserError("usage.export_not_empty", path=str(out))
    except OSError as error:
        raise UserError("usage.cannot_write_file", path=str(out), reason=error.strerror or str(error)) from None


def _write_all(out: Path, write: Callable[[Path], None]) -> tuple[str, ...]:
    """Let `write` fill a folder beside `out`, then move its files there. Returns their names."""
    staging = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        write(staging)
        files = sorted(staging.iterdir())
        for file in files:
            file.chmod(0o644)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        _publish(staging, out, files)
    except OSError as error:
        raise _disk_error(out, error) from None
    except (RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the system's errors in their own
        free = shutil.disk_usage(out.parent).free
        if "os error 28" not in str(error).lower() and free > 1 << 20:
            raise
        raise _disk_error(out, OSError(errno.ENOSPC, "no space")) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return tuple(file.name for file in files)


def _disk_error(out: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError("disk.full_export", path=str(out))
    return UserError("usage.cannot_write_file", path=str(out), reason=error.strerror or str(error))


def _publish(staging: Path, out: Path, files: list[Path]) -> None:
    """The folder as a whole where nothing was; else its files, one by one, each as a whole."""
    if not (out.is_dir() and any(out.iterdir())):
        staging.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        staging.rename(out)
        return
    for file in files:
        file.replace(out / file.name)


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


# -- the forms -----------------------------------------------------------------------------------------------


def _hugging_face(source: _Source, folder: Path) -> None:
    """What transformers' AutoModelForCausalLM.from_pretrained reads, and AutoTokenizer where the tokenizer is known."""
    config = source.config
    words = _tokenizer(source)
    separator = None if words is None or words.name == "char" else words.separator  # characters have none of their own
    if separator is not None and separator >= config.vocab_size:
        separator = None
    made = foreign.to_hugging_face(source.weights, source.shape)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    _json(folder / "config.json", source.shape.family.write_config(config, separator))
    generation: dict[str, Any] = {"bos_token_id": separator, "eos_token_id": separator}
    if words is not None and 0 < config.vocab_size - words.vocab_size <= _MOST_SUPPRESSED:
        generation["suppress_tokens"] = list(range(words.vocab_size, config.vocab_size))  # rows that no text has
    _json(folder / "generation_config.json", generation)
    if source.shape.family.name == "nanogpt" and not config.bias:
        source.notes.append("zero_biases")
    files = files_of(words, config.block_size) if words is not None else {}
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    if not files:
        source.notes.append("no_tokenizer")


def _tokenizer(source: _Source) -> tokenizer.Tokenizer | None:
    """The dataset's tokenizer, where its files are still there and say it."""
    data = source.record.dataset
    try:
        return tokenizer_of(data)
    except (UserError, OSError, ValueError):
        return None


def _nanogpt(source: _Source, folder: Path) -> None:
    """ckpt.pt as nanoGPT's train.py and sample.py load it."""
    config, record = source.config, source.record
    with checkpoint.tensors_in(source.path, "optimizer") as held:
        moments = {key: split.whole() for key, split in held.items()}
    kinds = {key.split("/", 1)[0] for key in moments}
    if not kinds <= {"step", "exp_avg", "exp_avg_sq"}:
        raise UserError("usage.export_optimizer", kinds=sorted(kinds))
    rate = learning_rate(config, source.progress.step)
    optimizer = foreign.nanogpt_optimizer(
        source.weights, moments, config, rate, fused=record.gpu.kind == "cuda"
    )  # fmt: skip
    values = {knob.name: getattr(config, knob.name) for knob in OPTIONS.values() if not knob.ours}
    values |= {"device": record.gpu.kind, "dtype": record.dtype, "compile": record.compiled, "init_from": "resume"}
    arguments = (*named(lambda option: option.from_weights and option.nanogpt != "cannot"), "dropout")
    best = source.progress.best_val_loss
    document = {
        "model": {**source.weights, "lm_head.weight": source.weights[source.shape.family.tokens[0]]},
        "optimizer": optimizer,
        "model_args": {key: getattr(config, key) for key in arguments},
        "iter_num": source.progress.step,
        "best_val_loss": 1e9 if best is None else best,  # nanoGPT's own word for none yet
        "config": values,
    }
    torch.save(document, folder / "ckpt.pt")


def _safetensors(source: _Source, folder: Path) -> None:
    """Weights by nanoGPT's names, and all knobs; `init_from` reads it back."""
    save_file(source.weights, folder / "model.safetensors", metadata={"format": "pt"})
    _json(folder / "config.json", source.config.model_dump())

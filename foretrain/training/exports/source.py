"""The verified checkpoint that an export is made from."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foretrain.base.errors import UserError
from foretrain.base.files import not_written
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.data.tokenizer import Tokenizer, document_end, tokenizer_of
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.training import checkpoint
from foretrain.training.exports.forms import Exported, Form, FormOptions, module_of, quantize_command

_NO_SPACE = 1 << 20  # bytes; a disk with less counts as full


def check_free(out: Path, *, force: bool) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise UserError("usage.cannot_write_file", path=str(out), reason="it is a file")
        if not force and out.is_dir() and any(out.iterdir()):
            raise UserError("usage.export_not_empty", path=str(out))
    except OSError as error:
        raise not_written(out, error) from None


def write_all(out: Path, write: Callable[[Path], None]) -> tuple[str, ...]:
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
    except (OSError, RuntimeError, SafetensorError) as error:
        if (found := _disk_error(out, error)) is None:
            raise
        raise found from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return tuple(file.name for file in files)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _disk_error(out: Path, error: BaseException) -> UserError | None:
    code = _errno(error, out.parent)
    if code == errno.ENOSPC:
        return UserError("disk.full_export", path=str(out))
    if code in (errno.EDQUOT, errno.EFBIG):
        return UserError("disk.limit_export", path=str(out))
    return not_written(out, error) if isinstance(error, OSError) else None


def _errno(error: BaseException, folder: Path) -> int | None:
    """Return the system's number of an error from safetensors' text; numpy and torch have lost it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if os_code := re.search(r"os error (\d+)", str(error).lower()):
        return int(os_code[1])
    if shutil.disk_usage(folder).free <= _NO_SPACE:
        return errno.ENOSPC
    return errno.EFBIG if _limits_files() else None


def _limits_files() -> bool:
    try:
        limits = import_module("resource")  # Windows has none
    except ImportError:
        return False
    return bool(limits.getrlimit(limits.RLIMIT_FSIZE)[0] != limits.RLIM_INFINITY)


def _publish(staging: Path, out: Path, files: list[Path]) -> None:
    if not (out.is_dir() and any(out.iterdir())):
        staging.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        staging.rename(out)
        return
    for file in files:
        file.replace(out / file.name)


class Source:
    """A verified checkpoint, and its run. `notes`: ids of what a form has to report about its files."""

    def __init__(self, path: Path, run: RunDirectory) -> None:
        self.path, self.run = path, run
        self.record: TrainedRun = run.read_record()
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
        try:
            return tokenizer_of(self.record.dataset)
        except (UserError, OSError, ValueError):
            return None

    def separator(self, words: Tokenizer | None) -> int | None:
        end = None if words is None else document_end(words)
        return end if end is not None and end < self.config.vocab_size else None


@dataclass(frozen=True)
class Located:
    """An intact checkpoint, and its run. `skipped`: newer ones that are damaged, and why."""

    path: Path
    run: RunDirectory
    skipped: tuple[str, ...] = ()


def locate(path: Path, *, best: bool) -> Located:
    """Find the newest intact checkpoint of a run, its best one, or the one at this path. Raises UserError."""
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
    """Export the model of a run or of a checkpoint's folder to `out`, empty unless `force`. Raises UserError."""
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

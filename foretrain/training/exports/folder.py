"""The folder of an export: staged beside its place and renamed, so that it is there as a whole or not at all."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretrain.base.durable import not_written
from foretrain.base.errors import UserError

_NO_SPACE = 1 << 20  # bytes; a disk with less counts as full


def check_free(out: Path, *, force: bool) -> None:
    """Raise UserError where a folder cannot be written. `force`: it may hold files already."""
    try:
        if out.exists() and not out.is_dir():
            raise UserError("usage.cannot_write_file", path=str(out), reason="it is a file")
        if not force and out.is_dir() and any(out.iterdir()):
            raise UserError("usage.export_not_empty", path=str(out))
    except OSError as error:
        raise not_written(out, error) from None


def write_all(out: Path, write: Callable[[Path], None]) -> tuple[str, ...]:
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
    """What a failed write means; None where it was not the disk that failed."""
    code = _errno(error, out.parent)
    if code == errno.ENOSPC:
        return UserError("disk.full_export", path=str(out))
    if code in (errno.EDQUOT, errno.EFBIG):
        return UserError("disk.limit_export", path=str(out))
    return not_written(out, error) if isinstance(error, OSError) else None


def _errno(error: BaseException, folder: Path) -> int | None:
    """The system's number of an error. safetensors has it in its text; numpy, which counts items, and torch have lost
    it, and what the disk and the process may do tells."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if said := re.search(r"os error (\d+)", str(error).lower()):
        return int(said[1])
    if shutil.disk_usage(folder).free <= _NO_SPACE:
        return errno.ENOSPC
    return errno.EFBIG if _limits_files() else None


def _limits_files() -> bool:
    """Whether this process may write files of some size only, as after `ulimit -f`."""
    try:
        limits = import_module("resource")  # Windows has none
    except ImportError:
        return False
    return bool(limits.getrlimit(limits.RLIMIT_FSIZE)[0] != limits.RLIM_INFINITY)


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

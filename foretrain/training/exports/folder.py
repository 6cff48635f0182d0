"""The folder of an export: staged beside its place and renamed, so that it is there as a whole or not at all."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

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
        raise UserError("usage.cannot_write_file", path=str(out), reason=error.strerror or str(error)) from None


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
    except OSError as error:
        if error.errno is None and _is_full(out.parent):  # numpy's, which counts items and says no more
            error = OSError(errno.ENOSPC, "no space")
        raise _disk_error(out, error) from None
    except (RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the system's errors in their own
        if "os error 28" not in str(error).lower() and not _is_full(out.parent):
            raise
        raise _disk_error(out, OSError(errno.ENOSPC, "no space")) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return tuple(file.name for file in files)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON file, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free <= _NO_SPACE


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

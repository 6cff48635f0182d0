"""A memory snapshot in a file, analysed in a process with a cap on memory and time: python -P -m
foretrain.analysis.snapshot_file FILE NAME DEVICE (-1: the device that holds most)"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from foretrain.analysis.snapshot_analysis import SnapshotAnalysis, analyse
from foretrain.base import processes
from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes, open_stream, read_bytes
from foretrain.base.units import GIB, MIB
from foretrain.predict.snapshot import unpickled

MAX_FILE_BYTES = 2 * GIB
BASE_BYTES, BYTES_PER_BYTE, MOST_BYTES = 768 * MIB, 30, 24 * GIB  # dictionaries take about 8 bytes for one of a pickle
MOST_S = 600
_PICKLE = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def looks_like_one(path: Path) -> bool:
    try:
        if path.suffix in (".pickle", ".pkl"):
            return path.exists() and not path.is_dir()  # `read` reports a device of that name
    except (OSError, ValueError):
        return False
    return first_bytes(path, 2) in _PICKLE


def read(path: Path, device: int | None = None) -> SnapshotAnalysis:
    """Analyse a file. Raises UserError 'data.snapshot…' with its fault."""
    try:
        with open_stream(path):
            size = path.stat().st_size
    except OSError as error:
        raise UserError("data.explain_unreadable", path=str(path), reason=error.strerror or str(error)) from None
    if size > MAX_FILE_BYTES:
        raise UserError("data.snapshot_large", path=str(path), size=size, limit=MAX_FILE_BYTES)
    words = (str(path), path.name, str(-1 if device is None else device))
    try:
        ended = processes.finished("foretrain.analysis.snapshot_file", *words, most_s=MOST_S)
    except subprocess.TimeoutExpired:
        raise UserError("data.snapshot", problem=f"{path}: reading it did not end within {MOST_S} s") from None
    if ended.returncode < 0 or b"MemoryError" in ended.stderr:
        raise UserError("data.snapshot_memory", path=str(path), cap=_cap_bytes(size), size=size)
    if ended.returncode:
        raise RuntimeError(ended.stderr.decode("utf-8", "replace"))
    answer = json.loads(ended.stdout)
    if "problem" in answer:
        raise UserError("data.snapshot", problem=answer["problem"])
    return SnapshotAnalysis.model_validate(answer)


def _cap_bytes(file_bytes: int) -> int:
    return min(MOST_BYTES, BASE_BYTES + BYTES_PER_BYTE * file_bytes)


def answer_of(path: str, name: str, device: int) -> dict[str, Any]:
    try:
        data = read_bytes(Path(path), MAX_FILE_BYTES)
        return analyse(unpickled(data, name), name, None if device < 0 else device).to_json()
    except ValueError as error:
        return {"problem": str(error).splitlines()[0]}
    except OSError as error:
        return {"problem": f"{name}: cannot be read ({error.strerror or type(error).__name__})"}
    except (RecursionError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        return {"problem": f"{name}: is not a memory snapshot, or a damaged one ({type(error).__name__})"}


def main() -> None:
    path, name, device = sys.argv[1:4]
    processes.limit(memory_bytes=_cap_bytes(Path(path).stat().st_size), processor_s=MOST_S)
    answer = json.dumps(answer_of(path, name, int(device)))
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()

"""Weights & Biases. An offline run (WANDB_MODE=offline) is a log of protobuf records in LevelDB's framing
(github.com/google/leveldb, doc/log_format.md), for which the library has no reader in Python."""

import contextlib
import importlib
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from foretrain.base.errors import UserError
from foretrain.base.files import open_stream
from foretrain.runs.trackers.tracker import (
    MOST_VALUES,
    STEP,
    Job,
    Row,
    Started,
    Tracked,
    Tracker,
    chosen,
    damaged,
    short,
)

ONLINE_S = 15.0
_MAGIC = b":W&B"
_BLOCK, _HEADER = 32 * 1024, struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4  # 3: a part in the middle
_MOST_OF_A_RECORD = 64 * 2**20


class Wandb(Tracker):
    name, package, check, project = "wandb", "wandb", "`wandb login`", "WANDB_PROJECT"

    def start(self, job: Job) -> Started:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own telemetry
        self.wandb: Any = importlib.import_module("wandb")
        mode, why = os.environ.get("WANDB_MODE", "online"), ""
        try:
            self.run = self._init(job, mode)
        except Exception as error:
            if mode != "online":
                raise
            why = short(error)
            self.run = self._init(job, "offline")
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        settings = self.run.settings
        look = self.run.url or f"wandb sync {settings.sync_dir}"
        return Started(id=self.run.id, look=look, offline=why, send=f"wandb sync {settings.sync_dir}" if why else "")

    def _init(self, job: Job, mode: str) -> Any:
        settings = self.wandb.Settings(
            silent=True, console="off", save_code=False, disable_git=True, disable_code=True, init_timeout=ONLINE_S,
            finish_timeout=ONLINE_S, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
            x_save_requirements=False,
        )  # fmt: skip
        return self.wandb.init(
            project=job.project, name=job.name, dir=str(job.folder), config=dict(job.config), id=job.resumed,
            resume="allow", mode=mode, settings=settings,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        self.run.log({**values, STEP: step, "_timestamp": at_s})

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)

    @classmethod
    def claims(cls, path: Path, head: bytes) -> bool:
        return head.startswith(_MAGIC) or (path.is_dir() and bool(_files(path)))

    @classmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        cls.need_to_read(path)
        files = _files(path) if path.is_dir() else [path]
        by_id: dict[str, list[Path]] = {}
        for file in files:  # a resumed run has a folder for each of its processes
            by_id.setdefault(file.stem.removeprefix("run-"), []).append(file)
        known = {id: id for id in by_id}
        id = chosen(path, known, run)
        rows: list[Row] = []
        config: dict[str, Any] = {}
        name = id
        for file in by_id[id]:
            found = _Reader(file).read()
            rows += found.rows
            config, name = config | found.config, found.name or name
        return Tracked(cls.name, name, rows, config)


def _files(path: Path) -> list[Path]:
    """Return the logs of runs in a run's folder, in the `wandb` folder, or in the one above it; the earliest first."""
    for pattern in ("run-*.wandb", "*run-*/run-*.wandb", "wandb/*run-*/run-*.wandb"):
        if found := list(path.glob(pattern)):
            return sorted(found, key=lambda file: file.parent.name.rpartition("run-")[2])  # which begins with the time
    return []


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.config: dict[str, Any] = {}
        self.name = ""
        self.values = 0

    def read(self) -> "_Reader":
        """Read all complete records. Raises UserError where something in the middle is damaged."""
        messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
        try:
            with open_stream(self.path) as file:
                for data in _records(file):
                    record = messages.Record()
                    record.ParseFromString(data)
                    self._take(record)
        except UserError:
            raise
        except OSError as error:
            raise damaged(self.path, Wandb.name, error.strerror or error) from None
        except Exception as error:  # protobuf's DecodeError, which is not a ValueError, and what JSON raises
            raise damaged(self.path, Wandb.name, error) from None
        return self

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row: Row = {}
            for item in record.history.item:
                value = _json(item.value_json)
                if isinstance(value, int | float | str):
                    row["/".join(item.nested_key) if item.nested_key else item.key] = value
            self.values += len(row)
            if self.values > MOST_VALUES:
                raise damaged(self.path, Wandb.name, f"it has more than {MOST_VALUES:,} values")
            self.rows.append(row)
        elif kind in ("run", "config"):
            self.name = record.run.display_name or self.name if kind == "run" else self.name
            for item in (record.run.config if kind == "run" else record.config).update:
                key = item.key or "/".join(item.nested_key)
                if key != "_wandb":
                    self.config[key] = _json(item.value_json)


def _json(text: str) -> Any:
    """Return a value; None if the text is not valid JSON. Some versions write raw bytes there."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a log, without a last one that a kill cut off. Raises ValueError for damage."""
    if file.read(7)[:4] != _MAGIC:
        raise ValueError("it does not begin as a log of wandb's")
    at, parts = 7, io.BytesIO()
    while True:
        room = _BLOCK - at % _BLOCK
        if room < _HEADER.size:
            at += len(file.read(room))
            continue
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        checksum, length, kind = _HEADER.unpack(header)
        if checksum == length == kind == 0:  # the padding of a block
            at += _HEADER.size + len(file.read(room - _HEADER.size))
            continue
        data = file.read(length)
        if len(data) < length:
            return
        if length > room - _HEADER.size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"the checksum of the record at byte {at:,} does not match")
        at += _HEADER.size + length
        if kind in (_FULL, _FIRST):
            parts = io.BytesIO()
        parts.write(data)
        if parts.tell() > _MOST_OF_A_RECORD:
            raise ValueError(f"the record that ends at byte {at:,} is too large")
        if kind in (_FULL, _LAST):
            yield parts.getvalue()


TRACKERS = (Wandb,)

"""The built-in corpus as token files, in nanoGPT's layout with an index beside it. Made once, then reused."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.data import corpus
from foretrain.data.dataset import BUILT_IN, DATA_DIR, DatasetInfo, read_info
from foretrain.data.shards import ITEM_BYTES, SPLITS
from foretrain.data.tokenizer import TOKENIZERS, Tokenizer


def built_in_path(config: RunConfig) -> Path:
    size = f"-{config.vocab_size}" if config.tokenizer == "bpe" else ""
    return DATA_DIR / f"{BUILT_IN}-{config.tokenizer}{size}-{corpus.fingerprint()[:8]}"


def prepare_built_in(config: RunConfig) -> DatasetInfo:
    path = built_in_path(config)
    if not (path / "meta.json").is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            try:
                _write(config, staging)
                _publish(staging, path)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(path.parent).free
                raise UserError("disk.no_room_for_data", path=str(path), free=free) from None
            raise UserError("environment.cannot_write", path=str(path), reason=error.strerror or str(error)) from None
    return read_info(path)


def _publish(staging: Path, path: Path) -> None:
    try:
        staging.rename(path)
    except OSError:
        if not (path / "meta.json").is_file():  # another process was faster, or something is in the way
            raise


def _write(config: RunConfig, folder: Path) -> None:
    make, _ = TOKENIZERS[config.tokenizer]
    tokenizer = make(lambda: corpus.documents("train"), config.vocab_size)
    dtype = "uint16" if tokenizer.vocab_size <= 65536 else "uint32"
    splits = {}
    for split in SPLITS:
        ids = _encode(tokenizer, split, dtype)
        data = ids.tobytes()
        (folder / f"{split}.bin").write_bytes(data)
        splits[split] = {
            "tokens": len(ids), "sha256": hashlib.sha256(data).hexdigest(), "source_bytes": corpus.size_bytes(split),
            "max_id": int(ids.max()),
        }  # fmt: skip
    tokenizer.save(folder)
    meta = {
        "dtype": dtype, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.name,
        "fingerprint": corpus.fingerprint(),
        "max_id": max(split["max_id"] for split in splits.values()), "splits": splits,
    }  # fmt: skip
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _encode(tokenizer: Tokenizer, split: str, dtype: str) -> np.ndarray:
    limit = 2 ** (8 * ITEM_BYTES[dtype])
    parts = []
    for document in corpus.documents(split):
        encoded = tokenizer.encode(document)
        wide = (
            np.frombuffer(encoded, dtype=np.uint8).astype(np.int64)
            if isinstance(encoded, bytes)
            else np.array(encoded, dtype=np.int64)
        )
        assert wide.size == 0 or (wide.min() >= 0 and wide.max() < limit)
        parts += [wide.astype(dtype), np.array([tokenizer.separator], dtype=dtype)]
    return np.concatenate(parts)

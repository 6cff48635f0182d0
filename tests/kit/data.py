"""Datasets in every layout that is read, made in a moment."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

from foretrain.data.shards import (
    HISTOGRAM_BINS,
    INDEX,
    DatasetIndex,
    Settings,
    Shard,
    Source,
    Split,
    TokenizerInfo,
    block_digest,
    histogram_bin,
    index_text,
    shard_name,
)

NO_TOKENIZER = hashlib.sha256(b"byte").hexdigest()


def documents(count: int, seed: int = 0, vocab: int = 96) -> list[np.ndarray]:
    """Documents of ids from 1 on, each with the separator 0 behind it; each id mostly follows from the one before."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(1, 60, count):
        ids = (np.cumsum(random.integers(1, 3, length)) + random.integers(vocab)) % (vocab - 1) + 1
        made.append(np.append(ids, 0))
    return made


def write_shards(
    folder: Path, texts: dict[str, list[np.ndarray]], *, shard_tokens: int = 700, dtype: str = "uint16",
    vocab: int = 256, tokenizer: str = "byte", block_bytes: int = 256, sha256: str = NO_TOKENIZER,
) -> Path:  # fmt: skip
    """foretrain's own layout, with small shards and blocks, written without foretrain's writer."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {name: _split(folder, name, found, shard_tokens, dtype, block_bytes) for name, found in texts.items()}
    index = DatasetIndex(
        dtype=dtype, vocab_size=vocab, tokenizer=TokenizerInfo(name=tokenizer, sha256=sha256, separator=0),
        source=Source(fingerprint="f", description="made by a test", files=1),
        settings=Settings(
            seed=0, shuffle_buffer=0, val_share=0.1, dedup=False, text_column="text", max_document_bytes=1,
            shard_tokens=shard_tokens,
        ),
        splits=splits,
    )  # fmt: skip
    (folder / INDEX).write_text("".join(index_text(index)), "utf-8")
    return folder


def _split(folder: Path, name: str, found: list[np.ndarray], shard_tokens: int, dtype: str, block_bytes: int) -> Split:
    ids = np.concatenate(found) if found else np.zeros(0)
    ends = np.cumsum([len(document) for document in found])
    histogram = [0] * HISTOGRAM_BINS
    for document in found:
        histogram[histogram_bin(len(document))] += 1
    shards = []
    for number, first in enumerate(range(0, len(ids), shard_tokens)):
        own = ids[first : first + shard_tokens].astype(dtype)
        data = own.tobytes()
        path = folder / shard_name(name, number)
        path.write_bytes(data)
        blocks = b"".join(block_digest(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes))
        shards.append(
            Shard(
                file=path.name, tokens=len(own), documents=int(((ends > first) & (ends <= first + len(own))).sum()),
                min_id=int(own.min()), max_id=int(own.max()), sha256=hashlib.sha256(data).hexdigest(),
                block_bytes=block_bytes, blocks=blocks,
            )
        )  # fmt: skip
    return Split(
        tokens=len(ids), documents=len(found), source_bytes=len(ids) - len(found),
        min_id=min((s.min_id for s in shards), default=None), max_id=max((s.max_id for s in shards), default=None),
        length_histogram=tuple(histogram), shards=tuple(shards),
    )  # fmt: skip


def shards(folder: Path, count: int = 100, seed: int = 0, **options: object) -> Path:
    return write_shards(folder, {"train": documents(count, seed), "val": documents(30, seed + 1000)}, **options)  # type: ignore[arg-type]


def ids_of(folder: Path, split: str) -> np.ndarray:
    index = json.loads((folder / INDEX).read_text())
    parts = [np.fromfile(folder / s["file"], index["dtype"]) for s in index["splits"][split]["shards"]]
    return np.concatenate(parts)


def llmc_bytes(ids: np.ndarray, magic: int = 20240520, version: int = 1) -> bytes:
    """As llm.c's data_common.py has it: 256 int32 and the ids."""
    header = struct.pack("<3i", magic, version, len(ids)) + bytes(1024 - 12)
    return header + ids.astype(np.uint16 if magic == 20240520 else np.uint32).tobytes()


def write_npy(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for name, count in (("val_000000", 300), ("train_000001", 1000), ("train_000002", 400)):
        np.save(folder / f"edufineweb_{name}.npy", random.integers(0, 96, count).astype(np.uint16))
    return folder


def write_llmc(folder: Path, seed: int = 0, magic: int = 20240520, version: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for name, count in (("val_000000", 300), ("train_000001", 1000), ("train_000002", 400)):
        data = llmc_bytes(random.integers(0, 96, count), magic, version)
        (folder / f"fineweb_{name}.bin").write_bytes(data)
    return folder

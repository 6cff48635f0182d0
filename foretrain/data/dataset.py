"""A prepared dataset, read from its files without torch or numpy: counts, vocabulary, tokenizer, fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Any

from foretrain.base import files
from foretrain.base.errors import UserError
from foretrain.base.files import JSON_BYTES, read_bytes, read_text
from foretrain.base.records import Record
from foretrain.data.shards import ITEM_BYTES, SPLITS
from foretrain.data.token_layout import Layout, is_dataset, read_layout

DATA_DIR = Path("data")
BUILT_IN = "python-stdlib"
# Tables of 150,000 characters take less than 3 MB. An opcode of one byte makes an object of 72.
_MAX_PICKLE_BYTES = 4 * 2**20
MAX_VOCABULARY = 1 << 32  # ids are uint32 at most
# Of the built-in corpus, by its tokenizer; bpe is trained to the wanted size.
BUILT_IN_VOCABULARY = {"byte": 256, "gpt2": 50257}


class DatasetInfo(Record):
    """A dataset on disk; None where its files do not tell. `parts`: of a mix. `remote`: where shards come from."""

    name: str
    path: str
    dtype: str = "uint16"
    train_tokens: int
    val_tokens: int
    vocab_size: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None  # over its vocabulary and rules, where the index has it
    fingerprint: str | None = None
    max_id: int | None = None
    format: str = "nanogpt"
    remote: str | None = None
    parts: "tuple[Part, ...]" = ()

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.parts[0].dataset.path if self.parts else self.path)

    def tokens(self, split: str) -> int:
        return self.train_tokens if split == "train" else self.val_tokens


class Part(Record):
    weight: float
    dataset: DatasetInfo


def find(name: str) -> Path | None:
    for path in (Path(name), DATA_DIR / name):
        if is_dataset(path):
            return path
    return None


def read_info(path: Path, remote: str | None = None) -> DatasetInfo:
    """Read the dataset in a folder. `remote`: where its shards are, if only the index is here. Raises UserError."""
    meta = _checked(read_meta(path), path)
    layout = read_layout(path, meta.get("dtype", "uint16"), present=remote is None)
    if layout.index is not None:
        meta = _of_index(layout)
    elif layout.format == "llmc" and layout.dtype == "uint16":
        meta = {"tokenizer": "gpt2", **meta}  # by llm.c's magic for uint16
    return DatasetInfo(
        name=path.name if remote is None else remote.rstrip("/").rsplit("/", 1)[-1],
        path=str(path),
        dtype=layout.dtype,
        train_tokens=layout.tokens("train"),
        val_tokens=layout.tokens("val"),
        vocab_size=meta.get("vocab_size"),
        tokenizer=meta.get("tokenizer"),
        tokenizer_sha256=meta.get("tokenizer_sha256"),
        fingerprint=meta.get("fingerprint") or _fingerprint(layout),
        max_id=meta.get("max_id"),
        format=layout.format,
        remote=remote,
    )


def _of_index(layout: Layout) -> dict[str, Any]:
    assert layout.index is not None
    index = layout.index
    ids = [split.max_id for split in index.splits.values() if split.max_id is not None]
    return {
        "vocab_size": index.vocab_size, "tokenizer": index.tokenizer.name, "fingerprint": index.fingerprint,
        "max_id": max(ids, default=0), "tokenizer_sha256": index.tokenizer.sha256,
    }  # fmt: skip


def _checked(meta: dict[str, Any], path: Path) -> dict[str, Any]:
    def bad(reason: str) -> UserError:
        return UserError("data.bad_meta", path=str(path), reason=reason)

    for key, least in (("vocab_size", 1), ("max_id", 0)):
        value = meta.get(key)
        if value is not None and (type(value) is not int or not least <= value <= MAX_VOCABULARY):
            shown = str(value)[:40] if isinstance(value, int | str) else f"a {type(value).__name__}"
            raise bad(f"{key} is {shown}, not a whole number from {least} to {MAX_VOCABULARY:,}")
    for key in ("tokenizer", "fingerprint", "dtype"):
        if meta.get(key) is not None and not isinstance(meta[key], str):
            raise bad(f"{key} is a {type(meta[key]).__name__}, not a text")
    if meta.get("dtype", "uint16") not in ITEM_BYTES:
        raise bad(f"dtype {meta['dtype']!r} is neither uint16 nor uint32")
    return meta


def _fingerprint(layout: Layout) -> str:
    """Hash a dataset without an index: sizes, and pieces of each file, enough to notice a new preparation."""
    digest = hashlib.sha256()
    for split in SPLITS:
        segments = layout.splits[split]
        pieces = max(2, 64 // max(1, len(segments)))
        for segment in segments:
            try:
                with segment.path.open("rb") as file:
                    size = file.seek(0, 2)
                    digest.update(f"{split}:{size};".encode())
                    for piece in range(pieces):
                        file.seek(size * piece // pieces)
                        digest.update(file.read(4096))
            except OSError as error:
                raise UserError("data.bad_meta", path=str(segment.path), reason=error.strerror or str(error)) from None
    return digest.hexdigest()[:32]


def read_meta(path: Path) -> dict[str, Any]:
    index = path / "meta.json"
    if index.is_file():
        try:
            meta = json.loads(read_text(index, JSON_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError("data.bad_meta", path=str(index), reason=str(error).splitlines()[0]) from None
        if not isinstance(meta, dict):
            raise UserError("data.bad_meta", path=str(index), reason="it is not a table")
        return meta
    pickled = path / "meta.pkl"
    return read_meta_pickle(pickled) if pickled.is_file() else {}


def read_meta_pickle(path: Path) -> dict[str, Any]:
    """Read nanoGPT's meta.pkl as plain data. Raises UserError when it holds anything that would have to be run."""
    try:
        meta = files.load_pickle(read_bytes(path, _MAX_PICKLE_BYTES))
    except files.ForbiddenName as error:
        raise UserError("data.bad_meta", path=str(path), reason=f"it asks for {error}") from None
    except OSError as error:
        raise UserError("data.bad_meta", path=str(path), reason=error.strerror or str(error)) from None
    except Exception as error:  # a hostile stream can raise nearly anything
        reason = files.printable_name((str(error).splitlines() or [type(error).__name__])[0][:200])
        raise UserError("data.bad_meta", path=str(path), reason=reason) from None
    if not isinstance(meta, dict) or not isinstance(meta.get("vocab_size"), int):
        raise UserError("data.bad_meta", path=str(path), reason="it has no whole number under vocab_size")
    return meta


def check_usable(info: DatasetInfo, vocab_size: int, train_block: int, eval_block: int) -> None:
    for part in info.parts:
        check_usable(part.dataset, vocab_size, train_block, eval_block)
    for split, count, block in (
        ("train", info.train_tokens, train_block),
        ("train", info.train_tokens, eval_block),
        ("val", info.val_tokens, eval_block),
    ):
        if count < block + 1:
            raise UserError("data.too_short", path=info.path, split=split, tokens=count, block_size=block)
    if info.vocab_size is not None and info.vocab_size > vocab_size:
        raise UserError("data.vocab_too_small", path=info.path, needs=info.vocab_size, vocab_size=vocab_size)
    if info.max_id is not None and info.max_id >= vocab_size:
        raise UserError("data.id_beyond_vocab", path=info.path, id=info.max_id, vocab_size=vocab_size)

"""A prepared dataset as shards: raw token files of one size, and the index `dataset.json` beside them. No numpy.

    DIR/dataset.json          the index, written last: a folder without it is unfinished
    DIR/train-00000.bin …     raw little-endian token ids without a header: one after the other, they are nanoGPT's
    DIR/val-00000.bin …       train.bin; every shard of a split but its last has `shard_tokens` tokens
    DIR/tokenizer.json        and other files of the tokenizer
    DIR/.progress/            the state of an unfinished preparation, removed at its end

A document is its ids and one separator after them; it may go on in the next shard.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, field_validator, model_validator

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Record

SCHEMA = "foretrain.dataset/1"
INDEX = "dataset.json"
PROGRESS = ".progress"
SPLITS = ("train", "val")
ITEM_BYTES = {"uint16": 2, "uint32": 4}
INDEX_BYTES = 2**28  # most of an index or a preparation's state: 40,000 shards of the usual size
BLOCK_BYTES = 2**20  # covered by one digest of `Shard.blocks`
BLOCK_DIGEST_BYTES = 16  # the first 128 bits of a SHA-256
DEFAULT_SHARD_TOKENS = 100_000_000
HISTOGRAM_BINS = 40  # bin b counts documents of 2^(b-1) to 2^b - 1 tokens, separator included; bin 0 is empty
_SHA256, _SHARD_NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"(train|val)-[0-9]{5,}\.bin")
_DIGEST, _NO_DIGEST = "index_sha256", "0" * 64


def dtype_for(largest_id: int) -> str:
    """Return the narrowest type that holds every id up to `largest_id`. Raises ValueError beyond uint32."""
    if not 0 <= largest_id < 1 << 32:
        raise ValueError(f"token id {largest_id} is outside of uint32")
    return "uint16" if largest_id < 1 << 16 else "uint32"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def block_digest(block: bytes | memoryview) -> bytes:
    return hashlib.sha256(block).digest()[:BLOCK_DIGEST_BYTES]


def block_count(digests: bytes) -> int:
    return len(digests) // BLOCK_DIGEST_BYTES


def is_block(block: bytes | memoryview, digests: bytes, number: int) -> bool:
    return block_digest(block) == digests[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]


def histogram_bin(tokens: int) -> int:
    return min(tokens.bit_length(), HISTOGRAM_BINS - 1)


def _block_digests(value: Any) -> Any:
    digests = bytes.fromhex(value) if isinstance(value, str) else value
    if isinstance(digests, bytes) and len(digests) % BLOCK_DIGEST_BYTES:
        raise ValueError("a digest of a block has 128 bits")
    return digests


class Shard(Record):
    """A token file. `documents` end in it; `blocks` has a digest for each `block_bytes` of the file."""

    file: str
    tokens: int = Field(gt=0)
    documents: int = Field(ge=0)
    min_id: int = Field(ge=0)
    max_id: int = Field(ge=0)
    sha256: str
    block_bytes: int = Field(default=BLOCK_BYTES, gt=0, le=2**30)
    blocks: Annotated[bytes, BeforeValidator(_block_digests), PlainSerializer(bytes.hex, return_type=str)]

    @field_validator("file")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _SHARD_NAME.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is no shard's name")
        return value

    @field_validator("sha256")
    @classmethod
    def _digest(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError("is no SHA-256")
        return value


class Split(Record):
    tokens: int = 0
    documents: int = 0
    source_bytes: int = 0
    min_id: int | None = None
    max_id: int | None = None
    length_histogram: tuple[int, ...] = (0,) * HISTOGRAM_BINS
    shards: tuple[Shard, ...] = ()

    @model_validator(mode="after")
    def _sums(self) -> "Split":
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError(f"{self.tokens} tokens are not the sum of its shards'")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError(f"{self.documents} documents are not the sum of its shards'")
        return self


class TokenizerInfo(Record):
    """The tokenizer of the ids. `sha256` is over its vocabulary and rules; `request`: 'gpt2' or 'train-bpe 50257'."""

    name: str
    sha256: str
    separator: int
    request: str = ""


class Source(Record):
    """The source of the ids. `fingerprint` changes with the files, their sizes and times or etags."""

    fingerprint: str
    description: str
    files: int
    source_bytes: int | None = None


class Settings(Record):
    seed: int
    shuffle_buffer: int
    val_share: float
    dedup: bool
    text_column: str
    split_documents: str = "file"
    max_tokens: int | None = None
    max_document_bytes: int
    shard_tokens: int = Field(gt=0)


class Counts(Record):
    empty: int = 0
    duplicates: int = 0
    bad: int = 0  # lines that are not JSON, documents beyond the cap: left out on request (--skip-bad)
    replaced_utf8: int = 0  # documents whose invalid UTF-8 became U+FFFD; they are in a split
    separator_bytes: int = 0  # documents of the byte tokenizer that hold its separator; they are in a split


class DatasetIndex(Record):
    dtype: str
    vocab_size: int = Field(gt=0, le=1 << 32)
    tokenizer: TokenizerInfo
    source: Source
    settings: Settings
    counts: Counts = Field(default_factory=Counts)
    splits: dict[str, Split]
    foretrain_version: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> "DatasetIndex":
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype[:40]!r} is neither uint16 nor uint32")
        if set(self.splits) != set(SPLITS):
            raise ValueError("its splits are not train and val")
        limit = min(self.vocab_size, 1 << (8 * ITEM_BYTES[self.dtype]))
        for name, split in self.splits.items():
            if split.max_id is not None and split.max_id >= limit:
                raise ValueError(f"{name} has id {split.max_id}, beyond vocab_size or {self.dtype}")
            if [shard.file for shard in split.shards] != [shard_name(name, i) for i in range(len(split.shards))]:
                raise ValueError(f"the shards of {name} are not numbered one by one")
            if any(shard.tokens != split.shards[0].tokens for shard in split.shards[:-1]):
                raise ValueError(f"the shards of {name} are of different sizes")
        return self

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.dtype};{self.tokenizer.sha256};".encode())
        for name in SPLITS:
            for shard in self.splits[name].shards:
                digest.update(f"{name}:{shard.tokens}:{shard.sha256};".encode())
        return digest.hexdigest()[:32]


def sealed(record: Record, schema: str, key: str) -> Iterator[str]:
    """Yield a record's file with a digest of itself, so that a flipped bit in it is found."""
    fields, encoder = record.to_json(**{"schema": schema, key: _NO_DIGEST}), json.JSONEncoder(indent=1)
    digest = hashlib.sha256()
    for piece in encoder.iterencode(fields):
        digest.update(piece.encode())
    digest.update(b"\n")
    yield from encoder.iterencode({**fields, key: digest.hexdigest()})
    yield "\n"


def unsealed(text: str, key: str) -> dict[str, Any]:
    """Return the fields of a file if its digest, under `key`, is right. Raises ValueError, and what json.loads does."""
    fields = json.loads(text)
    digest = fields.pop(key, None)
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError("it has no digest of itself")
    if hashlib.sha256(text.replace(digest, _NO_DIGEST, 1).encode()).hexdigest() != digest:
        raise ValueError("it is not what was written: its own digest is another one")
    return fields


def index_text(index: DatasetIndex) -> Iterator[str]:
    return sealed(index, SCHEMA, _DIGEST)


def read_index(folder: Path) -> DatasetIndex:
    """Read a prepared folder's index. Raises UserError 'data.bad_meta' where it is damaged or contradicts itself."""
    path = folder / INDEX
    try:
        text = read_text(path, INDEX_BYTES)
        schema = json.loads(text).get("schema")
        if schema != SCHEMA:
            raise UserError("data.bad_meta", path=str(path), reason=f"its schema is {str(schema)[:60]}, not {SCHEMA}")
        fields = unsealed(text, _DIGEST)
        del fields["schema"]
        return DatasetIndex.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError("data.bad_meta", path=str(path), reason=f"{where}: {first['msg']}"[:300]) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError("data.bad_meta", path=str(path), reason=(str(error).splitlines() or ["?"])[0][:300]) from None

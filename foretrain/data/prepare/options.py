"""What `foretrain prepare` was asked for, as one record."""

import hashlib
import random
from pathlib import Path

from pydantic import Field

from foretrain.base.records import Record
from foretrain.data.prepare.opened import kind_of
from foretrain.data.prepare.reader import Job, Position
from foretrain.data.prepare.sources import SourceList
from foretrain.data.shards import DEFAULT_SHARD_TOKENS, Settings
from foretrain.hardware.cpu import usable_cores

DEFAULT_DOCUMENT_BYTES = 16 * 2**20


class PrepareOptions(Record):
    """`tokenizer`: byte, gpt2 and other names of tiktoken's, or a path of a tokenizer.json; `train_bpe`: the size of a
    vocabulary to be trained instead. `max_tokens` None: all of the source."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str = "gpt2"
    train_bpe: int | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    val_share: float = Field(default=0.005, ge=0, lt=1)
    shuffle_buffer: int = Field(default=0, ge=0, le=10_000_000)
    seed: int = 1337
    dedup: bool = False
    text_column: str = "text"
    split_documents: str = "file"
    max_document_bytes: int = Field(default=DEFAULT_DOCUMENT_BYTES, gt=0, le=256 * 2**20)
    shard_tokens: int = Field(default=DEFAULT_SHARD_TOKENS, gt=0)
    workers: int = Field(default_factory=usable_cores, gt=0, le=1024)
    skip_bad: bool = False
    restart: bool = False

    @property
    def is_one_document(self) -> bool:
        """Whether the source is one file of text that nothing cuts into documents."""
        if len(self.sources) != 1 or self.split_documents != "file" or not Path(self.sources[0]).is_file():
            return False
        kind = kind_of(Path(self.sources[0]).name)
        return kind is None or kind[0] == "text"

    @property
    def request(self) -> str:
        """The tokenizer as it was asked for; a file also by its contents."""
        if self.train_bpe:
            return f"train-bpe {self.train_bpe}"
        path = Path(self.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        if path.is_file():
            return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        return self.tokenizer

    @property
    def settings(self) -> Settings:
        """What decides the bytes of the shards."""
        return Settings(
            seed=self.seed, shuffle_buffer=self.shuffle_buffer, val_share=self.val_share, dedup=self.dedup,
            text_column=self.text_column, split_documents=self.split_documents, max_tokens=self.max_tokens,
            max_document_bytes=self.max_document_bytes, shard_tokens=self.shard_tokens,
        )  # fmt: skip

    def job(self, sources: SourceList, position: Position, sample_bytes: int | None = None) -> Job:
        """What the reader is to do; files are shuffled too where documents are."""
        files = list(sources.files)
        if self.shuffle_buffer:
            random.Random(f"{self.seed}/files").shuffle(files)
        return Job(
            files=tuple(files), text_column=self.text_column, split_documents=self.split_documents,
            max_document_bytes=self.max_document_bytes, skip_bad=self.skip_bad, shuffle_buffer=self.shuffle_buffer,
            seed=self.seed, position=position, sample_bytes=sample_bytes,
        )  # fmt: skip

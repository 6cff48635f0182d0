"""What to read: files, folders, globs, hf://datasets/… and stdin, as one ordered list with a fingerprint."""

import codecs
import glob
import hashlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath

from pydantic import Field

from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes
from foretrain.base.records import Record
from foretrain.data.prepare.opened import _COMPRESSIONS, Kind, SourceFile, kind_of, left_out_text, list_files, suffix_of
from foretrain.data.prepare.reader import Job, Position
from foretrain.data.shards import DEFAULT_SHARD_TOKENS, INDEX, PROGRESS, Settings
from foretrain.hardware.cpu import usable_cores

_PIECES, _PIECE_BYTES = 16, 4096
_LOOKED_AT_BYTES = 1 << 16


class SourceList(Record):
    """All files in their order. `fingerprint` is of contents (by sample) and not of times or places."""

    files: tuple[SourceFile, ...]
    description: str
    fingerprint: str
    left_out: dict[str, int] = Field(default_factory=dict)  # suffix -> files in folders that are no text

    @property
    def total_bytes(self) -> int | None:
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def stamps(self) -> str:
        text = "\n".join(f"{file.path}\0{file.size_bytes}\0{file.stamp}" for file in self.files)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def expand(words: Sequence[str]) -> SourceList:
    """Return the files of SOURCE…, folders and globs sorted by name, each file once. Raises UserError."""
    files: dict[str, SourceFile] = {}
    left_out: Counter[str] = Counter()
    for word in words:
        for file in _expand_one(word, left_out):
            files.setdefault(_place(file), file)
    listed = tuple(files.values())
    if "-" in files and len(files) > 1:
        raise UserError("usage.two_sources_with_stdin")
    digest = hashlib.sha256()
    for file in listed:
        digest.update(f"{PurePath(file.path).name}\0{file.size_bytes}\0".encode("utf-8", "surrogateescape"))
        digest.update(file.stamp.encode() if file.remote else _sample(file))
    shown = " ".join(words[:5]) + (" …" if len(words) > 5 else "")
    text = shown.encode("utf-8", "replace").decode()
    return SourceList(
        files=listed, description=text[:500], fingerprint=digest.hexdigest()[:32], left_out=dict(left_out)
    )


def not_utf8(words: Sequence[str]) -> tuple[UserError, ...]:
    notes = []
    for word in words:
        data = b"" if kind_of(word) not in (None, ("text", "")) else first_bytes(Path(word), _LOOKED_AT_BYTES)
        try:
            codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _LOOKED_AT_BYTES)
        except UnicodeDecodeError as error:
            notes.append(UserError("data.source_not_utf8", path=word, at=error.start, byte=f"{data[error.start]:02x}"))
    return tuple(notes)


def _place(file: SourceFile) -> str:
    return file.path if file.remote or file.kind == "stdin" else os.path.realpath(file.path)


def _expand_one(word: str, left_out: Counter[str]) -> list[SourceFile]:
    if word == "-":
        return [SourceFile(path="-", kind="stdin")]
    if word.startswith("hf://"):
        return list_files(word, left_out)
    path = Path(word)
    if path.is_dir():
        found = _walk(path, left_out)
    elif path.exists():
        found = [_local(path, kind_of(path.name) or ("text", _COMPRESSIONS.get(path.suffix.lower(), "")))]
    elif glob.has_magic(word):
        # pathlib has no glob of a relative or absolute pattern alike.
        names = sorted(name for name in glob.glob(word, recursive=True) if _is_source(name))  # noqa: PTH207
        found = [_local(Path(name), kind_of(name) or ("text", "")) for name in names]
    else:
        raise UserError("data.source_missing", path=word)
    if not found:
        raise UserError("data.source_nothing", path=word, others=left_out_text(left_out))
    return found


def _walk(folder: Path, left_out: Counter[str]) -> list[SourceFile]:
    found = []

    def unreadable(error: OSError) -> None:  # by default os.walk leaves the folder out in silence
        raise UserError("data.unreadable", path=str(error.filename), reason=error.strerror or str(error))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        # A prepared dataset, or a growing one, may be beside its source; hidden folders are not texts.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _is_prepared(place, name))
        linked = [name for name in folders if Path(place, name).is_symlink()]  # not entered: it may be a loop
        if linked:
            left_out["links to folders"] += len(linked)
        for name in sorted(names):
            kind = kind_of(name)
            if kind is not None and not name.startswith("."):
                found.append(_local(Path(place) / name, kind))
            elif not name.startswith("."):
                left_out[suffix_of(name)] += 1
    return found


def _is_source(name: str) -> bool:
    """Return whether a glob's match is to be read: 'books/**' must not include a dataset prepared there."""
    path = Path(name)
    return path.is_file() and not _is_prepared(str(path.parent), "") and path.parent.name != PROGRESS


def _is_prepared(place: str, name: str) -> bool:
    folder = Path(place, name)
    return (folder / INDEX).is_file() or (folder / PROGRESS).is_dir()


def _local(path: Path, kind: tuple[Kind, str]) -> SourceFile:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError("data.unreadable", path=str(path), reason=error.strerror or str(error)) from None
    if not path.is_file():  # a pipe or a device would block, or never end
        raise UserError("data.unreadable", path=str(path), reason="it is no regular file")
    return SourceFile(
        path=str(path), kind=kind[0], compression=kind[1], size_bytes=state.st_size, stamp=str(state.st_mtime_ns)
    )


def _sample(file: SourceFile) -> bytes:
    if file.size_bytes is None:
        return b"stdin"
    digest = hashlib.sha256()
    try:
        with Path(file.path).open("rb") as stream:
            for piece in range(_PIECES):
                stream.seek(file.size_bytes * piece // _PIECES)
                digest.update(stream.read(_PIECE_BYTES))
    except OSError as error:
        raise UserError("data.unreadable", path=file.path, reason=error.strerror or str(error)) from None
    return digest.digest()


DEFAULT_DOCUMENT_BYTES = 16 * 2**20


class PrepareOptions(Record):
    """`tokenizer`: a name, or a path of a tokenizer.json; `train_bpe`: the size of a vocabulary to train instead."""

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
        if len(self.sources) != 1 or self.split_documents != "file" or not Path(self.sources[0]).is_file():
            return False
        kind = kind_of(Path(self.sources[0]).name)
        return kind is None or kind[0] == "text"

    @property
    def request(self) -> str:
        if self.train_bpe:
            return f"train-bpe {self.train_bpe}"
        path = Path(self.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        if path.is_file():
            return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        return self.tokenizer

    @property
    def settings(self) -> Settings:
        return Settings(
            seed=self.seed, shuffle_buffer=self.shuffle_buffer, val_share=self.val_share, dedup=self.dedup,
            text_column=self.text_column, split_documents=self.split_documents, max_tokens=self.max_tokens,
            max_document_bytes=self.max_document_bytes, shard_tokens=self.shard_tokens,
        )  # fmt: skip

    def job(self, sources: SourceList, position: Position, sample_bytes: int | None = None) -> Job:
        files = list(sources.files)
        if self.shuffle_buffer:
            random.Random(f"{self.seed}/files").shuffle(files)
        return Job(
            files=tuple(files), text_column=self.text_column, split_documents=self.split_documents,
            max_document_bytes=self.max_document_bytes, skip_bad=self.skip_bad, shuffle_buffer=self.shuffle_buffer,
            seed=self.seed, position=position, sample_bytes=sample_bytes,
        )  # fmt: skip

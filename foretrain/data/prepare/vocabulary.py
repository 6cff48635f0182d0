"""The tokenizer of a preparation: found or trained once, saved in .progress/tokenizer, loaded from there by workers."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes, replace, sync_folder
from foretrain.base.processes import Frame, Parent
from foretrain.data import tokenizer as tokenizers
from foretrain.data.prepare.formats import documents
from foretrain.data.prepare.ipc import limit_memory, raised, start, telling
from foretrain.data.prepare.opened import OpenFile, Place
from foretrain.data.prepare.reader import Job, Position, spread
from foretrain.data.prepare.sources import PrepareOptions, SourceList
from foretrain.data.shards import PROGRESS, TokenizerInfo
from foretrain.data.tokenizer import (
    MOST_BYTES,
    TIKTOKEN_NAMES,
    BpeTokenizer,
    ByteTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    digest_of,
)

FOLDER, REQUEST = "tokenizer", "request.json"
SAMPLE_BYTES, PLAN_SAMPLE_BYTES = 64 * 2**20, 4 * 2**20  # text that a BPE is trained on, for shards and for a plan
_LEAST_PIECE = 256 * 2**10
_TRAINING_BYTES = 3 * 2**30


def make(
    options: PrepareOptions, sources: SourceList, folder: Path, *, plan: bool = False
) -> tuple[TokenizerInfo, int]:
    """Find or train the tokenizer, saved as a folder; return (its entry, its largest id + 1). Raises UserError."""
    saved = folder / FOLDER
    if not (saved / REQUEST).is_file():
        shutil.rmtree(saved, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder))
        try:
            tokenizer = _train(options, sources, staging, plan) if options.train_bpe else _find(options.tokenizer)
            tokenizer.save(staging)
            about = {"request": options.request, "name": tokenizer.name}
            (staging / REQUEST).write_text(json.dumps(about), "utf-8")
            for path in staging.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            staging.replace(saved)
            sync_folder(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return _about(saved)


def forget_other(request: str, folder: Path) -> None:
    try:
        if json.loads((folder / FOLDER / REQUEST).read_text("utf-8"))["request"] == request:
            return
    except (OSError, ValueError, KeyError):
        pass
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _about(saved: Path) -> tuple[TokenizerInfo, int]:
    about = json.loads((saved / REQUEST).read_text("utf-8"))
    tokenizer = tokenizers.load(saved, about["name"])
    assert tokenizer is not None
    info = TokenizerInfo(
        name=tokenizer.name, sha256=digest_of(tokenizer), separator=tokenizer.separator, request=about["request"]
    )
    return info, tokenizer.vocab_size


def publish(folder: Path) -> None:
    for path in (folder / PROGRESS / FOLDER).iterdir():
        if path.name != REQUEST:
            replace(folder / path.name, path.read_bytes())
    sync_folder(folder)


def _find(wanted: str) -> Tokenizer:
    if wanted == "byte":
        return ByteTokenizer()
    path = Path(wanted)
    if path.is_dir() and (path / JsonTokenizer.FILE).is_file():
        return JsonTokenizer.load(path)
    if path.is_file():
        if path.name == JsonTokenizer.FILE:
            return JsonTokenizer.load(path.parent)
        try:
            text = read_bytes(path, MOST_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise UserError("data.bad_tokenizer", path=wanted, reason=error.strerror or str(error)) from None
        return JsonTokenizer(text, path=wanted)
    if wanted in _tiktoken_names():
        return TiktokenTokenizer(wanted)
    if wanted.endswith(".json") or "/" in wanted:
        raise UserError("data.no_tokenizer_file", path=wanted)
    raise UserError("usage.tokenizer", wanted=wanted[:80], names=("byte", *_tiktoken_names()))


def _tiktoken_names() -> tuple[str, ...]:
    try:
        import tiktoken
    except ImportError:
        return TIKTOKEN_NAMES
    return tuple(sorted({*TIKTOKEN_NAMES, *tiktoken.list_encoding_names(), *tiktoken.registry.ENCODINGS}))


def _train(options: PrepareOptions, sources: SourceList, staging: Path, plan: bool) -> Tokenizer:
    if any(file.kind == "stdin" for file in sources.files):
        raise UserError("usage.bpe_of_stdin")
    assert options.train_bpe is not None
    if options.train_bpe < 257:
        raise UserError("data.bpe_vocab", vocab_size=options.train_bpe)
    job = options.job(sources, Position(), PLAN_SAMPLE_BYTES if plan else SAMPLE_BYTES)
    child = start("vocabulary", one_thread=False)
    child.send({"job": job.to_json(), "staging": str(staging), "vocab_size": options.train_bpe})
    path = ""
    try:
        while True:
            found = raised(child.receive())
            if not isinstance(found, Frame):
                raise UserError("data.training_died", path=path)
            if found.value["type"] == "done":
                break
            path = found.value["path"]
    finally:
        child.end()
    return BpeTokenizer.load(staging)


def main(parent: Parent) -> None:
    def sample(job: Job) -> Iterator[bytes]:
        total, seen = job.sample_bytes or SAMPLE_BYTES, set[bytes]()
        chosen = spread(len(job.files), max(1, total // _LEAST_PIECE))
        for number in chosen:
            left = total // len(chosen)
            opened = OpenFile(job.files[number])
            parent.send({"type": "file", "path": opened.file.path})
            for document in documents(opened, job.format, Place()):
                digest = hashlib.sha256(document.text or b"").digest()[:16]
                if document.text is not None and digest not in seen:
                    seen.add(digest)
                    yield document.text[:left]
                    left -= len(document.text)
                if left <= 0:
                    break
            opened.abandon()

    def work() -> None:
        if (asked := parent.receive()) is not None:
            limit_memory(_TRAINING_BYTES)
            job = Job.model_validate(asked.value["job"])
            BpeTokenizer.train(sample(job), asked.value["vocab_size"]).save(Path(asked.value["staging"]))
            parent.send({"type": "done"})

    telling(parent, work, UserError("data.source_memory", path="the text that the BPE is trained on"))

"""An evaluation carried out: texts first, then the tasks, each result kept as soon as it is there."""

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain.app.evaluate import VALIDATION_TOKENS, Asked, Listen
from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes, read_text
from foretrain.base.installation import Later
from foretrain.base.records import Note
from foretrain.base.units import MIB
from foretrain.config.resolve import from_values
from foretrain.data.token_reader import readers
from foretrain.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    document_end,
    tokenizer_of,
)
from foretrain.evaluation import harness, windows
from foretrain.evaluation.windows import HubModel, OwnModel, Predictor
from foretrain.model.language_model import make_model
from foretrain.runs.folder import RunDirectory, now
from foretrain.runs.record import Evaluation, Scores, TaskScore, TextScore, TrainedRun, source_of
from foretrain.training import checkpoint
from foretrain.training.device import place
from foretrain.training.exports.source import locate


@dataclass(frozen=True)
class OfRun:
    """A checkpoint whose checksums are right, and its run. `skipped`: newer ones that are damaged, and why."""

    directory: RunDirectory
    record: TrainedRun
    path: Path
    step: int
    skipped: tuple[str, ...] = ()

    @property
    def weights_sha256(self) -> str:
        return weights_sha256(self.path)


def weights_sha256(path: Path) -> str:
    """Hash the checksums of the files of a checkpoint's weights."""
    listed = json.loads(read_text(path / checkpoint.MANIFEST))["files"]
    digests = [listed[name]["sha256"] for name in checkpoint.files_of(path, "model")]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def of_run(path: Path, *, best: bool) -> OfRun:
    """Return the newest intact checkpoint of a run, its best one, or the one at this path. Raises UserError."""
    found = locate(path, best=best)
    step = checkpoint.read_progress(found.path).step
    return OfRun(found.run, found.run.read_record(), found.path, step, found.skipped)


@dataclass(frozen=True)
class Subject:
    """A model on its device with its tokenizer. `begins`: the id before a text's first one; None: there is none."""

    model: Predictor
    words: Tokenizer
    begins: int | None
    device: str


def device_of(wanted: str) -> torch.device:
    return place(from_values({"device": wanted, "dtype": "float32", "compile": False}).config).device


def _words(run: OfRun) -> Tokenizer:
    words = tokenizer_of(run.record.dataset)
    if words is None:
        raise UserError("data.no_tokenizer", path=run.record.dataset.path)
    return words


def loaded(run: OfRun, device: str) -> Subject:
    words = _words(run)
    config, on = run.record.config, device_of(device)
    model = make_model(config)
    checkpoint.load_model(run.path, model)
    return Subject(OwnModel(model.to(on), config.vocab_size), words, document_end(words), str(on))


def is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file() and source_of(path) != "trained"


def loaded_folder(folder: Path, device: str) -> Subject:
    if not (folder / JsonTokenizer.FILE).is_file():
        raise UserError("data.no_tokenizer_file", path=str(folder))
    words = JsonTokenizer.load(folder)
    on = device_of(device)
    return Subject(HubModel(folder, on), words, _begins(folder, words), str(on))


def _begins(folder: Path, words: JsonTokenizer) -> int:
    """Return bos_token of tokenizer_config.json, else what separates texts."""
    try:
        bos: Any = json.loads(read_text(folder / JsonTokenizer.SETTINGS)).get("bos_token")
    except (OSError, ValueError, AttributeError):
        bos = None
    name = bos.get("content") if isinstance(bos, dict) else bos
    id = words.id_of(name) if isinstance(name, str) else None
    return words.separator if id is None else id


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte for which SentencePiece has no piece
_SPACE = "\u2581"  # SentencePiece's


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return UTF-8 bytes by id; 0 of special tokens, which stand for no text."""
    found = [0] * tokenizer.vocab_size
    for id, size in _sizes(tokenizer).items():
        found[id] = size
    return found


def _sizes(tokenizer: Tokenizer) -> dict[int, int]:
    if isinstance(tokenizer, JsonTokenizer):
        return _of_json(tokenizer)
    if isinstance(tokenizer, TiktokenTokenizer):
        return {id: len(token) for token, id in tokenizer.ranks.items()}
    if isinstance(tokenizer, CharTokenizer):
        return {id: len(character.encode()) for character, id in tokenizer.ids.items()}
    assert isinstance(tokenizer, ByteTokenizer), tokenizer.name
    return {byte: 1 for byte in range(256) if byte != tokenizer.separator}


def _of_json(tokenizer: JsonTokenizer) -> dict[int, int]:
    """Count a byte-level vocabulary's characters as bytes; in others a space has a sign of its own."""
    fast: Any = tokenizer._fast
    by_byte = "ByteLevel" in _kinds(json.loads(tokenizer.text).get("decoder"))
    added = fast.get_added_tokens_decoder()
    found = {}
    for token, id in fast.get_vocab(with_added_tokens=True).items():
        if id in added:
            found[id] = 0 if added[id].special else len(added[id].content.encode())
        elif by_byte:
            found[id] = len(token)
        else:
            found[id] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    return found


def _kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = (_kinds(each) for each in decoder.get("decoders", ()))
    return {str(decoder.get("type")), *(kind for kinds in inner for kind in kinds)}


MOST_BYTES = 256 * MIB  # of a text, which is tokenized as a whole


@dataclass(frozen=True)
class Document:
    """A text: its bytes, or ids that are tokens already, of which the first is context only. `complete`: all of it."""

    name: str
    sha256: str
    data: bytes = b""
    ids: np.ndarray | None = None
    complete: bool = True


def read(path: Path) -> Document:
    try:
        data = read_bytes(path, MOST_BYTES)
        data.decode("utf-8")
    except OSError as error:
        raise UserError("data.unreadable", path=str(path), reason=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise UserError(
            "data.text_not_utf8", path=str(path), at=error.start, byte=f"{error.object[error.start]:02x}"
        ) from None
    if not data:
        raise UserError("data.text_empty", path=str(path))
    return Document(path.name, hashlib.sha256(data).hexdigest(), data)


def validation(record: TrainedRun, subject: Subject, tokens: int | None) -> list[Document]:
    """The validation data of a run, of a mixture that of each part; of long ones the beginning. Raises UserError."""
    info = record.dataset
    found = []
    for part, reader in zip([p.dataset for p in info.parts] or [info], readers(info, "val"), strict=True):
        count = min(reader.tokens, (tokens or VALIDATION_TOKENS) + 1)
        ids = np.frombuffer(reader.read(0, count), dtype=f"<u{reader.item_bytes}").astype(np.int64)
        digest = hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
        found.append(Document(f"{part.name}/val", digest, ids=ids, complete=count == reader.tokens))
    return found


def scored(subject: Subject, document: Document, stride: int | None, tokens: int | None, listen: Listen) -> TextScore:
    """Score a text. Raises UserError where the two do not belong together."""
    context = subject.model.context_tokens
    stride = max(1, context // 2) if stride is None else stride
    if stride > context:
        raise UserError("usage.stride", stride=stride, context=context)
    sizes = token_bytes(subject.words)
    ids = _ids(subject, document)
    whole = document.complete and (tokens is None or len(ids) - 1 <= tokens)
    ids = ids if tokens is None else ids[: tokens + 1]
    _check(subject, document, ids)
    separator = None if document.data else document_end(subject.words)
    summed = windows.score(
        subject.model, ids, sizes, stride=stride, skip=separator,
        tell=lambda done, total: listen("text_progress", {"name": document.name, "done": done, "total": total}),
    )  # fmt: skip
    size_bytes = _size(subject, document, ids, sizes, whole) or int(summed.byte_counts.sum())
    return TextScore(
        text=document.name, sha256=document.sha256, size_bytes=size_bytes, tokens=summed.tokens, loss=summed.loss,
        bits_per_byte=summed.bits_per_byte(size_bytes), standard_error=summed.standard_error(size_bytes),
        windows=len(summed.nats), context_tokens=context, stride_tokens=stride, whole=whole, device=subject.device,
        dtype="float32", at=now(),
    )  # fmt: skip


def _ids(subject: Subject, document: Document) -> np.ndarray:
    """Return the ids, with what the first one is predicted from before them."""
    if document.ids is not None:
        return document.ids
    own = np.array(list(subject.words.encode(document.data)), dtype=np.int64)
    return own if subject.begins is None else np.concatenate([[subject.begins], own])


def _check(subject: Subject, document: Document, ids: np.ndarray) -> None:
    if len(ids) < 2:
        raise UserError("data.text_too_short", path=document.name, tokens=len(ids))
    largest, size = int(ids.max()), subject.model.vocab_size
    if largest >= size:
        raise UserError("data.id_beyond_vocab", path=document.name, id=largest, vocab_size=size)


def _size(subject: Subject, document: Document, ids: np.ndarray, sizes: Sequence[int], whole: bool) -> int | None:
    """Return the bytes of a whole file that were predicted; None: as its tokens have them."""
    if not document.data or not whole:
        return None
    return len(document.data) - (sizes[ids[0]] if subject.begins is None else 0)


_adapter: Any = Later("foretrain.evaluation.adapter")  # which imports lm-eval
ROWS = 4  # of a batch of lm-eval's hf, whose logits are of whole sequences


@dataclass
class _Found:
    run: OfRun | None
    texts: list[TextScore] = field(default_factory=list)
    tasks: list[TaskScore] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    kept_in: str | None = None

    def add(self, *found: TextScore | TaskScore) -> None:
        """Keep results beside the run at once. A disk that does not take them is a note."""
        of_texts = [score for score in found if isinstance(score, TextScore)]
        of_tasks = [score for score in found if isinstance(score, TaskScore)]
        self.texts += of_texts
        self.tasks += of_tasks
        if self.run is None or self.notes:
            return
        scores = Scores(
            checkpoint=self.run.path.name, step=self.run.step, weights_sha256=self.run.weights_sha256,
            texts=tuple(of_texts), tasks=tuple(of_tasks),
        )  # fmt: skip
        try:
            self.kept_in = str(self.run.directory.keep_scores(scores))
        except OSError as error:
            values = {"path": str(self.run.directory.path), "reason": error.strerror or str(error)}
            self.notes.append(Note(id="scores_not_kept", values=values))


def carry_out(asked: Asked) -> Evaluation:
    run = None
    if not is_hugging_face(asked.source):
        run = of_run(asked.source, best=asked.best)
    elif asked.best:
        raise UserError("usage.best_of_folder", path=str(asked.source))
    elif not asked.texts and not asked.tasks:
        raise UserError("usage.nothing_to_evaluate", path=str(asked.source))
    documents = [read(path) for path in asked.texts]
    tasks = harness.find(asked.tasks, asked.include_path) if asked.tasks else None
    found, device = _Found(run), str(device_of(asked.device))
    subject = None
    if documents or tasks is None:
        subject = _loaded(asked, run)
        if run is not None and not documents:
            documents = validation(run.record, subject, asked.tokens)
        for document in documents:
            found.add(scored(subject, document, asked.stride, asked.tokens, asked.listen))
    if tasks is not None:
        _run_tasks(asked, tasks, run, subject, found, device)
    return Evaluation(
        source=str(asked.source), checkpoint=run.path.name if run else None, step=run.step if run else None,
        device=device, texts=tuple(found.texts), tasks=tuple(found.tasks), kept_in=found.kept_in,
        skipped=run.skipped if run else (), notes=tuple(found.notes),
    )  # fmt: skip


def _loaded(asked: Asked, run: OfRun | None) -> Subject:
    asked.listen("loading", {"path": str(asked.source)})
    if run is None:
        with harness.quiet(bars=asked.bars):
            return loaded_folder(asked.source, asked.device)
    return loaded(run, asked.device)


def _run_tasks(
    asked: Asked, tasks: harness.Harness, run: OfRun | None, subject: Subject | None, found: _Found, device: str
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(harness.quiet(bars=asked.bars))
        if not tasks.own:
            asked.listen("task_data", {})
            stack.enter_context(harness.offline_without_network())
        # All data before the model: what a task lacks is reported at once.
        loaded = {name: _task_data(asked, tasks, name) for name in asked.tasks}
        model, through = _task_model(asked, run, subject, device)
        for name, data in loaded.items():
            asked.listen("task", {"name": name})
            shared = {"through": through, "device": device, "dtype": "float32", "at": now()}
            try:
                scores = tasks.run(model, name, data, documents=asked.documents, shared=shared)
                found.add(*scores)
            except torch.OutOfMemoryError:
                raise UserError("memory.task", task=name, batch_size=asked.batch_size or ROWS) from None


def _task_data(asked: Asked, tasks: harness.Harness, name: str) -> Any:
    asked.listen("loading_task", {"name": name})
    return tasks.load(name, asked.shots)


def _task_model(asked: Asked, run: OfRun | None, subject: Subject | None, device: str) -> tuple[Any, str]:
    """Return (what lm-eval runs, how): its own model over a Hugging Face folder, of a run the run's model as it is."""
    if run is None:
        return harness.hugging_face(asked.source, device, asked.batch_size or ROWS), "folder"
    own = subject or loaded(run, asked.device)
    return _adapter.OwnLM(own.model, own.words, asked.batch_size, _progress(asked)), "model"


def _progress(asked: Asked) -> Any:
    return lambda done, total: asked.listen("task_progress", {"done": done, "total": total})

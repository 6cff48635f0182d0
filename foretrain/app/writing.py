"""A run's newest intact checkpoint, ready to write text: what it needs, and its text piece by piece."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.inference.options import Inference
from foretrain.data.text_stream import TextStream
from foretrain.data.tokenizer import CharTokenizer, Tokenizer
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cpu import available_memory_bytes
from foretrain.model.generation.options import Sampling
from foretrain.model.generation.writer import Writer
from foretrain.model.language_model import make_model
from foretrain.predict.inference.memory import InferenceMemory, memory_of
from foretrain.predict.inference.model import InferenceModel, model_of_config
from foretrain.predict.memory import MARGIN_BYTES
from foretrain.training import checkpoint
from foretrain.training.store import RunDirectory

_LEAST_CONTEXT = 16  # tokens; with fewer a model says nothing of what it has learned
_DEVICE = Gpu(name="this device", kind="cpu")  # its context is taken already, where it has one


class Fitted:
    """How a model is run in the memory that is free, what it needs there, and what had to give way."""

    def __init__(self, model: InferenceModel, room_bytes: int | None, *, half: bool) -> None:
        self.dtype, self.context = "f32", model.max_positions
        self.notes: tuple[Note, ...] = ()
        whole = self._memory(model, self.dtype, self.context)
        if room_bytes is None or _needed(whole) <= room_bytes:
            self.memory = whole
            return
        values = {"needed": _needed(whole), "room": room_bytes}
        if half:
            self.dtype = "bf16"
            self.notes += (Note(id="sample_half", values=values),)
        if _needed(self._memory(model, self.dtype, self.context)) > room_bytes:
            self.context = self._longest(model, room_bytes)
            self.notes += (Note(id="sample_context", values={**values, "context": self.context}),)
        if self.context < min(_LEAST_CONTEXT, model.max_positions):
            raise UserError("memory.sample", **values)
        self.memory = self._memory(model, self.dtype, self.context)

    def _memory(self, model: InferenceModel, dtype: str, context: int) -> InferenceMemory:
        asked = Inference(context=context, prompt=context, weights=dtype, kv=dtype)
        return memory_of(model, asked, "pytorch", _DEVICE)

    def _longest(self, model: InferenceModel, room_bytes: int) -> int:
        context = self.context
        while context and _needed(self._memory(model, self.dtype, context)) > room_bytes:
            context //= 2
        return context


def _needed(memory: InferenceMemory) -> int:
    return memory.needed_high_bytes + MARGIN_BYTES


class RunWriter:
    """A model that goes on with a text. `dropped`: tokens that left its context, all together."""

    def __init__(self, words: Tokenizer, writer: Writer) -> None:
        self._words, self._writer = words, writer
        self.ends_documents = not isinstance(words, CharTokenizer)  # whose id 0 is a character
        self.dropped = 0
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self._writer.forget()
        self._empty = True

    def read(self, text: str) -> None:
        """Let a text follow. Raises UserError for characters that the model's tokenizer lacks."""
        ids = list(self._words.encode(text.encode(errors="replace")))
        if ids or self._empty:
            self.dropped += self._writer.append(ids or [self._words.separator])
            self._empty = False

    def write(self, sampling: Sampling, count: int, *, until_end: bool = False) -> Iterator[str]:
        """Up to `count` tokens that follow, as text, as soon as it is whole. `until_end`: or to the end of a
        document."""
        stream = TextStream(self._words)
        if self._empty:
            self.read("")
        for _ in range(count):
            chosen, dropped = self._writer.write(sampling)
            self.dropped += dropped
            if until_end and self.ends_documents and chosen == self._words.separator:
                break
            if piece := stream.put(chosen):
                yield piece
        if rest := stream.end():
            yield rest


class Opened:
    """A run whose checkpoint was found and held against its digests, and what it needs; `load` brings its weights."""

    def __init__(self, run: str | Path) -> None:
        directory = RunDirectory(Path(run))
        self._config = directory.read_record().config
        data = directory.read_record().dataset
        path, skipped = checkpoint.newest_valid(directory.checkpoints)
        self.skipped = tuple(f"{name}: {problem}" for name, problem in skipped)
        if path is None:
            raise UserError("usage.no_checkpoint", path=str(run))
        words = tokenizer_of(data)
        if words is None:
            raise UserError("data.no_tokenizer", path=data.path)
        self._path, self._words = path, words
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model_of_config(self._config, Path(run).name)
        half = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.fitted = Fitted(self.model, _room_bytes(self.device), half=half)

    @property
    def checkpoint(self) -> str:
        """The checkpoint's name."""
        return self._path.name

    def load(self, seed: int) -> RunWriter:
        """The model with its weights, ready to write."""
        model = make_model(self._config)
        checkpoint.load_model(self._path, model)
        if self.fitted.dtype == "bf16":
            model.to(torch.bfloat16)
        model.block_size = self.fitted.context
        model.to(self.device)
        vocab_size = min(self._words.vocab_size, self._config.vocab_size)
        return RunWriter(self._words, Writer(model, vocab_size, seed))


def _room_bytes(device: torch.device, free: Callable[[], int | None] = available_memory_bytes) -> int | None:
    """Memory that is free there; None where nobody says."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else free()

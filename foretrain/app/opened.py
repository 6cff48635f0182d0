"""A run's newest intact checkpoint, ready to write text piece by piece, and what it needs for that."""

from collections.abc import Iterator
from pathlib import Path

import torch

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.inference import Inference
from foretrain.config.shape import ModelShape, facts_of_run
from foretrain.data.tokenizer import Tokenizer, document_end, tokenizer_of
from foretrain.hardware import accelerator
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cpu import available_memory_bytes
from foretrain.model.language_model import make_model
from foretrain.model.sampling import Sampling
from foretrain.model.writer import Writer
from foretrain.predict.inference.speed import memory_of
from foretrain.predict.memory import MARGIN_BYTES, PhaseMemory
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint

# Text of tokens as they come: what is not a whole character yet waits for the next token.
#
# A token of a byte-level vocabulary can end in the middle of a character of UTF-8; decoded alone it would show as
# U+FFFD. All that was given out, together with what `end` gives, is the text of all tokens decoded at once.

REPLACEMENT = "\ufffd"


class TextStream:
    """Ids in, text out. Earlier tokens are decoded again with each new one, as a decoder may join them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._given = 0  # of them, whose text was given out

    def put(self, id: int) -> str:
        """Return the text that this token completes; empty where a character is not whole."""
        self._ids.append(id)
        text = self._rest()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text

    def end(self) -> str:
        """Return what is left, with U+FFFD for what never became a character."""
        text = self._rest()
        self._ids, self._given = [], 0
        return text

    def _rest(self) -> str:
        before = self._decode(self._ids[: self._given])
        return self._decode(self._ids)[len(before) :]


class RunWriter:
    """A model that continues a text. `dropped`: tokens that left its context."""

    def __init__(self, words: Tokenizer, writer: Writer) -> None:
        self._words, self._writer = words, writer
        self._end = document_end(words)
        self.dropped = 0
        self.forget()

    def forget(self) -> None:
        self._writer.forget()
        self._empty = True

    def read(self, text: str) -> None:
        ids = list(self._words.encode(text.encode(errors="replace")))
        if ids or self._empty:
            self.dropped += self._writer.append(ids or [self._words.separator])
            self._empty = False

    def write(self, sampling: Sampling, count: int, *, until_end: bool = False) -> Iterator[str]:
        """Yield up to `count` tokens that follow, as whole text; `until_end`: or to the end of a document."""
        stream = TextStream(self._words)
        if self._empty:
            self.read("")
        for _ in range(count):
            chosen, dropped = self._writer.write(sampling)
            self.dropped += dropped
            if until_end and chosen == self._end:
                break
            if piece := stream.put(chosen):
                yield piece
        if rest := stream.end():
            yield rest


_LEAST_CONTEXT = 16  # tokens; with fewer a model says nothing of what it has learned
_DEVICE = Gpu(name="this device", kind="cpu")  # its context is taken already, where it has one


class Fitted:
    def __init__(self, facts: ModelFacts, room_bytes: int | None, *, half: bool) -> None:
        self.dtype, self.context = "f32", facts.max_positions
        self.notes: tuple[Note, ...] = ()
        whole = self._memory(facts, self.dtype, self.context)
        if room_bytes is None or _needed(whole) <= room_bytes:
            self.memory = whole
            return
        values = {"needed": _needed(whole), "room": room_bytes}
        if half:
            self.dtype = "bf16"
            self.notes += (Note(id="sample_half", values=values),)
        if _needed(self._memory(facts, self.dtype, self.context)) > room_bytes:
            self.context = self._longest(facts, room_bytes)
            self.notes += (Note(id="sample_context", values={**values, "context": self.context}),)
        if self.context < min(_LEAST_CONTEXT, facts.max_positions):
            raise UserError("memory.sample", **values)
        self.memory = self._memory(facts, self.dtype, self.context)

    def _memory(self, facts: ModelFacts, dtype: str, context: int) -> PhaseMemory:
        asked = Inference(context=context, prompt=context, weights=dtype, kv=dtype)
        return memory_of(facts, asked, "pytorch", _DEVICE).neediest

    def _longest(self, facts: ModelFacts, room_bytes: int) -> int:
        context = self.context
        while context and _needed(self._memory(facts, self.dtype, context)) > room_bytes:
            context //= 2
        return context


def _needed(memory: PhaseMemory) -> int:
    return memory.needed_high_bytes + MARGIN_BYTES


class Opened:
    """A run with its verified checkpoint, and what it needs; `load` brings its weights."""

    def __init__(self, run: str | Path) -> None:
        directory = RunDirectory(Path(run))
        record = directory.read_record()
        self._config, data = record.config, record.dataset
        path, skipped = checkpoint.newest_valid(directory.checkpoints)
        self.skipped = tuple(f"{name}: {problem}" for name, problem in skipped)
        if path is None:
            raise UserError("usage.no_checkpoint", path=str(run))
        words = tokenizer_of(data)
        if words is None:
            raise UserError("data.no_tokenizer", path=data.path)
        self._path, self._words = path, words
        self.device = device_for(record.gpu)
        self.n_params = ModelShape.of(self._config).n_params
        half = accelerator.accelerator_of(self.device).dtype == "bfloat16"
        self.fitted = Fitted(facts_of_run(self._config), room_bytes(self.device), half=half)

    @property
    def checkpoint(self) -> str:
        return self._path.name

    def load(self, seed: int) -> RunWriter:
        model = make_model(self._config)
        checkpoint.load_model(self._path, model)
        if self.fitted.dtype == "bf16":
            model.to(torch.bfloat16)
        model.block_size = self.fitted.context
        model.to(self.device)
        vocab_size = min(self._words.vocab_size, self._config.vocab_size)
        return RunWriter(self._words, Writer(model, vocab_size, seed))


def device_for(trained_on: Gpu) -> torch.device:
    """Return a CUDA card where there is one; an Apple GPU for a run that was trained on one; else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if trained_on.kind == "mps" and torch.backends.mps.is_available() else "cpu")


def room_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = available_memory_bytes()
    if device.type == "mps":  # a part of the computer's, which others use, too
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, left if free is None else min(left, free))
    return free

"""A model that goes on with a text: what follows, piece by piece."""

from collections.abc import Iterator

from foretrain.data.text_stream import TextStream
from foretrain.data.tokenizer import Tokenizer, document_end
from foretrain.model.generation.options import Sampling
from foretrain.model.generation.writer import Writer


class RunWriter:
    """A model that goes on with a text. `dropped`: tokens that left its context, all together."""

    def __init__(self, words: Tokenizer, writer: Writer) -> None:
        self._words, self._writer = words, writer
        self._end = document_end(words)
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
            if until_end and chosen == self._end:
                break
            if piece := stream.put(chosen):
                yield piece
        if rest := stream.end():
            yield rest

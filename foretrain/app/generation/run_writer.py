"""A model that goes on with a text: what follows, piece by piece."""

from collections.abc import Iterator

from foretrain.data.tokenizer import Tokenizer, document_end
from foretrain.model.sampling import Sampling
from foretrain.model.writer import Writer

# Text of tokens as they come: what is not a whole character yet waits for the next token.
#
# A token of a byte-level vocabulary can end in the middle of a character of UTF-8; decoded alone it would show as
# U+FFFD. All that was given out, together with what `end` gives, is the text of all tokens decoded at once.

REPLACEMENT = "\ufffd"


class TextStream:
    """Ids in, text out. Some tokens of before are decoded again with each new one, as a decoder may join them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._given = 0  # of them, whose text was given out

    def put(self, id: int) -> str:
        """The text that this token completes; empty where a character is not whole."""
        self._ids.append(id)
        text = self._rest()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text

    def end(self) -> str:
        """What is left, with U+FFFD for what never became a character."""
        text = self._rest()
        self._ids, self._given = [], 0
        return text

    def _rest(self) -> str:
        before = self._decode(self._ids[: self._given])
        return self._decode(self._ids)[len(before) :]


class RunWriter:
    """A model that goes on with a text. `dropped`: tokens that left its context, all together."""

    def __init__(self, words: Tokenizer, writer: Writer) -> None:
        self._words, self._writer = words, writer
        self._end = document_end(words)
        self.dropped = 0
        self.forget()

    def forget(self) -> None:
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

"""Text of tokens as they come: what is not a whole character yet waits for the next token.

A token of a byte-level vocabulary can end in the middle of a character of UTF-8; decoded alone it would show as U+FFFD.
All that was given out, together with what `end` gives, is the text of all tokens decoded at once.
"""

from foretrain.data.tokenizer import Tokenizer

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

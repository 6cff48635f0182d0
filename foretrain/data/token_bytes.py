"""How many bytes of text each id of a tokenizer stands for."""

import json
import re
from typing import Any

from foretrain.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte for which SentencePiece has no piece
_SPACE = "\u2581"  # SentencePiece's


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """UTF-8 bytes by id; 0 of separators and of other special tokens, which stand for no text."""
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
    """Of a byte-level vocabulary each character is a byte; in others a space has a sign of its own."""
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
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return set()
    inner = (_kinds(each) for each in decoder.get("decoders", ()))
    return {str(decoder.get("type")), *(kind for kinds in inner for kind in kinds)}

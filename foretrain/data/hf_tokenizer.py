"""A dataset's tokenizer as the files that Hugging Face's libraries read: tokenizer.json and tokenizer_config.json.

tokenizer.json is written as text (format of huggingface/tokenizers), so the library is not needed for it.
"""

import json
from typing import Any

from foretrain.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def files_of(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """{file name: text}; empty for a tokenizer that their format cannot hold."""
    made: dict[str, Any] | None = None
    if isinstance(tokenizer, JsonTokenizer):
        made = json.loads(tokenizer.text)
    elif tokenizer.name == "gpt2" and isinstance(tokenizer, TiktokenTokenizer):
        ranks = tokenizer.ranks
        made = _byte_level(ranks, merges_of(ranks), {BpeTokenizer.SEPARATOR: tokenizer.separator})
    elif isinstance(tokenizer, ByteTokenizer):
        made = _byte_level({bytes([byte]): byte for byte in range(256)}, [], {})
    elif isinstance(tokenizer, CharTokenizer):
        made = _characters(tokenizer.ids)
    if made is None:
        return {}
    own = getattr(tokenizer, "separator_text", BpeTokenizer.SEPARATOR)
    separators = [t["content"] for t in made["added_tokens"] if t["content"] == own]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for token in separators:
        settings |= {"bos_token": token, "eos_token": token}
    texts = {"tokenizer.json": made, "tokenizer_config.json": settings}
    return {name: json.dumps(value, ensure_ascii=False, indent=1) + "\n" for name, value in texts.items()}


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE (openai/gpt-2, encoder.py).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are the characters from U+0100 on.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges of a BPE whose tokens are known by rank: each token, cut by the ranks below its own, is two parts."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                best = min(
                    range(len(parts) - 1), key=lambda i: _rank_below(ranks, parts[i] + parts[i + 1], rank)
                )  # fmt: skip
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            merges.append((parts[0], parts[1]))
    return merges


def _rank_below(ranks: dict[bytes, int], pair: bytes, limit: int) -> int:
    rank = ranks.get(pair, limit)
    return rank if rank < limit else 1 << 62


def _byte_level(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], special: dict[str, int]) -> dict[str, Any]:
    characters = byte_characters()

    def shown(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {shown(token): id for token, id in ranks.items()} | special
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": [[shown(left), shown(right)] for left, right in merges],
    }  # fmt: skip
    before = {**_BYTE_LEVEL, "use_regex": bool(merges)}
    return _document(model, before, {**_BYTE_LEVEL, "use_regex": True}, special)


def _characters(ids: dict[str, int]) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"}
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    return _document(model, split, {"type": "Fuse"}, {})


def _document(model: Any, before: Any, decoder: Any, special: dict[str, int]) -> dict[str, Any]:
    added = [
        {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for content, id in special.items()
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": before, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip

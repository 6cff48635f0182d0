"""A dataset's tokenizer as tokenizer.json and tokenizer_config.json (huggingface/tokenizers), written as text."""

import json
from collections.abc import Mapping, Sequence
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
    """Return the printable character for each byte in a byte-level BPE (openai/gpt-2, encoder.py)."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges of a BPE known by rank: each token, cut by the ranks below its own, is two parts."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                best = min(range(len(parts) - 1), key=lambda i: _rank_below(ranks, parts[i] + parts[i + 1], rank))
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


# llama.cpp (src/llama-vocab.cpp, conversion/base.py) knows pre-tokenizer patterns by name only. A tokenizer with
# another pattern is not written: it would give other ids.

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's kinds of tokens
_SPACE = "\u2581"  # a space in SentencePiece's vocabularies
_GPT2 = "gpt-2"
_END = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + _END
# Patterns of tokenizer.json, and whether whole words are looked up before any merge: llama.cpp's name of the two.
_PATTERNS = {(_LLAMA3, True): "llama-bpe", (_LLAMA3, False): "dbrx", (_LLAMA3.replace("{1,3}", ""), False): "qwen2"}


def keys_of(tokenizer: Tokenizer, vocab_size: int, separator: int | None) -> dict[str, Any] | None:
    """Return GGUF's keys for a model with so many rows; None for a tokenizer that llama.cpp cannot hold. `separator`:
    ends a document, and is not put before a prompt."""
    if isinstance(tokenizer, CharTokenizer):
        return _gguf_characters(tokenizer.ids, vocab_size)
    document = files_of(tokenizer, 0).get("tokenizer.json")
    if document is None or separator is None or tokenizer.vocab_size > vocab_size:
        return None
    made = json.loads(document)
    if isinstance(tokenizer, ByteTokenizer):
        # Byte 0 ends a document. Its own character may occur in texts, so it gets a name.
        made["added_tokens"] = [{"id": separator, "content": "<|endoftext|>", "special": True}]
    model = made.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        return None
    found = _sentence_pieces(made, vocab_size) if model.get("byte_fallback") else _gguf_byte_level(made, vocab_size)
    if found is None or len(set(found["tokenizer.ggml.tokens"])) < vocab_size:  # it takes no text twice
        return None
    ends = {f"tokenizer.ggml.{name}_token_id": separator for name in ("bos", "eos")}
    return {**found, **ends, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}


def _gguf_byte_level(made: Mapping[str, Any], vocab_size: int) -> dict[str, Any] | None:
    model = made["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges") or ()]
    rule = _words_rule(made, merges)
    if rule is None or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    tokens, kinds = _listed(model["vocab"], made.get("added_tokens") or (), vocab_size)
    nothing = byte_characters()[0] * 2  # GGUF has no empty list; this pair never occurs, as nothing makes its parts
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or [f"{nothing} {nothing}"],
    }  # fmt: skip


def _words_rule(made: Mapping[str, Any], merges: Sequence[str]) -> str | None:
    normalizer = made.get("normalizer")
    if normalizer and normalizer.get("type") != "NFC":  # Qwen's; llama.cpp takes text as it is
        return None
    before = made.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    own, cuts = steps[-1].get("use_regex", True), steps[:-1]
    whole_words = bool(made["model"].get("ignore_merges"))
    if not cuts:
        return _GPT2 if (own or not merges) and not whole_words else None
    if len(cuts) != 1:
        return None
    cut = cuts[0]
    if cut.get("type") == "Digits" and cut.get("individual_digits") and own and not whole_words:
        return "smollm"
    pattern = (cut.get("pattern") or {}).get("Regex") if cut.get("type") == "Split" else None
    if own or cut.get("behavior") != "Isolated" or cut.get("invert"):
        return None
    return _PATTERNS.get((str(pattern), whole_words))


def _sentence_pieces(made: Mapping[str, Any], vocab_size: int) -> dict[str, Any] | None:
    """Return a BPE over characters with byte fallback, as Llama 2's; llama.cpp joins the neighbours with the highest
    score, which is right only where every way to a token is a merge."""
    model = made["model"]
    vocabulary: dict[str, int] = model["vocab"]
    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model.get("merges") or ()]
    begins = _begins_with_space(made)
    if begins is None or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    added = made.get("added_tokens") or ()
    outside = {each["content"] for each in added} | {f"<0x{byte:02X}>" for byte in range(256)}
    inside = vocabulary.keys() - outside
    known = set(pairs)
    for token in inside:
        for place in range(1, len(token)):
            pair = token[:place], token[place:]
            if inside.issuperset(pair) and pair not in known:
                return None
    tokens, kinds = _listed(vocabulary, added, vocab_size)
    for byte in range(256):
        kinds[vocabulary[f"<0x{byte:02X}>"]] = _BYTE
    unknown = vocabulary.get(str(model.get("unk_token")))
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 0)) for token in tokens],
        "tokenizer.ggml.add_space_prefix": begins,
    }  # fmt: skip
    if unknown is not None:
        kinds[unknown] = _UNKNOWN
        keys["tokenizer.ggml.unknown_token_id"] = unknown
    return keys


def _begins_with_space(made: Mapping[str, Any]) -> bool | None:
    before, normalizer = made.get("pre_tokenizer"), made.get("normalizer")
    if before and before.get("type") == "Metaspace" and not normalizer:
        whole = before.get("replacement") == _SPACE and not before.get("split", True)
        scheme = before.get("prepend_scheme", "always")
        return scheme != "never" if whole else None
    steps = normalizer.get("normalizers", []) if normalizer and normalizer.get("type") == "Sequence" else []
    replaced = [s for s in steps if s.get("type") == "Replace" and s.get("pattern") == {"String": " "}]
    prepended = [s for s in steps if s.get("type") == "Prepend" and s.get("prepend") == _SPACE]
    if before or not replaced or replaced[0].get("content") != _SPACE or len(replaced) + len(prepended) != len(steps):
        return None
    return bool(prepended)


def _gguf_characters(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any] | None:
    """Return a table of characters as a vocabulary without merges for llama.cpp: RWKV's. It looks for the longest token
    and may loop, so every character is a single byte, and every row one of them."""
    tokens = {id: character for character, id in ids.items()}
    if sorted(tokens) != list(range(vocab_size)) or not all(c.isascii() and len(c) == 1 for c in tokens.values()):
        return None

    def escaped(character: str) -> str:
        if character == "\\":
            return "\\\\"
        return character if character.isprintable() else f"\\x{ord(character):02x}"

    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [escaped(tokens[id]) for id in range(vocab_size)],
        "tokenizer.ggml.token_type": [_NORMAL] * vocab_size,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }


def _listed(
    vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, id in vocabulary.items():
        tokens[id], kinds[id] = token, _NORMAL
    for each in added:
        id = each["id"]
        tokens[id], kinds[id] = each["content"], _CONTROL if each.get("special") else _USER_DEFINED
    return tokens, kinds

"""Tokenizers: bytes, a BPE trained on the corpus, and GPT-2's. One registry; a name reads back what it wrote.

Every tokenizer has a `separator`: the id that ends a document.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from foretrain.errors import UserError


class Tokenizer(Protocol):
    """Text to ids and back. `decode(encode(text)) == text` for every text."""

    name: str
    vocab_size: int
    separator: int

    def encode(self, document: bytes) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes as they are; byte 0, which no source text has, ends a document."""

    name = "byte"
    vocab_size = 256
    separator = 0

    def encode(self, document: bytes) -> Sequence[int]:
        return document

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        pass


class BpeTokenizer:
    """A byte-level BPE of the `tokenizers` library (`pip install 'foretrain[data]'`)."""

    name = "bpe"
    FILE = "tokenizer.json"
    SEPARATOR = "<|endoftext|>"

    def __init__(self, text: str) -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise UserError("environment.missing_extra", package="tokenizers", extra="data") from None
        self.text = text
        self._fast = Fast.from_str(text)
        self.vocab_size: int = self._fast.get_vocab_size()
        separator = self._fast.token_to_id(self.SEPARATOR)
        assert separator is not None
        self.separator = separator

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> "BpeTokenizer":
        """Learn merges until there are `vocab_size` tokens, or none left to learn."""
        try:
            from tokenizers import Tokenizer as Fast
            from tokenizers import decoders, models, pre_tokenizers, trainers
        except ImportError:
            raise UserError("environment.missing_extra", package="tokenizers", extra="data") from None
        if vocab_size < 257:
            raise UserError("data.bpe_vocab", vocab_size=vocab_size)
        fast = Fast(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[cls.SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (document.decode("utf-8", "replace") for document in documents)
        fast.train_from_iterator(texts, trainer)
        return cls(fast.to_str())

    @classmethod
    def load(cls, folder: Path) -> "BpeTokenizer":
        return cls((folder / cls.FILE).read_text("utf-8"))

    def encode(self, document: bytes) -> Sequence[int]:
        return self._fast.encode(document.decode("utf-8", "replace"), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_text(self.text, "utf-8")


class Gpt2Tokenizer:
    """GPT-2's BPE through tiktoken; its vocabulary must be in tiktoken's cache or reachable."""

    name = "gpt2"
    vocab_size = 50257
    separator = 50256

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError:
            raise UserError("environment.missing_extra", package="tiktoken", extra="data") from None
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests, TLS and cache errors of many kinds: the cause is the same
            raise UserError("environment.no_vocabulary", reason=type(error).__name__) from None

    def encode(self, document: bytes) -> Sequence[int]:
        return self._encoding.encode_ordinary(document.decode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([id for id in ids if id < self.vocab_size])

    @property
    def ranks(self) -> dict[bytes, int]:
        """{token: id} of the 50,256 tokens that text is cut into."""
        return self._encoding._mergeable_ranks

    def save(self, folder: Path) -> None:
        pass


class CharTokenizer:
    """nanoGPT's character tables (`itos` in meta.pkl), for decoding samples of such datasets."""

    name = "char"
    separator = 0

    def __init__(self, characters: dict[int, str]) -> None:
        self._characters = characters
        self.ids = {character: id for id, character in characters.items()}
        self.vocab_size = max(characters, default=-1) + 1

    def encode(self, document: bytes) -> Sequence[int]:
        text = document.decode("utf-8", "replace")
        missing = sorted(set(text) - set(self.ids))
        if missing:
            raise UserError("data.unknown_characters", characters=missing[:5])
        return [self.ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters.get(id, "\ufffd") for id in ids)

    def save(self, folder: Path) -> None:
        (folder / "characters.json").write_text(json.dumps(self._characters), "utf-8")


# name -> (make it for a corpus and a vocabulary size, read it back from a dataset's folder)
TOKENIZERS: dict[str, tuple[Callable[[Callable[[], Iterable[bytes]], int], Tokenizer], Callable[[Path], Tokenizer]]] = {
    "byte": (lambda documents, size: ByteTokenizer(), lambda folder: ByteTokenizer()),
    "bpe": (lambda documents, size: BpeTokenizer.train(documents(), size), BpeTokenizer.load),
    "gpt2": (lambda documents, size: Gpt2Tokenizer(), lambda folder: Gpt2Tokenizer()),
}


def load(folder: Path, name: str | None) -> Tokenizer | None:
    """The tokenizer of a dataset's folder, or None where its files do not say which it was."""
    if name in TOKENIZERS:
        return TOKENIZERS[name][1](folder)
    if (folder / "meta.pkl").is_file():
        from foretrain.lm.dataset import read_meta_pickle

        characters = read_meta_pickle(folder / "meta.pkl").get("itos")
        if isinstance(characters, dict) and characters:
            return CharTokenizer({int(id): str(character) for id, character in characters.items()})
    return None

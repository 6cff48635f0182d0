"""Tokenizers: bytes, a BPE trained on the corpus, tokenizer.json, tiktoken's. `separator` ends a document."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from foretrain.base.errors import UserError, need_extra
from foretrain.base.files import read_bytes, read_text
from foretrain.base.units import MIB
from foretrain.data.dataset import DatasetInfo, read_meta_pickle


class Tokenizer(Protocol):
    """Text to ids and back. `decode(encode(text)) == text` for every text."""

    name: str
    vocab_size: int
    separator: int

    def encode(self, document: bytes) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


MOST_BYTES = 64 * MIB  # of a vocabulary: 256,000 tokens with their merges take 34 MB


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


class JsonTokenizer:
    name = "tokenizer.json"
    FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
    # End tokens of common vocabularies, where tokenizer_config.json does not tell.
    SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

    def __init__(self, text: str, separator: str | None = None, path: str = FILE) -> None:
        tokenizers = need_extra("tokenizers", "data")
        self.text = text
        try:
            self._fast = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # of Rust, without a type of its own
            raise UserError(
                "data.bad_tokenizer", path=path, reason=(str(error).splitlines() or ["?"])[0][:200]
            ) from None
        # Text is text: a spelled-out separator in a document is not one, and nothing is cut or padded.
        self._fast.encode_special_tokens = True
        self._fast.no_truncation()
        self._fast.no_padding()
        ids = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        wanted = self.SEPARATORS if separator is None else (separator,)
        self.separator_text = next((token for token in wanted if token in ids), "")
        if not self.separator_text:
            raise UserError("data.no_separator", path=path, wanted=wanted)
        self.separator: int = ids[self.separator_text]

    @classmethod
    def load(cls, folder: Path) -> "JsonTokenizer":
        """Load a folder with tokenizer.json; the separator is its eos_token, else a config.json's eos_token_id."""
        try:
            settings = folder / cls.SETTINGS
            eos = json.loads(read_text(settings)).get("eos_token") if settings.is_file() else None
            separator = eos.get("content") if isinstance(eos, dict) else eos
            text = read_text(folder / cls.FILE, MOST_BYTES)
            try:
                return cls(text, separator if isinstance(separator, str) else None, str(folder / cls.FILE))
            except UserError as error:
                if error.id != "data.no_separator" or (named := cls._named_by_model(folder, text)) is None:
                    raise
                return cls(text, named)
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise UserError("data.bad_meta", path=str(folder / cls.FILE), reason=str(error)[:200]) from None

    @staticmethod
    def _named_by_model(folder: Path, text: str) -> str | None:
        settings = folder / "config.json"
        id = json.loads(read_text(settings)).get("eos_token_id") if settings.is_file() else None
        vocabulary = json.loads(text)["model"]["vocab"]
        found = vocabulary.items() if isinstance(vocabulary, dict) and isinstance(id, int) else ()
        return next((token for token, each in found if each == id), None)

    def id_of(self, token: str) -> int | None:
        return self._fast.token_to_id(token)

    def encode(self, document: bytes) -> Sequence[int]:
        return self._fast.encode(document.decode("utf-8", "replace"), add_special_tokens=False).ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [made.ids for made in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_text(self.text, "utf-8")
        (folder / self.SETTINGS).write_text(json.dumps({"eos_token": self.separator_text}) + "\n", "utf-8")


class BpeTokenizer(JsonTokenizer):
    name = "bpe"
    SEPARATOR = "<|endoftext|>"

    def __init__(self, text: str, separator: str | None = None, path: str = JsonTokenizer.FILE) -> None:
        super().__init__(text, self.SEPARATOR, path)

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> "BpeTokenizer":
        need_extra("tokenizers", "data")
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers, trainers

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


class TiktokenTokenizer:
    """An encoding of tiktoken's; its vocabulary must be in tiktoken's cache, reachable, or saved in a folder."""

    SEPARATOR = "<|endoftext|>"
    RULES, RANKS = "tiktoken.json", "tiktoken.ranks"

    def __init__(self, name: str, encoding: Any = None) -> None:
        tiktoken = need_extra("tiktoken", "data")
        try:
            self._encoding = encoding or tiktoken.get_encoding(name)
        except Exception as error:  # requests, TLS and cache errors of many kinds: the cause is the same
            raise UserError("environment.no_vocabulary", name=name, reason=type(error).__name__) from None
        self.name = name
        self.vocab_size: int = self._encoding.max_token_value + 1
        self.separator: int = self._encoding._special_tokens[self.SEPARATOR]

    @classmethod
    def load(cls, folder: Path, name: str) -> "TiktokenTokenizer":
        if not (folder / cls.RULES).is_file():
            return cls(name)
        try:
            rules = json.loads(read_text(folder / cls.RULES))
            lines = read_bytes(folder / cls.RANKS, MOST_BYTES).split()
            ranks = {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}
            encoding = need_extra("tiktoken", "data").Encoding(
                rules["name"], pat_str=rules["pattern"], mergeable_ranks=ranks, special_tokens=rules["special"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError("data.bad_meta", path=str(folder / cls.RULES), reason=str(error)[:200]) from None
        return cls(rules["name"], encoding)

    def encode(self, document: bytes) -> Sequence[int]:
        return self._encoding.encode_ordinary(document.decode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        known = self.known
        return self._encoding.decode([id for id in ids if id in known])

    @cached_property
    def known(self) -> frozenset[int]:
        return frozenset(self.ranks.values()) | frozenset(self._encoding._special_tokens.values())

    @property
    def ranks(self) -> dict[bytes, int]:
        return self._encoding._mergeable_ranks

    def save(self, folder: Path) -> None:
        rules = {"name": self.name, "pattern": self._encoding._pat_str, "special": self._encoding._special_tokens}
        lines = [
            base64.b64encode(token) + f" {rank}\n".encode()
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        ]
        (folder / self.RULES).write_text(json.dumps(rules, indent=1) + "\n", "utf-8")
        (folder / self.RANKS).write_bytes(b"".join(lines))


class Gpt2Tokenizer(TiktokenTokenizer):
    name = "gpt2"
    vocab_size = 50257
    separator = 50256

    def __init__(self) -> None:
        super().__init__("gpt2")


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


def document_end(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document; None of character tables, which have none: their id 0 is a character."""
    return None if isinstance(tokenizer, CharTokenizer) else tokenizer.separator


TIKTOKEN_NAMES = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")

# name -> (make it for a corpus and a vocabulary size, read it back from a dataset's folder)
TOKENIZERS: dict[str, tuple[Callable[[Callable[[], Iterable[bytes]], int], Tokenizer], Callable[[Path], Tokenizer]]] = {
    "byte": (lambda documents, size: ByteTokenizer(), lambda folder: ByteTokenizer()),
    "bpe": (lambda documents, size: BpeTokenizer.train(documents(), size), BpeTokenizer.load),
    "gpt2": (lambda documents, size: Gpt2Tokenizer(), lambda folder: TiktokenTokenizer.load(folder, "gpt2")),
}


def load(folder: Path, name: str | None) -> Tokenizer | None:
    if name in TOKENIZERS:
        return TOKENIZERS[name][1](folder)
    if name == JsonTokenizer.name:  # of a file that a user has; none can be made for a corpus
        return JsonTokenizer.load(folder)
    if name in TIKTOKEN_NAMES or (folder / TiktokenTokenizer.RULES).is_file():
        return TiktokenTokenizer.load(folder, str(name))
    if (folder / "meta.pkl").is_file():
        characters = read_meta_pickle(folder / "meta.pkl").get("itos")
        if isinstance(characters, dict) and characters:
            return CharTokenizer({int(id): str(character) for id, character in characters.items()})
    return None


def digest_of(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.name.encode())
    if isinstance(tokenizer, JsonTokenizer):
        digest = hashlib.sha256(json.dumps(json.loads(tokenizer.text), sort_keys=True).encode())
    elif isinstance(tokenizer, TiktokenTokenizer):
        encoding: Any = tokenizer._encoding
        digest.update(json.dumps([encoding._pat_str, encoding._special_tokens], sort_keys=True).encode())
        for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
    return digest.hexdigest()


def tokenizer_of(info: DatasetInfo) -> Tokenizer | None:
    """Return the tokenizer of a dataset's ids; None where unknown. Raises UserError 'data.other_tokenizer'."""
    found = load(info.tokenizer_folder, info.tokenizer)
    if found is not None and info.tokenizer_sha256 is not None and digest_of(found) != info.tokenizer_sha256:
        raise UserError("data.other_tokenizer", path=str(info.tokenizer_folder))
    return found

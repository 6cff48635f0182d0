"""The built-in corpus: the sources of the Python standard library, without test data and generated tables."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.base.records import Note
from foretrain.data.locate import locate

if TYPE_CHECKING:
    from foretrain.config.options import RunConfig
    from foretrain.config.resolve import ResolvedConfig
    from foretrain.data.dataset import DatasetInfo

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_VAL_SHARE = 20  # one file in twenty


@dataclass(frozen=True)
class CorpusFile:
    relative: str
    size_bytes: int
    split: str


def root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@cache
def files() -> tuple[CorpusFile, ...]:
    base = root()
    found = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder) / name
                relative = path.relative_to(base).as_posix()
                digest = hashlib.sha256(relative.encode()).digest()
                split = "val" if int.from_bytes(digest[:4], "big") % _VAL_SHARE == 0 else "train"
                found.append(CorpusFile(relative, path.stat().st_size, split))
    return tuple(sorted(found, key=lambda file: file.relative))


def fingerprint() -> str:
    digest = hashlib.sha256()
    for file in files():
        digest.update(f"{file.relative}\0{file.size_bytes}\0".encode())
    return digest.hexdigest()[:12]


def size_bytes(split: str) -> int:
    """Return the bytes of a split with a separator per file: its length in tokens of the byte tokenizer."""
    return sum(file.size_bytes + 1 for file in files() if file.split == split)


def documents(split: str) -> Iterator[bytes]:
    base = root()
    for file in files():
        if file.split == split:
            yield (base / file.relative).read_bytes()


# Vocabulary and tokens come, in this order, from the config, the log or the dataset on this machine, nanoGPT's own
# datasets, nanoGPT's default. Without a look at the data they are an assumption, which a plan reports.


@dataclass(frozen=True)
class Published:
    train_tokens: int
    vocab_size: int | None = None


# By the comments and readme files of karpathy/nanoGPT data/*/. Without a meta.pkl nanoGPT takes GPT-2's 50,257 ids,
# padded to 50,304.
NANOGPT_DATASETS = {
    "shakespeare_char": Published(train_tokens=1_003_854, vocab_size=65),
    "shakespeare": Published(train_tokens=301_966),
    "openwebtext": Published(train_tokens=9_035_582_198),
}


@dataclass(frozen=True)
class ConfigData:
    """A config with its dataset's vocabulary, its training tokens and their source, the dataset if it is here."""

    config: RunConfig
    tokens: int | None
    source: str
    info: DatasetInfo | None = None
    assumptions: tuple[Note, ...] = ()


def data_of_config(
    resolved: ResolvedConfig,
    *,
    logged_vocab_size: int | None = None,
    find: Callable[[str], DatasetInfo | None] | None = None,
    built_in_tokens: Callable[[], int] | None = None,
) -> ConfigData:
    """Return the config with what its dataset settles. `logged_vocab_size`: by a log of the run. `find`: a dataset of a
    name; `built_in_tokens`: of the built-in corpus. Raises UserError 'data.…'."""
    from foretrain.data import dataset

    config = resolved.config
    if config.dataset == dataset.BUILT_IN:
        tokens = (built_in_tokens or _corpus_tokens)() if config.tokenizer == "byte" else None
        size = logged_vocab_size or dataset.BUILT_IN_VOCABULARY.get(config.tokenizer)
        return ConfigData(_with_vocabulary(resolved, size), tokens, "built-in corpus")
    info = (find or locate)(config.dataset)
    if info is not None:
        own = _with_vocabulary(resolved, logged_vocab_size or info.vocab_size)
        return ConfigData(own, info.train_tokens, info.remote or info.path, info)
    named = "dataset" in resolved.sources  # a default tells nothing of the user's data
    known = NANOGPT_DATASETS.get(config.dataset) if named else None
    tokens, source = (known.train_tokens, "nanoGPT's own") if known else (None, "unknown")
    if "vocab_size" in resolved.sources or logged_vocab_size:
        return ConfigData(_with_vocabulary(resolved, logged_vocab_size), tokens, source)
    own = _with_vocabulary(resolved, known.vocab_size if known else None)
    assumed = _assumed(own, known) if named else ()
    return ConfigData(own, tokens, source, assumptions=assumed)


def _corpus_tokens() -> int:

    return size_bytes("train")


def _with_vocabulary(resolved: ResolvedConfig, vocab_size: int | None) -> RunConfig:
    if not vocab_size or "vocab_size" in resolved.sources:
        return resolved.config
    return resolved.config.model_copy(update={"vocab_size": vocab_size})


def _assumed(config: RunConfig, known: Published | None) -> tuple[Note, ...]:
    if known is not None and known.vocab_size is None:
        return ()
    values = {"vocab_size": config.vocab_size, "dataset": config.dataset}
    return (Note(id="vocab_of_nanogpt" if known else "vocab_default", values=values),)

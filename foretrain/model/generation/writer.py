"""Text from a model, token by token, with what it has read in a KV cache.

The context is a window. When it is full, its oldest quarter is dropped and the rest is read again from position 0: the
keys and values in the cache are of other positions, and of layers that have seen what is dropped, so none can stay.
"""

from collections.abc import Iterator

import torch

from foretrain.model.generation.cache import Reader
from foretrain.model.generation.options import Sampling
from foretrain.model.generation.sampling import choose
from foretrain.model.language_model import LanguageModel

DROPPED_SHARE = 4  # a quarter: each token costs 3 / 4 · T / (T / 4), about three tokens of prefill, once it is full


def kept_of(block_size: int) -> int:
    """Tokens that stay when the context is full."""
    return max(1, block_size - max(1, block_size // DROPPED_SHARE))


class Writer:
    """A model and the text so far. Ids >= vocab_size never come."""

    def __init__(self, model: LanguageModel, vocab_size: int, seed: int) -> None:
        self._reader = Reader(model)
        self._generator = torch.Generator().manual_seed(seed)
        self._window: list[int] = []
        self._unread: list[int] = []
        self.vocab_size = vocab_size
        self.block_size = model.block_size

    def __len__(self) -> int:
        return len(self._window) + len(self._unread)

    def forget(self) -> None:
        """Start anew."""
        self._reader.forget()
        self._window, self._unread = [], []

    def append(self, ids: list[int]) -> int:
        """Let `ids` follow the text so far. Returns how many of the oldest tokens leave the context for them."""
        total = len(self) + len(ids)
        if total <= self.block_size:
            self._unread += ids
            return 0
        kept = self.block_size if not len(self) else kept_of(self.block_size)  # a first text may fill the context
        text = [*self._window, *self._unread, *ids][-kept:]
        self.forget()
        self._unread = text
        return total - len(text)

    def write(self, sampling: Sampling) -> tuple[int, int]:
        """The next token, which now is part of the text, and how many of the oldest left the context for it."""
        logits = self._reader.read(self._unread)
        self._window += self._unread
        self._unread = []
        chosen = choose(logits.float().cpu()[: self.vocab_size], sampling, self._generator)
        return chosen, self.append([chosen])


def generate(
    model: LanguageModel,
    ids: list[int],
    count: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    vocab_size: int,
    top_p: float = 1.0,
) -> Iterator[int]:
    """`count` ids that follow `ids`, one by one."""
    writer = Writer(model, vocab_size, seed)
    writer.append(list(ids))
    sampling = Sampling(temperature, top_k, top_p)
    for _ in range(count):
        yield writer.write(sampling)[0]

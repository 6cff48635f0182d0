"""Messages between the ranks of a run, as JSON, over a group of their own on the host."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foretrain.base.errors import UserError

T = TypeVar("T")
# A rank that ends is noticed at once, as its connection ends. This is for a hung one; others may wait for a slow disk.
TIMEOUT = timedelta(minutes=30)


class Peers:
    """The ranks of a run; this one is `rank` of `world`. Without a group there is one rank."""

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        self.rank, self.world, self._group = rank, world, group

    @classmethod
    def joined(cls) -> "Peers":
        """Join those of the process group. Each of them has to call this."""
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results, as JSON. All raise the first error."""
        if self.world == 1:
            return [work()]
        own, word = None, {}
        try:
            word["done"] = work()
        except Exception as error:
            own, word = error, _word(error)
        words = self._exchange(word)
        for rank, each in enumerate(words):
            if "done" not in each:
                raise own if own is not None and rank == self.rank else _heard(each, rank)
        return [each["done"] for each in words]

    def only_first(self, work: Callable[[], Any]) -> None:
        def task() -> None:
            if self.first:
                work()

        self.agree(task)

    def _exchange(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of all ranks. Raises torch's RuntimeError where one of them is gone."""
        data = torch.frombuffer(bytearray(json.dumps(word, default=str).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
        longest = max(int(length) for length in lengths)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        dist.all_gather(found, padded, group=self._group)
        cut = (text[: int(length)] for text, length in zip(found, lengths, strict=True))
        return [json.loads(bytes(text.numpy())) for text in cut]


ALONE = Peers()


def _word(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"id": error.id, "values": error.values}
    if isinstance(error, OSError):
        return {"errno": error.errno, "text": error.strerror or str(error)}
    kind = "memory" if isinstance(error, MemoryError) or "out of memory" in str(error) else "bug"
    return {kind: f"{type(error).__name__}: {error}"}


def _heard(word: dict[str, Any], rank: int) -> Exception:
    if "id" in word:
        return UserError(word["id"], **word["values"])
    if "errno" in word:
        return OSError(word["errno"], word["text"])
    if "memory" in word:
        return MemoryError(f"rank {rank}: {word['memory']}")
    return RuntimeError(f"rank {rank}: {word['bug']}")

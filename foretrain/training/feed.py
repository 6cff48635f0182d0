"""Batches read ahead by a thread. The order is a function of (seed, step); when a step is undone and cut differently,
reading begins again there."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import TracebackType

import numpy as np
import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch, TokenFile, from_pinned, pinned, to_batch, train_starts
from foretrain.data.dataset import DatasetInfo

HOST = torch.device("cpu")
HELD = 64  # token files that are open from the beginning
AHEAD_BYTES = 32 * 2**20  # of ids as int64, on the card
_JOIN_S = 5.0  # a read blocked by a network file system is left to its daemon thread
_WARM_STEPS = 3  # the first ones wait for the first reads

Rows = Batch | torch.Tensor  # on the host; for a card page-locked


def token_files(config: RunConfig, info: DatasetInfo) -> tuple[TokenFile, TokenFile]:
    train, val = (TokenFile(info, s, config.vocab_size, verify=config.verify_data) for s in ("train", "val"))
    left = HELD
    for reader in (*val.readers, *train.readers):
        left -= reader.hold(left)
    return train, val


def _moved(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


class Ahead:
    """An iterator that another thread runs, at most `depth` items ahead; `get` raises its errors."""

    def __init__(self, items: Iterator[Rows], depth: int, prepare: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.Queue[tuple[Rows | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items, prepare), name="foretrain-data", daemon=True)
        self._thread.start()

    def get(self) -> Rows:
        """Wait for the next item. Raises the iterator's errors, and StopIteration at its end."""
        item, error = self._queue.get()
        if error is not None:
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # it may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)
            self._deadline = getattr(self, "_deadline", time.monotonic() + _JOIN_S)
            if time.monotonic() > self._deadline:
                return

    def _run(self, items: Iterator[Rows], prepare: Callable[[], None]) -> None:
        try:
            prepare()
            for item in items:
                self._put(item, None)
                if self._stop.is_set():
                    return
            self._put(None, StopIteration())
        except BaseException as error:  # the trainer's thread gets it, whatever it is
            self._put(None, error)

    def _put(self, item: Rows | None, error: BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put((item, error), timeout=0.1)
            except queue.Full:
                continue
        return None


class Feed:
    """The micro-batches of a run's steps, read ahead. A context manager: its thread ends with it."""

    def __init__(self, tokens: TokenFile, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.tokens, self.device, self.rank, self.world_size = tokens, device, rank, world_size
        self._ahead: Ahead | None = None
        self._next: tuple[int, ...] | None = None  # the step, and its split, that the thread yields next
        self._waited_s, self._steps = 0.0, 0  # since the last line of metrics
        self._total_s, self._counted = 0.0, 0  # of the run, but for its first steps

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        ahead, self._ahead, self._next = self._ahead, None, None
        if ahead is not None:
            ahead.close()

    def batches(self, config: RunConfig, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of a step, as the config splits it. Raises UserError where they cannot be read."""
        wanted = (step, config.batch_size, config.gradient_accumulation_steps)
        if self._ahead is None or self._next != wanted:
            self.close()
            self._ahead = self._read(config, step)
        ahead, self._next = self._ahead, None  # a failed step leaves the thread in its middle
        waited = 0.0
        for micro in range(config.gradient_accumulation_steps):
            before = time.perf_counter()
            rows = ahead.get()
            waited += time.perf_counter() - before
            if micro + 1 == config.gradient_accumulation_steps:
                self._next = (step + 1, *wanted[1:])
                self._count(waited)
            yield from_pinned(rows, self.device) if isinstance(rows, torch.Tensor) else _moved(rows, self.device)

    def again(self, config: RunConfig, step: int) -> Iterator[Batch]:
        for rows in islice(self._rows(config, step), config.gradient_accumulation_steps):
            yield to_batch(rows, self.device)

    def take_wait_s(self) -> float:
        waited, steps = self._waited_s, self._steps
        self._waited_s, self._steps = 0.0, 0
        return waited / steps if steps else 0.0

    @property
    def mean_wait_s(self) -> float | None:
        return self._total_s / self._counted if self._counted else None

    def _count(self, waited: float) -> None:
        self._waited_s, self._steps = self._waited_s + waited, self._steps + 1
        if self._next is not None and self._next[0] > _WARM_STEPS:
            self._total_s, self._counted = self._total_s + waited, self._counted + 1

    def _read(self, config: RunConfig, step: int) -> Ahead:
        row_bytes = 8 * (config.block_size + 1)
        fitting = AHEAD_BYTES // (row_bytes * config.batch_size)
        depth = max(2, min(fitting, 2 * config.gradient_accumulation_steps))
        if self.device.type == "cuda":
            # A thread begins on the first card, and page-locking would wake that one.
            card = self.device.index if self.device.index is not None else torch.cuda.current_device()
            return Ahead(map(pinned, self._rows(config, step)), depth, lambda: torch.cuda.set_device(card))
        # PyTorch does not promise that two threads can use an Apple GPU, so the one that reads ahead stays on the host.
        return Ahead((to_batch(rows, HOST) for rows in self._rows(config, step)), depth)

    def _rows(self, config: RunConfig, step: int) -> Iterator[np.ndarray]:
        for number in range(step, config.max_iters):
            for first in train_starts(
                self.tokens, config.seed, number, batch_size=config.batch_size,
                accumulation=config.gradient_accumulation_steps, block=config.block_size, order=config.data_order,
                rank=self.rank, world_size=self.world_size,
            ):  # fmt: skip
                yield self.tokens.checked_rows(first, config.block_size + 1)

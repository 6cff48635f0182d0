"""foretrain's own training step on random tokens, to be timed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, repeat

import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch, to_batch
from foretrain.model.step import TrainState, build, evaluation_loss, run_as, train_step
from foretrain.training.device import TORCH_DTYPES, Placement
from foretrain.training.feed import Ahead


class Stepper:
    """foretrain's trainer on random tokens, built, compiled and warmed up."""

    def __init__(
        self, config: RunConfig, placement: Placement, dtype: str, *, compiled: bool, like: TrainState | None = None
    ) -> None:
        """`like`: what was built from the same config, whose weights serve once more."""
        device = placement.device
        self.config, self.dtype, self.compiled = config, dtype, compiled
        if like:
            self.state = run_as(like, TORCH_DTYPES[dtype], compile=compiled)
        else:
            self.state = build(config, device, TORCH_DTYPES[dtype], compile=compiled)
        tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1), device=device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.rows = tokens.cpu().numpy()
        self.times(2)

    def times(self, count: int) -> list[float]:
        """Seconds of so many steps."""
        samples, accumulation = [], self.config.gradient_accumulation_steps
        with self._batches() as batches:
            for _ in range(count):
                started = time.perf_counter()
                train_step(self.state, islice(batches, accumulation), 1e-4).loss.item()
                samples.append(time.perf_counter() - started)
        return samples

    @contextmanager
    def _batches(self) -> Iterator[Iterator[Batch]]:
        """On a CPU another thread makes them, as in training, where it takes its share of the cores."""
        if self.state.device.type != "cpu":
            yield repeat(self.batch)
            return
        ahead = Ahead((to_batch(rows, self.state.device) for rows in repeat(self.rows)), 2)
        try:
            yield iter(ahead.get, None)  # type: ignore[misc]
        finally:
            ahead.close()

    def forward_times(self, count: int) -> list[float]:
        """Seconds of so many micro-batches of an evaluation."""
        samples = []
        for _ in range(count + 1):  # the first one makes kernels of its own
            started = time.perf_counter()
            evaluation_loss(self.state, self.batch).item()
            samples.append(time.perf_counter() - started)
        return samples[1:]

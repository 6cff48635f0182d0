"""nanoGPT's training step and foretrain's behind one face, for benchmarks that hold them side by side.

The baseline is written from nanoGPT's description (karpathy/nanoGPT, train.py): fp32 on a CPU whatever its dtype says,
autocast on a card, logits returned by the model and kept until the next ones, batches stacked row by row from a memory
map that is opened for each, fetched between forward and backward, AdamW fused on CUDA alone, gradients clipped, a loss
read after every step. Its rows are those that foretrain draws, so that both see the same tokens.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from foretrain.config.options import RunConfig
from foretrain.data.batches import TRAIN, TokenFile, starts
from foretrain.data.dataset import DatasetInfo
from foretrain.model.step import StepResult, build, learning_rate, train_step
from foretrain.predict.trace.drive import NanoGPT
from foretrain.training.device import TORCH_DTYPES
from tests.kit.batches import train_batches


class Contestant(Protocol):
    """Something that trains: `step(n)` does optimizer step n and returns its loss."""

    def step(self, number: int) -> float: ...


def tokens_like_text(draw: np.random.Generator, count: int) -> np.ndarray:
    """Draw ids of a vocabulary of 50,304, uint16, with uniform logarithms: few are frequent and many rare."""
    return np.minimum(50304 ** draw.random(count), 50303).astype(np.uint16)


class Foretrain:
    """foretrain's own step (model/step.py), fed as its trainer feeds it. `take`: runs a step."""

    def __init__(
        self, config: RunConfig, device: torch.device, dtype: str, info: DatasetInfo, *, compiled: bool
    ) -> None:
        self.config, self.tokens = config, TokenFile(info, "train", config.vocab_size)
        self.state = build(config, device, TORCH_DTYPES[dtype], compile=compiled)
        self.take: Callable[..., StepResult] = partial(train_step, self.state)

    def step(self, number: int) -> float:
        c = self.config
        batches = train_batches(
            self.tokens, c.seed, number, batch_size=c.batch_size, accumulation=c.gradient_accumulation_steps,
            block=c.block_size, device=self.state.device,
        )  # fmt: skip
        return self.take(batches, learning_rate(c, number)).loss.item()


class NanoGptTraining:
    """nanoGPT's step. `autocast`: also on a CPU, where nanoGPT has none."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        dtype: str,
        info: DatasetInfo,
        *,
        compiled: bool,
        autocast: bool = False,
    ) -> None:
        self.config, self.device, self.info = config, device, info
        torch.manual_seed(config.seed)
        on_card = device.type == "cuda"
        if on_card:
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        self.context: Any = (
            torch.amp.autocast(device.type, TORCH_DTYPES[dtype]) if on_card or autocast else contextlib.nullcontext()
        )
        model = NanoGPT(config).to(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=on_card and dtype == "float16")
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if on_card else {}
        betas = (config.beta1, config.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, **fused)
        self.model, self.called = model, torch.compile(model) if compiled else model
        self.rows: list[int] = []
        self.number = 0
        self.fetched = self.batch()
        self.logits: Any = None

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next micro-batch of foretrain's rows, read as nanoGPT reads."""
        c = self.config
        if not self.rows:
            count, positions = c.batch_size * c.gradient_accumulation_steps, self.info.train_tokens - c.block_size
            self.rows = starts(c.seed, TRAIN, self.number, count, positions).tolist()
            self.number += 1
        own, self.rows = self.rows[: c.batch_size], self.rows[c.batch_size :]
        data: Any = np.memmap(Path(self.info.path) / "train.bin", dtype=np.dtype(self.info.dtype), mode="r")
        x = torch.stack([torch.from_numpy(data[i : i + c.block_size].astype(np.int64)) for i in own])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + c.block_size].astype(np.int64)) for i in own])
        if self.device.type == "cuda":
            return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))  # type: ignore[return-value]
        return x, y

    def step(self, number: int) -> float:
        c = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c, number)
        loss: Any = None
        total = 0.0
        for _ in range(c.gradient_accumulation_steps):
            with self.context:
                self.logits, loss = self.called(*self.fetched)
                loss = loss / c.gradient_accumulation_steps
            self.fetched = self.batch()
            total = total + loss.detach()
            self.scaler.scale(loss).backward()
        if c.grad_clip != 0.0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)

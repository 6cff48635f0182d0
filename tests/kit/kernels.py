"""Batches and stand-ins for kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.config.options import RunConfig


def learnable_batches(config: RunConfig, step: int) -> list[tuple[Tensor, Tensor]]:
    """Each token follows from the one before it, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(config.gradient_accumulation_steps):
        first = torch.randint(config.vocab_size, (config.batch_size, 1), generator=generator)
        rows = (first + 5 * torch.arange(config.block_size + 1)) % config.vocab_size
        made.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return made


def random_batches(count: int = 2, rows: int = 4, block: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 96, (rows, block + 1), generator=generator) for _ in range(count)]
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]


class Kernels(TorchDispatchMode):
    """Bytes that the kernels of a real step read and write, views left out, and FLOPs of products."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, Tensor)]
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in tensors}
        if not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in known for t in outs):  # a view
            return out
        read = {t.data_ptr(): t for t in tensors}.values()
        self.nbytes += sum(t.numel() * t.element_size() for t in (*read, *outs))
        self.count += 1
        return out

"""The optimizer of a config, and the learning-rate schedules."""

import math

import torch
from torch import nn

from foretrain.config.options import RunConfig
from foretrain.model.techniques import optimizer_of


def make_optimizer(model: nn.Module, config: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """AdamW is fused on CPUs, CUDA and Apple GPUs: that kernel needs no temporaries, so the optimizer step is never the
    memory peak.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optimizer_of(config).make(named, config, device_type)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then cosine or linear decay to min_lr, constant after.

    cosine: karpathy/nanoGPT train.py. linear: the full rate until the last `cooldown` share of lr_decay_iters.
    """
    c = config
    if not c.decay_lr:
        return c.learning_rate
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if step >= c.lr_decay_iters:
        return c.min_lr
    if c.lr_schedule == "linear":
        down = max(1.0, min(c.cooldown * c.lr_decay_iters, c.lr_decay_iters - c.warmup_iters))
        left = min(1.0, (c.lr_decay_iters - step) / down)
        return c.min_lr + left * (c.learning_rate - c.min_lr)
    share = (step - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (c.learning_rate - c.min_lr)

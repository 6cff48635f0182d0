"""AdamW with nanoGPT's two parameter groups, Muon beside it, and the learning-rate schedules."""

import math

import torch
from torch import nn

from foretrain.config.options import RunConfig
from foretrain.model.adamw8bit import AdamW8bit
from foretrain.model.muon import MuonAdamW
from foretrain.model.shape import is_block_matrix


def make_optimizer(model: nn.Module, config: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """The optimizer of the config; every group's rate is `lr_multiple` (1 where there is none) times the schedule's.

    Tensors with two dimensions or more are decayed, the others are not. AdamW is fused on CPU and CUDA: that kernel
    needs no temporaries, so the optimizer step is never the memory peak. Muon: see model/muon.py.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    betas = (config.beta1, config.beta2)
    is_hidden = {name for name, p in named if config.optimizer == "muon" and is_block_matrix(name, tuple(p.shape))}
    rest = [p for name, p in named if name not in is_hidden]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw8bit":
        return AdamW8bit(groups, config.learning_rate, betas)
    if not is_hidden:
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=device_type in ("cuda", "cpu"))
    matrices = [p for name, p in named if name in is_hidden]
    multiple = config.muon_learning_rate / config.learning_rate
    groups.append({"params": matrices, "weight_decay": config.weight_decay, "muon": True, "lr_multiple": multiple})
    return MuonAdamW(groups, betas=betas, momentum=config.muon_momentum)


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of a step: linear warm-up, then cosine or linear decay to min_lr, constant after.

    cosine: karpathy/nanoGPT train.py. linear: the full rate until the last `cooldown` share of lr_decay_iters.
    """
    c = config
    if not c.decay_lr:
        return c.learning_rate
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if step > c.lr_decay_iters:
        return c.min_lr
    if c.lr_schedule == "linear":
        down = max(1.0, min(c.cooldown * c.lr_decay_iters, c.lr_decay_iters - c.warmup_iters))
        left = min(1.0, (c.lr_decay_iters - step) / down)
        return c.min_lr + left * (c.learning_rate - c.min_lr)
    share = (step - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (c.learning_rate - c.min_lr)

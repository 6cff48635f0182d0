"""AdamW with nanoGPT's two parameter groups, and its learning-rate schedule."""

import math

import torch
from torch import nn

from foretrain.config import RunConfig
from foretrain.errors import UserError
from foretrain.lm.adamw8bit import AdamW8bit


def make_optimizer(model: nn.Module, config: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """That of the knob `optimizer`; tensors with two dimensions or more are decayed, the others are not.

    AdamW is fused on CPU and CUDA. The fused kernel needs no temporaries, so the optimizer step is never the memory peak.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        raise UserError("usage.no_muon")
    if config.optimizer == "adamw8bit":
        return AdamW8bit(groups, config.learning_rate, betas)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=device_type in ("cuda", "cpu"))


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of a step: linear warm-up, cosine decay to min_lr, constant after (karpathy/nanoGPT train.py)."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step > config.lr_decay_iters:
        return config.min_lr
    share = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (config.learning_rate - config.min_lr)

"""What nanoGPT's train.py computes and saves."""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from foretrain.model.step import TrainState, build, train_step
from tests.kit.tiny import tiny


def reference_loss(w: dict[str, torch.Tensor], c, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """GPT-2's forward pass in plain operations: no modules, no fused attention."""
    B, T = idx.shape
    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]
    mask = torch.full((T, T), float("-inf")).triu(1)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[name + ".weight"] + w.get(name + ".bias", torch.zeros(()))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(()))

    for i in range(c.n_layer):
        h = f"transformer.h.{i}."
        q, k, v = linear(h + "attn.c_attn", norm(h + "ln_1", x)).split(c.n_embd, 2)
        q, k, v = (t.view(B, T, c.n_head, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, c.n_embd)
        x = x + linear(h + "attn.c_proj", y)
        m = linear(h + "mlp.c_fc", norm(h + "ln_2", x))
        m = 0.5 * m * (1 + torch.erf(m / math.sqrt(2)))
        x = x + linear(h + "mlp.c_proj", m)
    logits = norm("transformer.ln_f", x) @ w["lm_head.weight"].T
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    return -log_probs.gather(-1, targets[..., None]).mean()


SHAPE_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")


def trained_model(steps: int = 2, **changes: object) -> TrainState:
    state = build(tiny(**changes), torch.device("cpu"), torch.float32, compile=False)
    idx = torch.arange(16).repeat(4, 1)
    for _ in range(steps):
        train_step(state, [(idx, idx), (idx, idx)], 1e-2)
    return state


def held_by_nanogpt(state: TrainState, prefix: str = "") -> dict[str, Any]:
    return {
        "model": OrderedDict((prefix + name, value) for name, value in state.model.state_dict().items()),
        "optimizer": state.optimizer.state_dict(),
        "model_args": {key: getattr(state.config, key) for key in (*SHAPE_KEYS, "dropout")},
        "iter_num": 2,
        "best_val_loss": torch.tensor(3.25),
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True, "wandb_log": False},
    }


def write_ckpt(path: Path, held: Any) -> Path:
    torch.save(held, path)
    return path

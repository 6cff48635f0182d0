"""The knobs that a training step's memory and time hang on: what a cached measurement of it is named by."""

from typing import Any

from foretrain.config.options import RunConfig, knobs

# All others are in it, new ones too, so that nothing is ever mistaken for a measurement of something else.
_ELSE_GROUPS = {"run", "cost", "data"}
_ELSE = {
    "learning_rate", "max_iters", "weight_decay", "beta1", "beta2", "decay_lr", "warmup_iters", "lr_decay_iters",
    "min_lr", "eval_interval", "eval_iters", "eval_sequences", "eval_only", "total_batch_size", "auto_batch_size",
}  # fmt: skip


def step_knobs(config: RunConfig) -> dict[str, Any]:
    """Their names and values."""
    names = (knob.name for knob in knobs() if knob.group not in _ELSE_GROUPS and knob.name not in _ELSE)
    return {name: getattr(config, name) for name in names}

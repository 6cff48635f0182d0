"""What each knob does when a stopped run is resumed with another value of it: free, warns or refuses. No torch.

What decides what is learned refuses, and so does every knob that is not named here. The table of all
is in docs/reliability.md, made from this.
"""

from typing import Literal

# How steps are carried out: the same training, but sums may be taken in another order, so not the same bits.
ROUNDING = frozenset({
    "device", "compile", "compile_mode", "compile_blocks", "attention", "cpu_threads", "activation_memory_budget",
    "auto_chunker", "loss_chunk_size", "activation_checkpointing", "checkpointed_blocks", "recompute_norm_gelu",
    "optimizer_offload", "batch_size", "gradient_accumulation_steps",
})  # fmt: skip
# What is evaluated: training is not moved, but later losses are not of the same sequences as earlier ones.
EVALUATION = frozenset({"eval_iters", "eval_sequences", "eval_batch_size", "eval_block_size"})
FREE = frozenset({
    "out_dir", "log_interval", "keep_checkpoints", "always_save_checkpoint", "memory_limit", "price_per_kwh",
    "price_per_hour", "co2_per_kwh", "currency", "dataset_tokens", "wandb_log", "wandb_project", "wandb_run_name",
    "backend", "init_from", "init_optimizer", "max_iters", "eval_interval", "eval_only", "total_batch_size",
    "auto_batch_size", "allocator_settings", "on_nonfinite", "verify_data", "torch_version",
})  # fmt: skip
SPLIT = ("batch_size", "gradient_accumulation_steps")  # only their product decides what is learned

Effect = Literal["free", "warns", "refuses"]


def effect_of(key: str) -> Effect:
    """What another value of a knob does to a resume."""
    if key in FREE:
        return "free"
    return "warns" if key in ROUNDING | EVALUATION else "refuses"


def decides(key: str) -> bool:
    """Whether a knob by itself decides what is learned."""
    return effect_of(key) == "refuses"

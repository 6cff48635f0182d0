"""What a resumed run may change: how it is carried out and watched, never what is learned."""

import hashlib

from foretrain.batchsplit import sequences_of
from foretrain.config import RunConfig
from foretrain.errors import UserError
from foretrain.lm.dataset import DatasetInfo
from foretrain.run.checkpoint import Progress
from foretrain.run.store import RunDirectory

# Keys that may differ between a stopped run and its resumption: what is learned is the same, to the order of sums.
FREE_KEYS = {
    "out_dir", "log_interval", "keep_checkpoints", "always_save_checkpoint", "memory_limit", "price_per_kwh",
    "price_per_hour", "co2_per_kwh", "currency", "dataset_tokens", "wandb_log", "wandb_project", "wandb_run_name",
    "backend", "init_from", "init_optimizer", "max_iters",
    "eval_interval", "eval_iters", "eval_batch_size", "eval_block_size", "eval_sequences", "eval_only", "compile",
    "device", "verify_data", "total_batch_size", "auto_batch_size",
    "attention", "cpu_threads", "compile_mode", "compile_blocks", "allocator_settings",
    "activation_checkpointing", "checkpointed_blocks", "recompute_norm_gelu", "activation_memory_budget",
    "loss_chunk_size", "auto_chunker", "optimizer_offload",
}  # fmt: skip
SPLIT = ("batch_size", "gradient_accumulation_steps")  # only their product decides what is learned


def config_digest(config: RunConfig) -> str:
    """A hash of every knob that decides what is learned; how a step is cut into micro-batches does not."""
    values = {key: value for key, value in config.model_dump().items() if key not in FREE_KEYS.union(SPLIT)}
    values["sequences"] = sequences_of(config)
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def keep_origin(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """A run goes on from where it once started, which init_from = resume does not say. Raises UserError."""
    keys, before = ("init_from", "init_optimizer"), directory.read_record().config
    if config.init_from == "resume":
        return config.model_copy(update={key: getattr(before, key) for key in keys})
    if (config.init_from, before.init_from) != ("scratch", "resume"):  # which are the same
        changed = [f"{key}: {_change(key, before, config)}" for key in keys if _change(key, before, config)]
        if changed:
            raise UserError("usage.resume_changed", path=str(directory.path), changed=changed)
    return config


def _change(key: str, old: RunConfig, new: RunConfig) -> str:
    """'before → now', or nothing where they are the same."""
    before, now = getattr(old, key), getattr(new, key)
    return "" if before == now else f"{before} → {now}"


def check_compatible(progress: Progress, config: RunConfig, info: DatasetInfo, directory: RunDirectory) -> None:
    """Raise UserError where a checkpoint belongs to another model, data order or dataset."""
    if progress.config_digest != config_digest(config):
        old = directory.read_record().config
        keys = [key for key in RunConfig.model_fields if key not in FREE_KEYS.union(SPLIT)]
        changed = [f"{key}: {change}" for key in keys if (change := _change(key, old, config))]
        if sequences_of(old) != sequences_of(config):
            changed.append(f"{' x '.join(SPLIT)}: {sequences_of(old)} → {sequences_of(config)}")
        raise UserError("usage.resume_changed", path=str(directory.path), changed=changed)
    if progress.dataset_fingerprint != info.fingerprint:
        raise UserError("data.changed", path=info.path)

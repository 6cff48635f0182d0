"""Rules made of the techniques of model/techniques.py, and of what the allocator and the compiler can be told."""

from collections.abc import Sequence

from foretrain.advice.rules.base import Change, Rule, State, technique

CHUNKS = (4096, 2048, 1024, 512, 256)
LEAST_FOR_TRITON = (7, 0)  # triton-lang/triton: Volta and later


def chunked_loss(state: State) -> Sequence[Change]:
    """Smaller and smaller chunks, below what is there at one time now."""
    c = state.effective
    now = c.loss_chunk_size or max(c.batch_size * c.block_size, c.eval_batch * c.eval_block)
    if c.auto_chunker and c.compile:
        return []
    return [Change({"loss_chunk_size": n}) for n in CHUNKS if n < now]


def chunked_loss_idle(state: State) -> str:
    """Why there is nothing to cut."""
    c = state.effective
    return "already_on" if c.loss_chunk_size or c.auto_chunker else "too_small"


def expandable(state: State) -> Sequence[Change]:
    """The allocator's setting; nanoGPT takes it from the environment."""
    on = "expandable_segments:true" in state.config.allocator_settings.lower()
    if on or state.gpu.kind != "cuda":
        return []
    others = [part for part in state.config.allocator_settings.split(",") if part and "expandable" not in part]
    return [Change({"allocator_settings": ",".join([*others, "expandable_segments:True"])})]


def recompute_norm_gelu(state: State) -> Sequence[Change]:
    """Where the blocks keep them."""
    c = state.effective
    if c.recompute_norm_gelu or c.recipe != "nanogpt" or c.checkpointed == c.n_layer:
        return []
    return [Change(dict(technique("recompute_norm_gelu").knobs))]


def recompute_idle(state: State) -> str:
    """Why there is nothing to compute again."""
    c = state.effective
    return "recipe" if c.recipe != "nanogpt" else "already_on"


def checkpointing(state: State) -> Sequence[Change]:
    """More and more of the first blocks, then all of them."""
    c = state.effective
    some = range(max(1, c.checkpointed + 1), c.n_layer) if c.checkpointed < c.n_layer else ()
    found = [Change({"activation_checkpointing": True, "checkpointed_blocks": k}) for k in some]
    if c.checkpointed == c.n_layer:
        return []
    every = {"activation_checkpointing": True, "checkpointed_blocks": 0, "recompute_norm_gelu": False}
    return [*found, Change(every)]


def compile_on(state: State) -> Sequence[Change]:
    """On cards that Triton has kernels for."""
    able = state.gpu.kind == "cuda" and state.gpu.capability >= LEAST_FOR_TRITON
    return [Change({"compile": True})] if able and not state.config.compile else []


def compile_idle(state: State) -> str:
    """Why it is not compiled."""
    if state.config.compile:
        return "already_on"
    return "old_card" if state.gpu.kind == "cuda" else ""


def master_weights(state: State) -> Sequence[Change]:
    """In half precision only."""
    c = state.effective
    if c.master_weights or not state.half or (c.auto_chunker and c.compile):
        return []
    return [Change(dict(technique("master_weights").knobs))]


def master_idle(state: State) -> str:
    """Why there are no masters to have."""
    return "already_on" if state.effective.master_weights else "" if state.half else "float32"


def half_precision(state: State) -> Sequence[Change]:
    """bfloat16 where the card has it, else float16; on a CPU nothing is said, as a run measures it there."""
    if state.dtype != "float32" or state.gpu.kind != "cuda" or state.gpu.capability < (7, 0):
        return []
    return [Change({"dtype": "bfloat16" if state.gpu.supports_bf16 else "float16"})]


def half_idle(state: State) -> str:
    """Why it is half precision already, or cannot be."""
    return "already_on" if state.dtype != "float32" else "old_card" if state.gpu.kind == "cuda" else ""


def right_half(state: State) -> Sequence[Change]:
    """float16 where bfloat16 was asked for and the card has no units for it."""
    wrong = state.gpu.kind == "cuda" and state.config.dtype == "bfloat16" and not state.gpu.supports_bf16
    return [Change({"dtype": "float16"})] if wrong else []


def adamw8bit(state: State) -> Sequence[Change]:
    """Unless it is the optimizer."""
    return [] if state.effective.optimizer == "adamw8bit" else [Change(dict(technique("adamw8bit").knobs))]


def muon(state: State) -> Sequence[Change]:
    """Instead of AdamW; whoever chose 8 bits has fewer."""
    return [] if state.effective.optimizer != "adamw" else [Change(dict(technique("muon").knobs))]


def offload(state: State) -> Sequence[Change]:
    """On a card."""
    if state.effective.optimizer_offload or state.gpu.kind == "cpu":
        return []
    return [Change(dict(technique("optimizer_offload").knobs))]


def offload_idle(state: State) -> str:
    """Why the states stay."""
    return "on_cpu" if state.gpu.kind == "cpu" else "already_on"


def inductor_budget(state: State) -> Sequence[Change]:
    """For compiled runs."""
    c = state.effective
    return [Change({"activation_memory_budget": 0.7})] if c.compile and c.activation_memory_budget == 1 else []


def auto_chunker(state: State) -> Sequence[Change]:
    """For compiled runs whose loss is not cut."""
    c = state.effective
    if not c.compile or c.auto_chunker or c.loss_chunk_size or c.master_weights:
        return []
    return [Change(dict(technique("auto_chunker").knobs))]


def already_on(state: State) -> str:
    """For rules that have nothing to change only where they are on."""
    return "already_on"


RULES = (
    Rule(
        "chunked_loss", "memory", "exact", technique("chunked_loss").source, chunked_loss, chunked_loss_idle,
        ("chunked_loss",), ours=True,
    ),
    Rule(
        "auto_chunker", "memory", "exact", technique("auto_chunker").source, auto_chunker, techniques=("auto_chunker",),
        ours=True, traced=True,
    ),
    Rule(
        "expandable_segments", "memory", "exact", "pytorch/pytorch docs/source/notes/cuda.rst; docs/memory.md",
        expandable,
    ),
    Rule(
        "recompute_norm_gelu", "memory", "exact", technique("recompute_norm_gelu").source, recompute_norm_gelu,
        recompute_idle, ("recompute_norm_gelu",), ours=True,
    ),
    Rule(
        "compile", "both", "rounding", "pytorch.org/docs/stable/torch.compiler.html; docs/memory.md", compile_on,
        compile_idle, redraws=True,
    ),
    Rule(
        "half_precision", "both", "rounding", "Micikevicius et al. 2017, arXiv:1710.03740", half_precision, half_idle,
    ),
    Rule("right_half", "speed", "rounding", "foretrain gpus; NVIDIA's architecture whitepapers", right_half),
    Rule(
        "master_weights", "both", "rounding", technique("master_weights").source, master_weights, master_idle,
        ("master_weights",), ours=True,
    ),
    Rule(
        "checkpointing", "memory", "exact", technique("activation_checkpointing").source, checkpointing, already_on,
        ("activation_checkpointing", "checkpointed_blocks"), ours=True,
    ),
    Rule(
        "activation_memory_budget", "memory", "exact", technique("activation_memory_budget").source, inductor_budget,
        techniques=("activation_memory_budget",), ours=True, traced=True,
    ),
    Rule(
        "adamw8bit", "memory", "other optimizer", technique("adamw8bit").source, adamw8bit, already_on, ("adamw8bit",),
        ours=True,
    ),
    Rule("muon", "memory", "other optimizer", technique("muon").source, muon, techniques=("muon",), ours=True),
    Rule(
        "optimizer_offload", "memory", "exact", technique("optimizer_offload").source, offload, offload_idle,
        ("optimizer_offload",), ours=True,
    ),
)  # fmt: skip

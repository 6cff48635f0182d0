"""Which of unsloth's functions a run has (unsloth and unsloth_zoo 2026.10.9, models/loader.py, models/llama.py). No
torch.

Families that FastLanguageModel has code for get functions of its own, with adapters alone: a full fine-tuning goes to
FastModel, which compiles transformers' blocks and has the loss in common.
"""

from typing import NamedTuple

VERSION = "2026.10.9"


class Unsloth(NamedTuple):
    """Where unsloth's functions stand. `blocks`: norms and rotary positions; `in_place`: a norm's gradient takes the
    place of the one that comes; `lora`: groups of layers whose adapters run in one function; `loss`: head and loss
    together, a few tokens at a time."""

    blocks: bool = True
    in_place: bool = True
    lora: tuple[str, ...] = ("qkv", "out", "mlp")
    loss: bool = True


# Gemma 2 has them, too, but compiles its attention, for which there is no stand-in.
FAMILIES: dict[str, Unsloth] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Unsloth()), "gemma": Unsloth(in_place=False),
}  # fmt: skip
OF_LORA = {"qkv": "LoRA_QKV", "out": "LoRA_W", "mlp": "LoRA_MLP"}
ROLES = {"qkv": ("q", "k", "v"), "out": ("out",), "mlp": ("gate", "up", "down")}  # layers of a group
LEAST_OFFLOADED_BYTES = 2 << 20  # of a block's input (gradient_checkpointing.py, MINIMUM_SIZE)
FIRST_TABLE, MORE_ROWS = 4 * 8192, 8192  # of rotary positions (LlamaRotaryEmbedding)


def unsloth_of(model_type: str, dtype: str, *, adapters: bool) -> Unsloth | None:
    """The functions of a family with weights in this dtype; None where it gets none. Those of layers with adapters
    take 16 bits alone."""
    found = FAMILIES.get(model_type)
    if found is not None and not adapters:
        return Unsloth(blocks=False, lora=())
    return found._replace(lora=()) if found is not None and dtype == "float32" else found


def table_rows(max_positions: int, seq_len: int) -> int:
    """For how many positions cosines and sines are kept."""
    return max(min(FIRST_TABLE, max_positions), min(-(-seq_len // MORE_ROWS) * MORE_ROWS, max(max_positions, seq_len)))


def functions_of(own: Unsloth, model_type: str, groups: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the functions that a run has, as unsloth calls them; `groups`: of layers that run together."""
    positions = "Fast_QK_Norm_RoPE" if model_type == "qwen3" else "Fast_RoPE_Embedding_QK_Positions"
    blocks = ("Fast_RMS_Layernorm", positions) if own.blocks else ()
    loss = ("fused_linear_cross_entropy",) if own.loss else ()
    return (*blocks, *(OF_LORA[group] for group in groups), *loss)

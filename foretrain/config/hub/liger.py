"""Which of Liger's kernels a family gets (linkedin/Liger-Kernel 0.8.2, transformers/monkey_patch.py). No torch.

The Trainer patches a model that is there (`_apply_liger_kernel_to_instance`): norms of heads that its list of modules
leaves out stay as they are. axolotl and LLaMA-Factory patch the classes before the model is made.
"""

from typing import Literal, NamedTuple

VERSION = "0.8.2"
BEFORE_THE_MODEL = ("axolotl", "llama-factory")  # loops that patch classes
WITHOUT = ("torchtune", "unsloth")  # loops with models and kernels of their own

Loss = Literal["fused", "cross_entropy", ""]  # head and loss together, the loss alone, transformers' own


class Liger(NamedTuple):
    """The kernels of a model beside rotary positions and gated MLPs, which every family gets. `in_place`: a norm's
    gradient takes the place of the one that comes; `heads`: norms of queries and keys are replaced, too."""

    loss: Loss = "fused"
    in_place: bool = True
    last_in_place: bool = True  # of the norm before the head
    heads: bool = False


# Families of ours; Gemma 2 and 3 and OLMo 2 and 3 have a norm whose gradient the residual stream reads, too.
FAMILIES: dict[str, Liger] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma"), Liger()),
    "gemma2": Liger(in_place=False, last_in_place=False),
    **dict.fromkeys(("gemma3_text", "gemma3"), Liger(in_place=False, last_in_place=False, heads=True)),
    **dict.fromkeys(("olmo2", "olmo3"), Liger(in_place=False)),
    "granite": Liger(loss="cross_entropy"),  # it scales its logits, which the fused loss does not know
}


UNKNOWN = ("mixtral", "qwen3_moe")  # whose experts Liger replaces by kernels that have no stand-in here

NAMES = {  # of what stands for which
    "": (), "fused": ("LigerFusedLinearCrossEntropyFunction",), "cross_entropy": ("LigerCrossEntropyFunction",),
}  # fmt: skip


def kernels_of(own: Liger, activation: str) -> tuple[str, ...]:
    """The names of the functions that a run has, as Liger calls them."""
    product = "LigerSiLUMulFunction" if activation == "silu" else "LigerGELUMulFunction"
    return ("LigerRMSNormFunction", product, "LigerRopeFunction", *NAMES[own.loss])


def liger_of(model_type: str, loop: str) -> Liger | None:
    """The kernels of a family in a trainer's loop; None where it gets none. TRL 1.16 leaves out the fused loss: it has
    one of its own."""
    found = FAMILIES.get(model_type)
    if found is None or loop in WITHOUT:
        return None
    if loop in BEFORE_THE_MODEL:
        found = found._replace(heads=True, last_in_place=found.in_place)
    return found._replace(loss="") if loop == "trl" else found

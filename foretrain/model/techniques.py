"""The techniques that make a run smaller or faster, one record each: the knobs that switch it on, what it saves, what
it costs, whether the learning stays the same, and where it is from. No torch.

A test holds every entry to its word (tests/test_techniques.py): on its reference config the traced peak falls, losses
are unchanged where it claims exactness, and it works with every other one that it does not name as its opposite.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from foretrain.config.options import RunConfig

Exactness = Literal["exact", "rounding", "other optimizer"]


@dataclass(frozen=True)
class Technique:
    """`knobs` switch it on. `exact`: the same sums, perhaps in another order; `rounding`: other half-precision rounding
    of the same maths; `other optimizer`: other updates. `reference`: knobs of the config that the contract test traces.
    """

    id: str
    knobs: dict[str, Any]
    saves: str
    costs: str
    exactness: Exactness
    source: str
    reference: dict[str, Any] = field(default_factory=dict)
    needs_compile: bool = False
    not_with: tuple[str, ...] = ()

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with the technique switched on."""
        return config.model_copy(update=self.knobs)


TECHNIQUES = (
    Technique(
        "chunked_loss", {"loss_chunk_size": 512},
        saves="all logits of a micro-batch except those of one chunk: 2 to 10 bytes per token and vocabulary entry",
        costs="the head's gradients are computed in the forward pass and saved for backward; a few percent of the step",
        exactness="exact", source="Wijmans et al. 2024, arXiv:2411.09009; our own autograd function",
        not_with=("auto_chunker",),
    ),
    Technique(
        "auto_chunker", {"auto_chunker": True},
        saves="the same as chunked_loss, if Inductor finds the head's pattern", costs="longer compilation",
        exactness="exact", source="pytorch/pytorch pull request 136702", needs_compile=True,
        not_with=("chunked_loss", "master_weights"),
    ),
    Technique(
        "master_weights", {"master_weights": True},
        saves="half of the residual stream and of the norms' saved tensors, and the weight copies of each forward pass",
        costs="2 bytes per parameter; without chunked_loss the logits are cast to fp32",
        exactness="rounding", source="Micikevicius et al. 2017, arXiv:1710.03740, section 3.1",
        reference={"loss_chunk_size": 512}, not_with=("auto_chunker",),
    ),
    Technique(
        "activation_checkpointing", {"activation_checkpointing": True},
        saves="all activations of a block except its input",
        costs="every block's forward pass is recomputed: about a third more time",
        exactness="exact", source="Chen et al. 2016, arXiv:1604.06174", not_with=("recompute_norm_gelu",),
    ),
    Technique(
        "checkpointed_blocks", {"activation_checkpointing": True, "checkpointed_blocks": 1},
        saves="the same for the first blocks only; the activations of the last ones are needed right away",
        costs="the forward pass of these blocks is recomputed", exactness="exact",
        source="Chen et al. 2016, arXiv:1604.06174",
        not_with=("activation_checkpointing",),
    ),
    Technique(
        "recompute_norm_gelu", {"recompute_norm_gelu": True},
        saves="the outputs of both norms and of GELU: a third of a block's activations",
        costs="a few percent; no matmul is recomputed", exactness="exact",
        source="llm.c's recompute of GELU and LayerNorm; Korthikanti et al. 2022, arXiv:2205.05198",
        not_with=("activation_checkpointing",),
    ),
    Technique(
        "activation_memory_budget", {"activation_memory_budget": 0.5},
        saves="what Inductor's partitioner finds cheapest to recompute; below 0.5 the peak can rise, so measure",
        costs="about a tenth of the step at 0.7", exactness="exact",
        source="torch._functorch.config.activation_memory_budget", needs_compile=True,
    ),
    Technique(
        "adamw8bit", {"optimizer": "adamw8bit"},
        saves="three quarters of the optimizer's states", costs="the moments are rounded differently",
        exactness="other optimizer", source="Dettmers et al. 2021, arXiv:2110.02861", not_with=("muon",),
    ),
    Technique(
        "muon", {"optimizer": "muon"},
        saves="one of the two moments of the blocks' matrices", costs="Newton-Schulz iterations each step",
        exactness="other optimizer", source="Jordan 2024, https://kellerjordan.github.io/posts/muon",
        not_with=("adamw8bit",),
    ),
    Technique(
        "optimizer_offload", {"optimizer_offload": True},
        saves="all optimizer states, and the fp32 masters if there are any",
        costs="each step moves the gradients to host memory and the weights back: the last resort",
        exactness="exact", source="Ren et al. 2021, arXiv:2101.06840",
    ),
)  # fmt: skip


def combinable(a: Technique, b: Technique) -> bool:
    """Whether two techniques can be switched on together."""
    return b.id not in a.not_with and a.id not in b.not_with

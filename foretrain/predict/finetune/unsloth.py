"""What unsloth holds on the card beside the model, once a run has begun. No torch.

unsloth/models/llama.py: tables of rotary positions for as many tokens as a model is loaded for (LlamaRotaryEmbedding).
unsloth/kernels/utils.py: the place in which 4-bit weights become whole (_scratch); layers that used a smaller one hold
it until they run again. unsloth_zoo/gradient_checkpointing.py: where what was offloaded comes back to, a second such
place from the second pass on (initialize_unsloth_gradient_checkpointing).
"""

from typing import Any

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import (
    LEAST_OFFLOADED_BYTES,
    ROLES,
    UNSLOTH_VERSION,
    ModelFacts,
    functions_of,
    table_rows,
)
from foretrain.predict.finetune.program import Program
from foretrain.predict.finetune.targets import adapted_roles
from foretrain.predict.timeline import Tensor, Timeline


class Places:
    """They come to life before the first passes. `alloc`: as Outside has it."""

    def __init__(self, program: Program, t: Timeline, alloc: Any) -> None:
        self.program, self.t, self.alloc = program, t, alloc
        self.passes = 0
        self.passing: list[Tensor] = []

    def before_a_pass(self) -> None:
        """Call it before each forward and backward pass of a training step."""
        own = self.program.unsloth
        if own is None or self.passes > 1:
            return
        before, self.passing = self.passing, []
        if not self.passes and own.blocks:
            self._tables()
            self._shared()
        if self.program.tune.offloads:
            self._staging()
        self.t.free(*before)
        self.passes += 1

    def _tables(self) -> None:
        facts, itemsize = self.program.facts, self.program.dtype.itemsize
        if facts.positions == "rotary":
            rows = table_rows(facts.max_positions, self.program.tune.seq_len)
            for _ in range(2):
                self.alloc("buffers", itemsize * rows * facts.head_dim)

    def _shared(self) -> None:
        """As large as the largest weight; the smaller ones that it took the place of stay for the first pass."""
        largest: list[int] = []
        for n_out, n_in in self.program.shared:
            if not largest or n_out * n_in > largest[-1]:
                largest.append(n_out * n_in)
        made = [self.alloc("buffers", self.program.dtype.itemsize * elements) for elements in largest]
        self.passing += made[:-1]

    def _staging(self) -> None:
        nbytes = self.t.size(self.program.residual_bytes, "B", "T", "C").nbytes
        if nbytes <= LEAST_OFFLOADED_BYTES:
            return
        self.alloc("buffers", nbytes, f"{self.program.residual_bytes}·B·T·C")
        if not self.passes:
            self.passing.append(self.alloc("buffers", LEAST_OFFLOADED_BYTES))


def notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """Which of unsloth's functions the figures are with, by stand-ins."""
    own = facts.unsloth_functions(tune.dtype, adapters=tune.adapters)
    if own is None:
        return [Note(id="finetune_unsloth_none", values={"version": UNSLOTH_VERSION, "what": facts.model_type})]
    adapted = adapted_roles(facts, tune)
    biased = {"qkv": facts.qkv_bias, "out": facts.out_bias, "mlp": facts.mlp_bias}
    groups = tuple(
        group for group in own.lora if adapted.issuperset(ROLES[group]) and not biased[group] and tune.method != "dora"
    )
    functions = ", ".join(functions_of(own, facts.model_type, groups))
    found = [Note(id="finetune_unsloth", values={"version": UNSLOTH_VERSION, "functions": functions})]
    if not tune.adapters:
        found.append(Note(id="finetune_unsloth_full", values={}))
    elif len(groups) < len(ROLES):
        found.append(Note(id="finetune_unsloth_peft", values={}))
    return [*found, *([Note(id="finetune_unsloth_host", values={})] if tune.offloads else [])]

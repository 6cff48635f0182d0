"""Micro-batches of a model that transformers' Trainer compiles: its code traced into a graph, cut in two. No torch.

`torch_compile` compiles the model with its loss, and no evaluation: accelerate compiles what a training step calls.
While a model is traced, transformers makes the causal mask (masking_utils.py, _ignore_causal_mask_sdpa), so attention
has one, and keys and values are repeated for their queries.
"""

from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.abstract.passage import Recorder
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import Compiler
from foretrain.predict.compiled.halves import recorded
from foretrain.predict.compiled.step import LOADER
from foretrain.predict.compiled.timing import first_walk
from foretrain.predict.estimate.kernel_buffers import efficient_backward_bytes
from foretrain.predict.finetune.program import Program
from foretrain.predict.timeline import Tensor, Timeline


def is_known(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> bool:
    """Whether the memory of a compiled run is estimated: that of plain code in the Trainer's loop. It is not with
    functions of bitsandbytes or Liger, mixtures of experts, masks of padding or windows, adapters in checkpoints."""
    plain = tune.method in ("full", "lora") and tune.loop == "trainer" and tune.attn == "sdpa"
    plain = plain and not tune.liger and not tune.unsloth
    masked = tune.padded or tune.packing or facts.sliding_layers or facts.attention_softcap
    again = tune.gradient_checkpointing and (tune.adapters or tune.reentrant)
    return gpu.kind == "cuda" and plain and not masked and not again and not facts.n_expert


def program_of(facts: ModelFacts, tune: FineTune, attention: Any, gpu: Gpu) -> Program:
    """The program of a run's memory."""
    kind = CompiledProgram if tune.compile and is_known(facts, tune, gpu) else Program
    return kind(facts, tune, attention, gpu)


class CompiledProgram(Program):
    """A model whose training passes are compiled. All of its layers are run."""

    def __init__(self, facts: ModelFacts, tune: FineTune, attention: Any, gpu: Gpu) -> None:
        super().__init__(facts, tune, attention, gpu)
        self.run = (facts.n_layer,)

    def sizes(self, symbols: dict[str, int]) -> dict[str, int]:
        """With what the kernel of attention takes that runs with a mask: the memory-efficient one, where there is no
        cuDNN."""
        if self.attention(True) == "cudnn":
            return symbols
        s, half = symbols, (self.low or self.dtype).itemsize == 2
        inside = efficient_backward_bytes(s["B"], s["H"], s["T"], s["D"], half=half)
        return {**symbols, "flash": sum(inside), "split": 0}

    def first_pass(self, t: Timeline, there: int) -> list[Tensor]:
        """Writes the first micro-batch, whose kernels are timed where they can run in several ways. Returns its
        gradients. `there`: how many workspaces cuBLAS has."""
        structure = self.structure(t.symbols, train=True)
        return first_walk(t, structure.sized(t), structure, there, cuda=self.cuda).backward()

    def _recorded(self, symbols: dict[str, int], *, train: bool, first: bool) -> Recorder:
        if not train:
            return super()._recorded(symbols, train=train, first=first)
        model = self._built(self.run[0], LOADER, masked=True)
        machine = Compiler(cuda=self.cuda, low=self.low, attention=self.attention, functional=operations)
        machine.card = self.card
        return recorded(machine, symbols, model, self._forward)

    def _forward(self, model: Any, idx: Any, labels: Any) -> tuple[Any, Any]:
        logits = model.logits(idx)
        loss = LOADER.load("foretrain.model.hub.decoder").causal_loss(logits, labels)
        return loss, operations.to_float(logits) if self.low else logits  # accelerate's convert_outputs_to_fp32

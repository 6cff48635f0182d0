"""The program that writes the passes of a step: eager, compiled as one, or, where ranks share it, block by block."""

from foretrain.model.shape import ModelShape
from foretrain.predict.abstract.fully_shard import passes_of
from foretrain.predict.abstract.ranks import Alone, Sends, Updates
from foretrain.predict.abstract.step import EagerProgram
from foretrain.predict.abstract.tensors import bfloat16, float16
from foretrain.predict.compiled.blocks import BlocksProgram
from foretrain.predict.compiled.step import CompiledProgram
from foretrain.predict.spec import StepSpec
from foretrain.predict.timeline import Timeline

LOWS = {"float16": float16, "bfloat16": bfloat16}


def program_of(spec: StepSpec, t: Timeline) -> EagerProgram:
    """The one of a step, which writes into `t`."""
    blocks = spec.sharing is not None or spec.config.compiles_blocks  # as model/step.py compiles it
    compiled = BlocksProgram if blocks else CompiledProgram
    program = compiled if spec.compiled else EagerProgram
    return program(t, spec.variant, spec.config, LOWS.get(spec.dtype), ranks=_passes(spec))


def _passes(spec: StepSpec) -> Alone:
    if spec.offloads and spec.config.gradient_offload:
        return Sends()
    if spec.updates_in_backward:
        return Updates()
    return passes_of(spec.sharing, [p.shape for p in ModelShape.of(spec.config).parameters()], half=spec.half)

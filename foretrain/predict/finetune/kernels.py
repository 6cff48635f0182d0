"""The kernels that a training pass of a fine-tuning run launches. No torch."""

from collections.abc import Iterator

from foretrain.predict.abstract.dims import Kernel
from foretrain.predict.abstract.fusion import fused
from foretrain.predict.abstract.passage import OUTSIDE, copies_of
from foretrain.predict.finetune.program import Program


def kernels_of(program: Program, symbols: dict[str, int], *, compiled: bool) -> Iterator[tuple[Kernel, int]]:
    """Each kernel, and how often it runs in all layers; `compiled`: as Inductor fuses them."""
    recorder = program.recorder(symbols, train=True)
    found = recorder.kernels
    if compiled:
        found = fused(found, {serial for _, serial, _ in recorder.taken}, 1)
    copies = {OUTSIDE: 1, **{i: len(each) for i, each in enumerate(copies_of((program.facts.n_layer,), program.run))}}
    for kernel in found:
        yield kernel, copies[kernel.layer] * kernel.times

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class CompileBlocks(Technique):
    """One graph of the model holds all gradients in half precision until its end; one per block does not."""

    id = "compile_blocks"
    options: Mapping[str, Any] = {"compile_blocks": True}
    saves = "the half-precision gradients of all blocks at once, and the copies of all weights that autocast makes"
    costs = "no fusion across blocks; compiling takes less time"
    source = "docs.pytorch.org/tutorials/recipes/regional_compilation.html"
    refuses = ((("compile_blocks", "compile"), lambda c: c.compile_blocks and not c.compile, "blocks_without_compile"),)
    needs_compile = True
    place, drop_order, quick = 45, 15, True

    def not_estimated(self, config: RunConfig) -> str:
        return "compile_blocks with auto_chunker" if config.compile_blocks and config.auto_chunker else ""

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        able = c.compile and c.compile_mode == "default" and not c.auto_chunker and gpu.kind == "cuda"
        return [self.options] if able and not c.compile_blocks else []

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "already_on" if c.compile and c.compile_blocks else ""

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{"compile_blocks": False}] if c.compile_blocks else []


TECHNIQUES = (CompileBlocks(),)

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class AutoChunker(Technique):
    id = "auto_chunker"
    options: Mapping[str, Any] = {"auto_chunker": True}
    saves = "the same as chunked_loss, if Inductor finds the head's pattern"
    costs = "longer compilation"
    source = "pytorch/pytorch pull request 136702"
    needs_compile = needs_trace = True
    refuses = (
        (("auto_chunker", "compile"), lambda c: c.auto_chunker and not c.compile, "auto_chunker_without_compile"),
        (("auto_chunker", "loss_chunk_size"), lambda c: c.auto_chunker and c.loss_chunk_size > 0, "two_chunkers"),
        (
            ("auto_chunker", "master_weights"),
            lambda c: c.auto_chunker and c.master_weights,
            "auto_chunker_with_masters",
        ),
    )
    place = 20

    def tell_compiler(self, config: RunConfig) -> None:
        import torch._inductor.config as inductor

        inductor.auto_chunker.enable = config.auto_chunker
        inductor.auto_chunker.amplify_ratio_threshold = 2  # of logits to hidden states and weight; 8 spares few runs

    def not_estimated(self, config: RunConfig) -> str:
        return "auto_chunker" if config.auto_chunker and config.recipe == "modern" else ""

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [] if not c.compile or c.auto_chunker or c.loss_chunk_size or c.master_weights else [self.options]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return ""


TECHNIQUES = (AutoChunker(),)

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.families.family import EXCLUDED, exclude
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


def _sums_or_clips(c: RunConfig) -> bool:
    return c.gradient_accumulation_steps > 1 or c.grad_clip > 0 or c.optimizer != "adamw"


def _at_once(c: RunConfig) -> bool:
    return c.compile and not c.compiles_blocks


class OptimizerInBackward(Technique):
    """Backward updates a parameter and frees its gradient while it makes the next ones (model/in_backward.py)."""

    id = "optimizer_in_backward"
    options: Mapping[str, Any] = {"optimizer_in_backward": True}
    saves = "all gradients but those that the backward pass has just made"
    costs = "some ten small kernels for each parameter; no gradient clipping and no accumulation"
    source = "Lv et al. 2023, arXiv:2306.09782; PyTorch's optimizer_step_in_backward tutorial"
    # Large micro-batches have their peak in activations, before there are gradients.
    reference: Mapping[str, Any] = {"batch_size": 1, "block_size": 32, "n_embd": 512}
    beside: Mapping[str, Any] = {"gradient_accumulation_steps": 1, "grad_clip": 0.0, "compile_blocks": True}
    refuses = (
        (
            ("gradient_accumulation_steps", "grad_clip", "optimizer"),
            lambda c: c.optimizer_in_backward and _sums_or_clips(c),
            "in_backward_step",
        ),
        (("compile", "compile_blocks"), lambda c: c.optimizer_in_backward and _at_once(c), "in_backward_compile"),
        (  # gradients are unscaled when all are there
            ("optimizer_in_backward", "dtype"),
            lambda c: c.optimizer_in_backward and c.dtype == "float16",
            EXCLUDED,
        ),
        exclude("optimizer_in_backward", "cuda_graph"),
        exclude("optimizer_in_backward", "master_weights"),  # the optimizer updates other weights than those that run
        exclude("optimizer_in_backward", "optimizer_offload"),
    )
    place = 48

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        """Require no accumulation, no clipping, and single gradients for parameters."""
        wanted = self.applied(c)
        able = not any(fails(wanted) for _, fails, _ in self.refuses) and (gpu.supports_bf16 or c.dtype != "auto")
        return [self.options] if able and not c.optimizer_in_backward else []

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return "already_on" if c.optimizer_in_backward else ""

    def undone(self, c: RunConfig) -> Sequence[Options]:
        return [{"optimizer_in_backward": False}] if c.optimizer_in_backward else []


TECHNIQUES = (OptimizerInBackward(),)

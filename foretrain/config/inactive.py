"""Knobs that a device or a dtype makes idle: said, never silently ignored. No torch."""

from collections.abc import Iterator

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu


def idle(config: RunConfig, gpu: Gpu, dtype: Dtype) -> Iterator[tuple[str, str]]:
    """(what is set, why it does nothing here)."""
    if config.optimizer_offload and gpu.kind == "cpu":
        yield "optimizer_offload", "the optimizer of a run on the CPU is in the computer's memory already"
    if config.allocator_settings and gpu.kind == "cpu":
        yield "allocator_settings", "they are for CUDA's allocator"
    if config.master_weights and dtype == "float32":
        yield "master_weights", "in float32 the weights are their own masters; set dtype to bfloat16"

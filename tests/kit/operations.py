"""Operations of a step, counted and listed."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import cpu_device
from foretrain.model.step import build
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun

aten = torch.ops.aten


def forward_flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *args: object, **kwargs: object) -> int:
    """FlopCounterMode does not know the CPU's flash attention; its own count for CUDA's is taken."""
    return sdpa_flop_count(q, k, v)


def backward_flops(
    grad: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *args: object, **kwargs: object
) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_flops,
}


def counted(config: RunConfig, dtype: torch.dtype, *, train: bool) -> int:
    state = build(config, torch.device("cpu"), dtype, compile=False)
    state.model.train(train)
    idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter, state.autocast():
        if train:
            state.call(idx, idx).backward()
        else:
            with torch.no_grad():
                state.call(idx, idx)
    return counter.get_total_flops()


def way(config: RunConfig, dtype: str = "float32", *, train: bool = True, compiled: bool = False) -> MicroBatchRun:
    return MicroBatchRun(StepSpec.of(config, cpu_device(), dtype=dtype, compiled=compiled), train)  # type: ignore[arg-type]

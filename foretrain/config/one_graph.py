"""Whether a run replays its optimizer step as one CUDA graph (model/host/graphed.py): said of the config and the card,
so that a plan knows it as the run does.

A card is kept waiting where its kernels take less time than Python takes to launch them. How long Python takes is the
host's: a block of a compiled model in 0.1 ms on a desktop, in 0.7 ms on a slow virtual machine with an H100, where a
graph made 4 x 128 8.5 times and 6 x 384 2.8 times as fast, and 124M no slower (docs/measured.md). So "auto" records
wherever the products of a block are shorter than that on the card's data sheet: a graph that was not needed costs some
memory, one that is missing costs most of the card.
"""

from collections.abc import Mapping
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu

SHORT_BLOCK_S = 0.5e-3  # at the card's peak, which kernels reach half of
# A recorded kernel takes memory outside of PyTorch's (hardware/context.py): at most that of 12 blocks in a step of 40
# micro-batches, some 40 MiB.
MOST_BLOCKS = 480
UNKNOWN_PEAK = 30e12  # FLOP per second of a card whose data sheet nobody has read


def is_one_graph(config: RunConfig, gpu: Gpu, dtype: Dtype) -> bool:
    """Whether a step is one graph, and an evaluation another, on one card of this kind in this dtype."""
    if gpu.kind != "cuda" or config.eval_only or config.cuda_graph == "off":
        return False
    return config.cuda_graph == "on" or (config.is_recordable and _is_short(config, gpu, dtype))


def _is_short(config: RunConfig, gpu: Gpu, dtype: Dtype) -> bool:
    """By the products of a block with its 12 C² weights: 6 FLOP each for a token, forward and backward."""
    flop = 6 * 12 * config.n_embd**2 * config.batch_size * config.block_size
    blocks = config.n_layer * config.gradient_accumulation_steps
    return blocks <= MOST_BLOCKS and flop <= SHORT_BLOCK_S * (gpu.peak_flop_per_s(dtype) or UNKNOWN_PEAK)


def launched(options: Mapping[str, Any]) -> RunConfig:
    """The config of a step that was measured kernel by kernel, unless its options say otherwise. Raises
    ValidationError."""
    return RunConfig.model_validate({"cuda_graph": "off", **options})

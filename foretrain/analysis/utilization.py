"""What share of a card's peak a speed is, by every convention in use, so that two figures can be told apart.

FLOPs of training per token, forward and backward, with nanoGPT's N (all parameters without position embeddings):

    full attention    6·N + 12·L·C·T   PaLM, arXiv:2204.02311, appendix B; what nanoGPT prints
    causal attention  6·N +  6·L·C·T   half of the square is masked and not computed; what llm.c prints
    hardware          + L·(24·C² + 4·C·T) with activation checkpointing: each block's forward pass once more
"""

from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S, Dtype, Gpu
from foretrain.model.shape import ModelShape
from foretrain.predict.spec import choose_dtype

SCHEMA = "foretrain.mfu/1"
CLOCK_HEADROOM = 1.1  # a cool card clocks above the boost clock that its peak is stated for


class Utilization(Record):
    """One speed on one card. Shares of one; None where no source states the peak, or nothing is recomputed.

    `peak_flop_per_s` is dense, with fp32 accumulation. `clock_` figures refer to the peak at `clock_ghz`.
    """

    gpu_name: str
    dtype: Dtype
    step_s: float
    tokens_per_step: int
    tokens_per_s: float
    flops_per_token: int
    causal_flops_per_token: int
    hardware_flops_per_token: int | None
    flop_per_s: float
    peak_flop_per_s: float | None
    peak_source: str
    mfu: float | None
    causal_mfu: float | None
    hfu: float | None
    nanogpt_mfu: float
    clock_ghz: float | None = None
    clock_peak_flop_per_s: float | None = None
    clock_mfu: float | None = None
    clock_hfu: float | None = None

    @property
    def impossible(self) -> bool:
        """More than the card can do, even where masked attention is not counted and the clock is what it was."""
        peak = self.clock_peak_flop_per_s or self.peak_flop_per_s
        return peak is not None and self.tokens_per_s * self.causal_flops_per_token > CLOCK_HEADROOM * peak


def recomputed_flops_per_token(config: RunConfig) -> int:
    """What activation checkpointing computes a second time: the forward pass of checkpointed blocks."""
    return config.checkpointed * ModelShape.of(config).block_forward_flops_per_token


def peak_at_clock(gpu: Gpu, dtype: Dtype, clock_ghz: float) -> float | None:
    """SM × FLOP per clock and SM × clock; None where the catalogue lacks one of them."""
    peak = gpu.peak_flop_per_s(dtype)
    if peak is None:
        return None
    if dtype != "float32":
        per_clock = gpu.fp16_flop_per_clock_per_sm
        return gpu.sm_count * per_clock * clock_ghz * 1e9 if gpu.sm_count and per_clock else None
    stated_ghz = gpu.boost_clock_ghz if gpu.tf32_dense_tflops else gpu.fp32_clock_ghz or gpu.boost_clock_ghz
    return peak * clock_ghz / stated_ghz if stated_ghz else None


def utilization(
    config: RunConfig, gpu: Gpu, step_s: float, *, tokens_per_step: int | None = None, clock_ghz: float | None = None
) -> Utilization:
    """The shares of the card that a step time of this config is. `clock_ghz`: the mean SM clock of the run.

    `tokens_per_step`: where the run is known to have had others than the config says.
    """
    dtype, _ = choose_dtype(config, gpu)
    shape = ModelShape.of(config)
    tokens = tokens_per_step or config.tokens_per_step
    tokens_per_s = tokens / step_s
    full = shape.flops_per_token
    causal = shape.causal_flops_per_token
    hardware = full + recomputed_flops_per_token(config) if config.activation_checkpointing else None
    peak = gpu.peak_flop_per_s(dtype)
    clock_peak = peak_at_clock(gpu, dtype, clock_ghz) if clock_ghz else None

    def share(flops: int | None, of: float | None) -> float | None:
        return tokens_per_s * flops / of if flops and of else None

    return Utilization(
        gpu_name=gpu.name, dtype=dtype, step_s=step_s, tokens_per_step=tokens,
        tokens_per_s=tokens_per_s, flops_per_token=full, causal_flops_per_token=causal,
        hardware_flops_per_token=hardware, flop_per_s=tokens_per_s * full, peak_flop_per_s=peak,
        peak_source=gpu.source, mfu=share(full, peak), causal_mfu=share(causal, peak), hfu=share(hardware, peak),
        nanogpt_mfu=tokens_per_s * full / NANOGPT_PEAK_FLOP_PER_S, clock_ghz=clock_ghz,
        clock_peak_flop_per_s=clock_peak, clock_mfu=share(full, clock_peak), clock_hfu=share(hardware, clock_peak),
    )  # fmt: skip

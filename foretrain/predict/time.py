"""Step time from the catalogue: matrix products at a share of the peak, the rest at a share of the bandwidth.

First version: three terms for a micro-batch (matrix products, attention, memory traffic of everything else), one
for the optimizer, one for launching kernels. The shares are set so that published runs on five cards come out
within the stated range (benchmarks/time_against_logs.py prints them); nothing is measured on the user's card.

Known limits: no shape efficiency or wave quantisation, no clocks under load, no power limits, no data loading; a
CPU's range is wide because its nominal peak is.
"""

from foretrain.config import RunConfig
from foretrain.hardware import Dtype, Gpu
from foretrain.lm.shape import ModelShape
from foretrain.predict.memory import StepName
from foretrain.records import Record

# Share of the dense peak that GPT-2-sized matrix products reach, by FLOP per clock and SM: the more a card does per
# clock, the less of it small matrices can feed (Ada and Ampere GeForce do 512, A10 and L4 1024, A100 2048, H100 4096).
GEMM_SHARE_OF_RATE = {512: 0.80, 1024: 0.70, 2048: 0.50, 4096: 0.45, 8192: 0.40}
GEMM_SHARE_UNKNOWN = 0.60
ATTENTION_SHARE = 0.45  # of the dense peak, flash forward and backward
BANDWIDTH_SHARE = 0.80
CPU_GEMM_SHARE = 0.55  # oneDNN and MKL on small matrices, against the nominal peak
LAUNCH_S = 6e-6  # one eager kernel as Python and the driver launch it
COMPILED_LAUNCH_S = 4e-6
CPU_LAUNCH_S = 5e-6
LOW, HIGH = 0.75, 1.50  # of the expected time on a GPU
CPU_LOW, CPU_HIGH = 0.45, 2.5
COMPILE_S = (15.0, 35.0, 90.0)  # first step with torch.compile; an RTX 4070 logged 32 s


class Range(Record):
    """A figure with its honest range, in seconds."""

    low_s: float
    expected_s: float
    high_s: float

    def scaled(self, factor: float) -> "Range":
        return Range(low_s=self.low_s * factor, expected_s=self.expected_s * factor, high_s=self.high_s * factor)

    def plus(self, other: "Range") -> "Range":
        return Range(
            low_s=self.low_s + other.low_s,
            expected_s=self.expected_s + other.expected_s,
            high_s=self.high_s + other.high_s,
        )


def _traffic_bytes(config: RunConfig, tokens: int, step: StepName, half: bool, compiled: bool, train: bool) -> float:
    """Bytes that everything but the matrix products reads and writes in one micro-batch.

    Per element of B·T·C and layer, counted over the operations of eager.py and inductor.py: LayerNorms, casts,
    GELU and residual additions; per logit: softmax, casts and gradients; per weight: casts and accumulation.
    """
    shape = ModelShape.of(config)
    elements, logits = tokens * shape.n_embd, tokens * shape.vocab_size
    width = 2 if half else 4
    if compiled:
        per_element, per_logit = (34 if train else 12) * width, (4 if train else 2) * width
        if step == "nanogpt" and train:
            per_logit += 2 * width  # the zero tangent, written and read
    else:
        per_element, per_logit = (55 if train else 20) * width, (12 if train else 6) * width
    per_weight = (22 if half else 12) if train else (6 if half else 0)
    return per_element * elements * shape.n_layer + per_logit * logits + per_weight * shape.n_matmul_params


def _gemm_share(gpu: Gpu) -> float:
    if gpu.kind == "cpu":
        return CPU_GEMM_SHARE
    return GEMM_SHARE_OF_RATE.get(gpu.fp16_flop_per_clock_per_sm or 0, GEMM_SHARE_UNKNOWN)


def _kernels(config: RunConfig, compiled: bool, train: bool) -> int:
    per_block = (14 if compiled else 60) if train else (8 if compiled else 18)
    return per_block * config.n_layer + 30


def _micro_batch_s(
    config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, compiled: bool, train: bool
) -> float | None:
    """Expected seconds of one micro-batch; None where the catalogue lacks the card's rates."""
    peak, bandwidth = gpu.peak_flop_per_s(dtype), gpu.bandwidth_bytes_per_s
    if not peak or not bandwidth:
        return None
    shape = ModelShape.of(config)
    batch, block = (
        (config.batch_size, config.block_size)
        if train
        else (config.eval_batch, config.eval_block)
        if step == "foretrain"
        else (config.batch_size, config.block_size)
    )
    tokens = batch * block
    passes = 3 if train else 1
    checkpointed = train and config.activation_checkpointing and step == "foretrain"
    gemm = 2 * shape.n_matmul_params * tokens * passes
    # Causal attention does half of the square; flash's backward pass does 2.5 times its forward.
    attention = 2 * shape.n_layer * shape.n_embd * block * tokens * (3.5 if train else 1)
    if checkpointed:
        gemm += 24 * shape.n_layer * shape.n_embd**2 * tokens
        attention += 2 * shape.n_layer * shape.n_embd * block * tokens
    cpu = gpu.kind == "cpu"
    gemm_s = gemm / (peak * _gemm_share(gpu))
    attention_s = attention / (peak * (CPU_GEMM_SHARE if cpu else ATTENTION_SHARE) * (0.5 if cpu else 1.0))
    traffic = _traffic_bytes(config, tokens, step, dtype != "float32", compiled, train)
    if checkpointed:
        traffic *= 1.25
    traffic_s = traffic / (bandwidth * BANDWIDTH_SHARE)
    launch_s = _kernels(config, compiled, train) * (
        CPU_LAUNCH_S if cpu else COMPILED_LAUNCH_S if compiled else LAUNCH_S
    )
    busy_s = gemm_s + attention_s + traffic_s
    return busy_s + launch_s if cpu else max(busy_s, launch_s)


def _range(expected_s: float, gpu: Gpu) -> Range:
    low, high = (CPU_LOW, CPU_HIGH) if gpu.kind == "cpu" else (LOW, HIGH)
    return Range(low_s=expected_s * low, expected_s=expected_s, high_s=expected_s * high)


def step_time(config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool) -> Range | None:
    """Seconds of one steady optimizer step, all micro-batches; None where the catalogue lacks the card's rates."""
    micro_s = _micro_batch_s(config, gpu, dtype, step, compiled, train=True)
    if micro_s is None or not gpu.bandwidth_bytes_per_s:
        return None
    # Fused AdamW reads weight, gradient and both moments and writes three of them; clipping reads and scales.
    optimizer_s = ModelShape.of(config).n_params * (28 + 12) / (gpu.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
    return _range(config.gradient_accumulation_steps * micro_s + optimizer_s, gpu)


def evaluation_time(config: RunConfig, gpu: Gpu, dtype: Dtype, step: StepName, *, compiled: bool) -> Range | None:
    """Seconds of one evaluation: eval_iters micro-batches of each of two splits."""
    micro_s = _micro_batch_s(config, gpu, dtype, step, compiled, train=False)
    return None if micro_s is None else _range(2 * config.eval_iters * micro_s, gpu)


def compile_time(compiled: bool) -> Range:
    """What the first step takes longer, where the model is compiled."""
    low, expected, high = COMPILE_S if compiled else (0.0, 0.0, 0.0)
    return Range(low_s=low, expected_s=expected, high_s=high)

"""The time of an operation: from the catalogue's peaks, or from `foretrain calibrate`'s measurements here.

Catalogue: a roofline for each operation. A matmul takes the longer of its FLOPs at the share of the peak that its shape
can reach and its bytes at the share of the bandwidth that kernels reach; all else is bytes. Shape: the main loop over k
has a beginning and an end (k / (k + k0)), tiles at the edges are partly empty, and the last wave of tiles leaves SMs
idle. The constants are fitted to published measurements, benchmarks/published_rates.json and those runs of
published_logs.json that may be looked at; benchmarks/time_against_logs.py tests them.

Calibrated: the measured kernels nearest in shape; time.py corrects their sum by a whole step measured on the device.
"""

import math
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from foretrain.config.checks import launched
from foretrain.hardware.calibration import Calibration, KernelTime, StepTime
from foretrain.hardware.catalogue import Dtype, Gpu, MatmulMode
from foretrain.predict.software import ASSUMED, Software
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import (
    MicroBatchRun,
    Operation,
    accumulation,
    micro_batch,
    optimizer_launches,
    tensor_count,
)

# A micro-batch's own: its Python, the batch, hooks, the autograd engine's start (25 to 45 on both machines).
MICRO_BATCH_LAUNCHES = 40
# Python's additional work in a micro-batch, in launches of an eager kernel: around a checkpointed block, whose tensors
# pass hooks three times, and around a separately compiled block, whose guards are checked. Measured on PyTorch's CUDA
# builds of 2.11 and 2.13 without a card (an EPYC): 79 and 81 for an eager checkpointed block, 75 and 130 for a compiled
# one with 8 and 29 for the compiled block itself. A model compiled whole has none.
CHECKPOINT_LAUNCHES, REGION_LAUNCHES = 80, 20
# One operation of `launch_time`'s chain, an elementwise product, is cheaper than a step's average kernel: 2.2 times on
# the EPYC, 1.8 times on the H100's host.
CHAIN_LAUNCHES = 2.0
NARROW = 128  # calibrated steps of models this narrow are bound by launching on any card


# Of a step that is one graph (model/graphed.py): copies of a micro-batch's two tensors; then the rate, the replay, and
# the copies of its results.
COPIES, REPLAY = 2, 8
GAP_S = 1.5e-6  # between a graph's kernels: 1.8 us in 4 x 128 on an H100, with what the host adds


class Launches(NamedTuple):
    micro: int
    sums: int
    optimizer: int


class Host(NamedTuple):
    launch_s: float
    compiled_launch_s: float
    python_s: float


def launches_of(way: MicroBatchRun, operations: list[Operation]) -> Launches:
    """Count the launches of a step; clipping, zeroing and the optimizer go through a list of tensors in Python."""
    if way.spec.is_one_graph:
        return Launches(COPIES, 0, REPLAY)
    micro = (2 if way.train else 1) if way.compiled and way.config.makes_graphs else sum(op.runs for op in operations)
    sums = sum(op.runs for op in accumulation(way)) if way.train else 0
    return Launches(micro, sums, optimizer_launches(way) + tensor_count(way))


def beside_kernels(way: MicroBatchRun) -> int:
    """Return the host's other work in a micro-batch, in launches of an eager kernel."""
    c, whole = way.config, way.compiled and not way.config.compiles_blocks
    if way.spec.is_one_graph or whole:
        return 0
    regions = c.n_layer * REGION_LAUNCHES if way.compiled else 0
    return regions + (c.checkpointed * CHECKPOINT_LAUNCHES if way.train else 0)


def host_of(calibration: Calibration, gpu: Gpu) -> Host:
    """Fit the small steps of a card's calibration; its chain of matmuls alone where it has none of them."""
    narrow = [step for step in calibration.steps if _width(step) <= NARROW]
    eager = sorted((_counted(step, gpu) for step in narrow if not step.compiled), key=lambda found: found.launches)
    if not eager:
        launch_s = calibration.launch_s * CHAIN_LAUNCHES
        return Host(launch_s, launch_s, MICRO_BATCH_LAUNCHES * launch_s)
    few, many = eager[0], eager[-1]
    more = many.launches - few.launches
    launch_s = (many.time_s - few.time_s) / more if more else 0.0
    python_s = (few.time_s - few.launches * launch_s) / few.micro_batches
    if launch_s < calibration.launch_s / CHAIN_LAUNCHES or python_s < 0:  # one depth, or it wavered too much
        launch_s = many.time_s / (many.launches + MICRO_BATCH_LAUNCHES * many.micro_batches)
        python_s = MICRO_BATCH_LAUNCHES * launch_s
    compiled = [_counted(step, gpu) for step in narrow if step.compiled]
    each = [(one.time_s - one.eager * launch_s - one.micro_batches * python_s) / one.compiled for one in compiled]
    return Host(launch_s, max(launch_s / 4, min(each)) if each else launch_s, python_s)


class _Counted(NamedTuple):
    """A timed step, and the host's launches in it: `eager`: in sums of gradients and the optimizer."""

    time_s: float
    micro_batches: int
    eager: int
    compiled: int  # of the micro-batches, compiled or not

    @property
    def launches(self) -> int:
        return self.eager + self.compiled


def _counted(step: StepTime, gpu: Gpu) -> _Counted:
    config = launched(step.options)
    dtype: Any = step.dtype
    way = MicroBatchRun(StepSpec.of(config, gpu, dtype=dtype, compiled=step.compiled))
    found, n = launches_of(way, micro_batch(way)), config.gradient_accumulation_steps
    return _Counted(step.time_s, n, (n - 1) * found.sums + found.optimizer, n * found.micro)


def _width(step: StepTime) -> float:
    width = step.options.get("n_embd", NARROW + 1)
    return width if isinstance(width, int) else NARROW + 1


# By FLOP per clock and SM. GeForce boards run above the clock of their data sheet, so that large matmuls reach its peak
# (RTX 3090: 76 of 71 TFLOP/s, 4090: 165 to 173 of 165); the large data-centre chips run into their power limit (A100:
# 259 to 271 of 312, H100: 762 to 795 of 989).
MATMUL_SHARE = {512: 1.06, 1024: 0.80, 2048: 0.80, 4096: 0.72, 8192: 0.68}
# The faster an SM, the more steps of k it takes until its pipeline is full.
PIPELINE_K = {512: 16, 1024: 64, 2048: 128, 4096: 128, 8192: 256}
TILES = {512: (128, 128), 1024: (128, 128)}
LARGE_TILE = (128, 256)
ATTENTION_SHARE = {512: 0.60, 1024: 0.40, 2048: 0.36, 4096: 0.25, 8192: 0.20}  # of the peak, on the causal half
# Of the same on Hopper, where torch 2.11 takes cuDNN's: 288 and 209 TFLOP/s in steps of GPT-2 124M on an H100.
CUDNN_ATTENTION_SHARE = {"attention": 0.29, "attention_backward": 0.21}
# Elements of the logits per clock and SM, forward: exponentials and comparisons take longer than the bytes. Inductor's
# one pass did 0.67 to 0.76e12 per second on an H100 (three models), eager log_softmax 0.30e12.
ONLINE_SOFTMAX_PER_CLOCK, SOFTMAX_PER_CLOCK = 3.0, 1.2
FLASH1 = 0.5  # of it with the kernel before FlashAttention-2: torch 2.2's release notes, "around 2x"
# Flash kernels need compute capability 8.0; before it torch takes the memory-efficient ones. One card with both,
# forward and backward: 15.0 and 45.0 TFLOP/s at 1,024 tokens (Dao-AILab/flash-attention#416).
MEMORY_EFFICIENT = 0.33
WEIGHT_GRADIENT_SHARE = 0.95  # of another matmul's speed: both factors are read against their layout
UNALIGNED_SHARE = 0.60  # where a dimension is not a multiple of 8, tensor cores need other kernels
# Of the data sheet's: RTX 3090 Ti 860 of 1008 GB/s and A100 1355 of 1555, RTX 4090 918 to 924 of 1008, a card with 1792
# GB/s 1565; the lowest of these where nothing is published.
BANDWIDTH_SHARE = {"Ampere": 0.86, "Ada": 0.91, "Blackwell": 0.87}
LEAST_BANDWIDTH_SHARE = 0.84
# One kernel of a training step as Python, autograd and the driver launch it, on an average host: the geometric
# mean of an EPYC (6 us, and 2 assumed for a driver), an A100's host (25 us: published_rates.json, host_bound_inference)
# and an H100's host (29 us). A compiled kernel costs about the same: 0.8 times as much on the EPYC, 1.2 on the H100's.
LAUNCH_S = 18e-6
# Of a compiled one with torch 2.0: languini-kitchen's nine steps with one row (three models, three cards) took 67 to
# 85 us for each kernel of theirs, whatever the card.
COMPILED_LAUNCH_2_0_S = 76e-6
CPU_LAUNCH_S = 5e-6
PYTHON_S = 0.3e-3  # one micro-batch without a card: its Python, the batch's copy, the scaler
CPU_MATMUL_SHARE = 0.55  # oneDNN and MKL on small matrices, against the nominal peak
CPU_ATTENTION_SHARE = 0.28
# Assumed, not measured: copies from and to pageable memory over PCIe 4.0 x8 or x16, and AdamW on a desktop's memory.
PAGEABLE_BYTES_PER_S, HOST_BYTES_PER_S = 6e9, 20e9
# Chips whose cache has two partitions, each for the SMs beside it, so that data that all SMs read is there twice
# (NVIDIA A100 whitepaper: a partition caches what the SMs that are connected to it access).
TWO_CACHES = ((8, 0), (9, 0))
# Kernels that read data not touched just before: weights, moments and sums of gradients.
COLD = frozenset({"adamw", "accumulate", "clip", "gradient_norm", "fill", "gather", "scatter"})
# Inductor's fused kernels on a card resemble this measured kernel: several tensors read, in whole vectors, which eager
# additions of two dtypes are not (H100: 2.1 to 2.5 TB/s, this one and fused ones 3.0 to 3.2).
FUSED_LIKE = "gelu_backward"
OF_LISTS = frozenset({"adamw", "clip", "gradient_norm"})  # on a card one kernel takes a whole list of tensors
# Weight of each dimension for a kernel's speed: a matmul's (m, n, k), attention's (B, H, T, D).
IMPORTANCE = {3: (1.0, 1.0, 1.0), 4: (0.1, 0.1, 1.0, 1.0)}


class Rates(Protocol):
    def time_s(self, op: Operation) -> float: ...

    def launch_s(self, *, compiled: bool) -> float: ...

    @property
    def python_s(self) -> float: ...


def busy_s(operations: list[Operation], rates: Rates) -> float:
    return sum(op.runs * rates.time_s(op) for op in operations)


def host_time_s(op: Operation) -> float | None:
    rate = {"transfer": PAGEABLE_BYTES_PER_S, "host": HOST_BYTES_PER_S}.get(op.kind)
    return op.nbytes / rate if rate else None


class CatalogueRates:
    def __init__(self, gpu: Gpu, torch: Software = ASSUMED) -> None:
        assert gpu.bandwidth_bytes_per_s
        self.gpu = gpu
        self.torch = torch
        self.cpu = gpu.kind == "cpu"
        self.rate = gpu.fp16_flop_per_clock_per_sm or 1024
        share = BANDWIDTH_SHARE.get(gpu.architecture, LEAST_BANDWIDTH_SHARE)
        self.bandwidth = gpu.bandwidth_bytes_per_s * share

    def time_s(self, op: Operation) -> float:
        elsewhere_s = host_time_s(op)
        if elsewhere_s is not None:
            return elsewhere_s
        bytes_s = (op.nbytes - self.cached_bytes(op)) / self.bandwidth
        if not op.flops:
            return max(bytes_s, self.softmax_s(op))
        peak = self.gpu.matmul_peak_flop_per_s(op.arithmetic, op.dtype)
        peak = peak or self.gpu.peak_flop_per_s("float32")  # cards without fast half precision: cuBLAS widens it
        assert peak
        if op.kind.startswith("attention"):
            share = CPU_ATTENTION_SHARE if self.cpu else self.attention_share(op.kind)
        elif op.dtype == "bfloat16" and not self.gpu.supports_bf16:
            share = 1.0  # its peak is that of large matmuls
        else:
            share = CPU_MATMUL_SHARE if self.cpu else self.matmul_share(op)
        return max(bytes_s, op.causal_flops / (peak * share * self.held_clock(op.dtype)))

    def held_clock(self, dtype: Dtype) -> float:
        """Return the clock under the board's power limit, as a share of that at which such cards run matmuls: power is
        balanced over much longer than a kernel, so it holds for all."""
        share = self.gpu.sustained_share(dtype)
        return min(1.0, share / MATMUL_SHARE.get(self.rate, 0.7)) if share else 1.0

    def cached_bytes(self, op: Operation) -> float:
        """Return a kernel's bytes in the second-level cache: half of it holds written data, half read data."""
        if op.kind in COLD or op.flops or not self.gpu.l2_mib:
            return 0.0
        cache = self.gpu.l2_mib * 2**20 / (2 if self.gpu.capability in TWO_CACHES else 1)
        return op.read_bytes * min(1.0, cache / 2 / op.nbytes)

    def softmax_s(self, op: Operation) -> float:
        peak = self.gpu.peak_flop_per_s("float16")
        if op.kind != "softmax" or op.name != "loss" or self.gpu.kind != "cuda" or not (peak and self.gpu.sm_count):
            return 0.0
        clocks_per_s = peak / self.rate * self.held_clock(op.dtype)  # of all SMs
        return op.shape[0] / clocks_per_s / (SOFTMAX_PER_CLOCK if op.written_bytes else ONLINE_SOFTMAX_PER_CLOCK)

    def attention_share(self, kind: str) -> float:
        if self.gpu.architecture == "Hopper" and self.torch.flash2 and kind in CUDNN_ATTENTION_SHARE:
            return CUDNN_ATTENTION_SHARE[kind]
        share = ATTENTION_SHARE.get(self.rate, 0.4)
        if self.gpu.capability < (8, 0):
            return share * MEMORY_EFFICIENT
        return share if self.torch.flash2 else share * FLASH1

    def matmul_share(self, op: Operation) -> float:
        m, n, k = op.shape
        rate = self.rate
        if op.arithmetic != "dtype":  # as on a card whose tensor cores do that much more a clock
            plain, peak = (self.gpu.matmul_peak_flop_per_s(mode, op.dtype) for mode in ("dtype", op.arithmetic))
            rate *= round(peak / plain) if plain and peak else 1
        tall, wide = TILES.get(rate, LARGE_TILE)
        tiles = math.ceil(m / tall) * math.ceil(n / wide)
        full = max(m * n / (tiles * tall * wide), 1 / 1.5)  # smaller tiles are there for small matrices
        waves = tiles / (self.gpu.sm_count or 100)
        # Half of what whole waves would lose: blocks of two tiles per SM, and k cut where tiles are few.
        idle = (min(math.ceil(waves) / waves, 1 + 1 / waves) - 1) / 2 if waves > 1 else 0.15
        pipeline = PIPELINE_K.get(rate, 64 if rate < 8192 else 256)
        share = MATMUL_SHARE.get(rate, 0.7) * k / (k + pipeline) * full / (1 + idle)
        if op.kind == "matmul_weight":
            share *= WEIGHT_GRADIENT_SHARE
        return share * (UNALIGNED_SHARE if op.dtype != "float32" and (m % 8 or n % 8 or k % 8) else 1.0)

    def launch_s(self, *, compiled: bool) -> float:
        if self.gpu.kind != "cuda":
            return CPU_LAUNCH_S
        return COMPILED_LAUNCH_2_0_S if compiled and not self.torch.fast_launches else LAUNCH_S

    @property
    def python_s(self) -> float:
        return PYTHON_S if self.gpu.kind != "cuda" else MICRO_BATCH_LAUNCHES * LAUNCH_S


class MeasuredRates:
    """Rates from a calibration of the very device, between two measured kernels in logarithms. `card`: CUDA's."""

    def __init__(self, calibration: Calibration, card: Gpu | None = None) -> None:
        self.calibration, self.card = calibration, card
        self.kernels: dict[tuple[str, str], list[KernelTime]] = {}
        for kernel in calibration.kernels:
            self.kernels.setdefault((kernel.kind, kernel.dtype), []).append(kernel)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        return frozenset(dtype for kind, dtype in self.kernels if kind == "matmul")

    def time_s(self, op: Operation) -> float:
        elsewhere_s = host_time_s(op)
        if elsewhere_s is not None:
            return elsewhere_s
        kind = FUSED_LIKE if self.card and op.kind == "fused" else op.kind
        measured = self.kernels.get((kind, op.dtype)) or self.kernels.get((kind, "float32"))
        if op.flops:
            assert measured, op
            return _by_shape(op, measured)
        measured = measured or self.kernels.get(("add", op.dtype)) or self.kernels["add", "float32"]
        together = op.runs if self.card and op.kind in OF_LISTS else 1
        return _by_bytes(together * op.nbytes, measured) / together

    @cached_property
    def host(self) -> Host | None:
        return host_of(self.calibration, self.card) if self.card else None

    def launch_s(self, *, compiled: bool) -> float:
        if self.host:
            return self.host.compiled_launch_s if compiled else self.host.launch_s
        return self.calibration.launch_s / (2 if compiled else 1)

    @property
    def python_s(self) -> float:
        return self.host.python_s if self.host else PYTHON_S


def kernel_flops(kernel: KernelTime) -> float:
    if kernel.kind.startswith("attention"):
        batch, heads, tokens, width = kernel.shape
        return 2 * batch * heads * tokens**2 * width * (2.5 if kernel.kind.endswith("backward") else 1)
    m, n, k = kernel.shape
    return 2 * m * n * k


def _by_shape(op: Operation, measured: list[KernelTime]) -> float:
    """Return FLOP/s of the measured kernels, weighted by the nearness of their shapes, the nearest by far the most."""
    weights = rates = 0.0
    for kernel in measured:
        distance = sum(
            importance * math.log(a / b) ** 2
            for importance, a, b in zip(IMPORTANCE[len(op.shape)], op.shape, kernel.shape, strict=True)
        )
        weight = 1 / (distance + 0.02) ** 2
        weights += weight
        rates += weight * math.log(kernel_flops(kernel) / kernel.time_s)
    return op.causal_flops / math.exp(rates / weights)


def _by_bytes(nbytes: int, measured: list[KernelTime]) -> float:
    points = sorted((kernel.shape[0], kernel.time_s) for kernel in measured)
    if nbytes <= points[0][0]:
        return points[0][1] * max(nbytes / points[0][0], 0.05)
    if nbytes >= points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0]
    for (low, low_s), (high, high_s) in pairwise(points):
        if nbytes <= high:
            share = math.log(nbytes / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))
    raise AssertionError


def rates_of(
    gpu: Gpu, dtype: Dtype, matmul: MatmulMode = "dtype", torch: Software = ASSUMED
) -> CatalogueRates | MeasuredRates | None:
    """Return the device's rates: calibrated for this dtype and plain matmuls, else the catalogue's, else None."""
    if gpu.calibration is not None and matmul == "dtype":
        measured = MeasuredRates(gpu.calibration, gpu if gpu.kind == "cuda" else None)
        if dtype in measured.dtypes:
            return measured
    peak = gpu.peak_flop_per_s(dtype) and gpu.matmul_peak_flop_per_s(matmul, dtype)
    return CatalogueRates(gpu, torch) if peak and gpu.bandwidth_bytes_per_s else None

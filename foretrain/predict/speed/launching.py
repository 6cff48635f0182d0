"""What the host does in a step on a card: it launches kernels, and each micro-batch costs it what no kernel shows.

Counted in launches of an average eager kernel of a training step. Forward ones cost Python modules, autocast and
autograd's nodes, backward ones the autograd engine alone; a step has both in the same proportion, so one figure does.
Measured on an EPYC with torch 2.11 and a driver that computes nothing, and on an H100's host five times slower: steps
of 2 to 12 blocks take the same number of launches on both, within a tenth.
"""

from typing import Any, NamedTuple

from foretrain.config.one_graph import launched
from foretrain.hardware.calibration import Calibration, StepTime
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.speed.step_ops import accumulation, micro_batch, optimizer_launches, tensor_count

# A micro-batch's own: its Python, the batch, hooks, the autograd engine's start (25 to 45 on both machines).
MICRO_BATCH_LAUNCHES = 40
# What Python does besides in a micro-batch, in launches of an eager kernel: around a checkpointed block, whose tensors
# pass hooks three times, and around a block that is compiled by itself, whose guards are checked. Measured on PyTorch's
# CUDA builds of 2.11 and 2.13 without a card (an EPYC): 79 and 81 for an eager checkpointed block, 75 and 130 for a
# compiled one with 8 and 29 for the compiled block itself. In a model that is compiled whole there is nothing of it.
CHECKPOINT_LAUNCHES, REGION_LAUNCHES = 80, 20
# One operation of `launch_time`'s chain, an elementwise product, is cheaper than a step's average kernel: 2.2 times
# on the EPYC, 1.8 times on the H100's host.
CHAIN_LAUNCHES = 2.0
NARROW = 128  # calibrated steps of models this narrow are bound by launching on any card


# Of a step that is one graph (model/host/graphed.py): a micro-batch's two tensors are copied to where it reads them;
# then the rate, the replay, and the copies of what it has found.
COPIES, REPLAY = 2, 8
GAP_S = 1.5e-6  # between a graph's kernels: 1.8 us in 4 x 128 on an H100, with what the host adds


class Launches(NamedTuple):
    """How often the host launches in a micro-batch, in the sum of its gradients, and in the optimizer step."""

    micro: int
    sums: int
    optimizer: int


class Host(NamedTuple):
    """Seconds of the host: for an eager and a compiled kernel, and for a micro-batch besides."""

    launch_s: float
    compiled_launch_s: float
    python_s: float


def launches_of(way: Way, operations: list[Operation]) -> Launches:
    """Of a step on a card whose micro-batch has these operations. Clipping, zeroing and the optimizer go through a list
    of all tensors in Python, at about a launch for each."""
    if way.spec.is_one_graph:
        return Launches(COPIES, 0, REPLAY)
    micro = (2 if way.train else 1) if way.compiled and way.config.makes_graphs else sum(op.runs for op in operations)
    sums = sum(op.runs for op in accumulation(way)) if way.train else 0
    return Launches(micro, sums, optimizer_launches(way) + tensor_count(way))


def beside_kernels(way: Way) -> int:
    """Launches of an eager kernel that take the host as long as what it does in a micro-batch beside launching any."""
    c, whole = way.config, way.compiled and not way.config.compiles_blocks
    if way.spec.is_one_graph or whole:
        return 0
    regions = c.n_layer * REGION_LAUNCHES if way.compiled else 0
    return regions + (c.checkpointed * CHECKPOINT_LAUNCHES if way.train else 0)


def host_of(calibration: Calibration, gpu: Gpu) -> Host:
    """From the small steps of a calibration of a card; from its chain of products alone where it has none of them."""
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
    """A timed step, and what the host launched in it: `eager`: in sums of gradients and the optimizer."""

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
    way = Way(StepSpec.of(config, gpu, dtype=dtype, compiled=step.compiled))
    found, n = launches_of(way, micro_batch(way)), config.gradient_accumulation_steps
    return _Counted(step.time_s, n, (n - 1) * found.sums + found.optimizer, n * found.micro)


def _width(step: StepTime) -> float:
    width = step.options.get("n_embd", NARROW + 1)
    return width if isinstance(width, int) else NARROW + 1

"""What a step's time is made of, from what the device works and what the host launches. No torch.

A GPU runs behind Python: a micro-batch takes the longer of its kernels and of launching them, and where the kernels
take longer, Python is ahead when it comes to the optimizer. A CPU does both itself.
"""

from dataclasses import dataclass

from foretrain.hardware.links import pinned_bytes_per_s
from foretrain.model.shape import ModelShape
from foretrain.predict.speed.launching import GAP_S, Launches, beside_kernels, launches_of
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.speed.rates import HOST_BYTES_PER_S, Rates, busy_s
from foretrain.predict.speed.step_ops import FUSED_LAUNCHES, accumulation, micro_batch, optimizer, optimizer_launches

# How long a micro-batch waits for what goes between card and host beside its work (model/host/). No torch.
#
# The input of a checkpointed block leaves the card while its block runs, and comes back while the block after it is
# recomputed and goes backward, which takes three times as long. Gradients leave during the backward pass, and a
# thread of the host sums them meanwhile. Of copies and sums that take no longer than what they run beside, nothing is
# seen.

BACKWARD = 3  # a block's recomputation and its backward pass, in forward passes


def waits_s(way: Way, operations: list[Operation], rates: Rates) -> float:
    """Seconds, for the operations of a micro-batch."""
    if not (way.train and way.spec.cuda):
        return 0.0
    bytes_per_s = pinned_bytes_per_s(way.spec.gpu.name)
    found = 0.0
    if way.config.elements_on_host:
        bus_s = way.wide * way.config.elements_on_host / bytes_per_s
        blocks_s = busy_s([op for op in operations if op.part == "recompute"], rates)
        found += max(0.0, bus_s - blocks_s) + max(0.0, bus_s - BACKWARD * blocks_s)
    if way.config.gradient_offload:
        shape = ModelShape.of(way.config)
        bus_s = way.wide * shape.n_params / bytes_per_s
        sums_s = (4 + way.wide + 4) * shape.n_params / HOST_BYTES_PER_S
        backward_s = busy_s([op for op in operations if op.part in ("recompute", "backward")], rates)
        last_s = way.wide * max(shape.numels) / bytes_per_s  # the embedding's, when nothing is left to run beside
        found += max(0.0, max(bus_s, sums_s) - backward_s) + last_s
    return found


@dataclass(frozen=True)
class StepParts:
    """What a step's expected time is made of, in seconds: micro-batches, sums of gradients over them, the optimizer."""

    micro_batches: int
    micro_batch_s: float
    sum_s: float  # of one micro-batch's gradients and those before it
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.micro_batches * self.micro_batch_s + (self.micro_batches - 1) * self.sum_s + self.optimizer_s


@dataclass(frozen=True)
class StepLoad:
    """Seconds of the device's work and of the host's for a micro-batch, its sum of gradients, and the optimizer.

    `start_s`: of the optimizer's launching, what the device waits for anyway; it counts as the device's.
    """

    micro_batches: int
    behind: bool  # does the device run behind the host?
    work_s: float
    host_s: float
    sum_work_s: float
    sum_host_s: float
    optimizer_work_s: float
    optimizer_host_s: float
    start_s: float

    def micro_batch_s(self, work: float = 1.0, host: float = 1.0) -> float:
        """One micro-batch, with a device and a host that take so many times as long."""
        work_s, host_s = work * self.work_s, host * self.host_s
        return max(work_s, host_s) if self.behind else work_s + host_s

    def parts(self, work: float = 1.0, host: float = 1.0) -> StepParts:
        """The parts, with a device and a host that take so many times as long."""
        work_s, host_s, alone_s = work * self.work_s, host * self.host_s, self.micro_batch_s(work, host)
        optimizer_s = work * (self.optimizer_work_s + self.start_s)
        if not self.behind:
            return StepParts(self.micro_batches, alone_s, work * self.sum_work_s, optimizer_s)
        sum_s = max(work_s + work * self.sum_work_s, host_s + host * self.sum_host_s) - alone_s
        ahead_s = self.micro_batches * max(0.0, work_s - host_s)
        optimizer_s = max(optimizer_s, host * self.optimizer_host_s - ahead_s)
        return StepParts(self.micro_batches, alone_s, sum_s, optimizer_s)


def step_load(way: Way, rates: Rates, more_launches: int = 0) -> StepLoad:
    """What device and host do in a step, kernel by kernel; of an evaluation, which has no more, in a micro-batch.
    `more_launches`: eager ones of a micro-batch, beside its own."""
    operations = micro_batch(way)
    each_s, cuda = rates.launch_s(compiled=False), way.spec.cuda
    work_s = busy_s(operations, rates) + waits_s(way, operations, rates)
    host_s = more_launches * each_s + rates.python_s
    fixed = optimizer_launches(way)
    if way.spec.is_one_graph:
        found, fixed = launches_of(way, operations), 0
        work_s, host_s = work_s + GAP_S * sum(op.runs for op in operations), found.micro * each_s
    elif cuda:
        found = launches_of(way, operations)
        host_s += beside_kernels(way) * each_s + found.micro * rates.launch_s(compiled=way.compiled)
    else:
        found = Launches(0, 0, fixed)
        host_s += sum(op.runs for op in operations) * rates.launch_s(compiled=way.compiled)
    if not way.train:
        return StepLoad(1, cuda, work_s, host_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    many = cuda and fixed > FUSED_LAUNCHES  # small kernels: the longer of running and launching
    return StepLoad(
        micro_batches=way.config.gradient_accumulation_steps, behind=cuda, work_s=work_s,
        host_s=host_s, sum_work_s=busy_s(accumulation(way), rates), sum_host_s=found.sums * each_s,
        optimizer_work_s=busy_s(optimizer(way), rates), optimizer_host_s=found.optimizer * each_s,
        start_s=0.0 if many else fixed * each_s,
    )  # fmt: skip


def step_parts(way: Way, rates: Rates, more_launches: int = 0) -> StepParts:
    """The parts, before a whole step that was measured corrects them. `more_launches`: of a micro-batch, beside its
    own."""
    return step_load(way, rates, more_launches).parts()

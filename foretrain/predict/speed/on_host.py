"""How long a micro-batch waits for what goes between card and host beside its work (model/host/). No torch.

The input of a checkpointed block leaves the card while its block runs, and comes back while the block after it is
recomputed and goes backward, which takes three times as long. Gradients leave during the backward pass, and a thread
of the host sums them meanwhile. Of copies and sums that take no longer than what they run beside, nothing is seen.
"""

from foretrain.hardware.links import pinned_bytes_per_s
from foretrain.model.shape import ModelShape
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.speed.rates import HOST_BYTES_PER_S, Rates, busy_s

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

"""How long a micro-batch waits for inputs of checkpointed blocks that lie in host memory (model/host/checkpoints.py).
No torch.

An input leaves the card while its block runs, and comes back while the block after it is recomputed and goes backward,
which takes three times as long. A copy that takes no longer than that costs nothing.
"""

from foretrain.hardware.links import pinned_bytes_per_s
from foretrain.predict.speed.ops import Operation, Way
from foretrain.predict.speed.rates import Rates, busy_s

BACKWARD = 3  # a block's recomputation and its backward pass, in forward passes


def waits_s(way: Way, operations: list[Operation], rates: Rates) -> float:
    """Seconds, for the operations of a micro-batch."""
    if not (way.train and way.spec.cuda and way.config.elements_on_host):
        return 0.0
    bus_s = way.wide * way.config.elements_on_host / pinned_bytes_per_s(way.spec.gpu.name)
    blocks_s = busy_s([op for op in operations if op.part == "recompute"], rates)
    return max(0.0, bus_s - blocks_s) + max(0.0, bus_s - BACKWARD * blocks_s)

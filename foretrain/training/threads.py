"""How many threads a run on a CPU computes with. Sums over another number of threads round differently, so a resumed
run takes as many as it had, whatever this process would take by itself (OMP_NUM_THREADS, the cores it may run on)."""

import torch

from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import usable_cores


def settle(config: RunConfig, before: int | None) -> int:
    """The number of threads that PyTorch now computes with. `before`: the run's until it stopped; None: it is new.

    The config's own number comes first. Where fewer cores are left than there were threads, as many as those: threads
    that wait for a core hold up all others.
    """
    count = config.cpu_threads or (min(before, usable_cores()) if before else torch.get_num_threads())
    torch.set_num_threads(count)
    return count

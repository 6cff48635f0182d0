"""Does a run fit into this machine's free memory? Asked before the first step of a run on a CPU.

Linux grants memory that it does not have and later kills a process for it, so a run that cannot fit has to be refused
by its forecast. Only what is certain is refused: the low end of what the run needs, in the dtype that needs least. A
memory_limit as large as that is the user's word that it shall start all the same.
"""

from collections.abc import Callable

from foretrain.base.errors import UserError
from foretrain.base.process_memory import resident_bytes
from foretrain.base.units import GIB
from foretrain.config.microbatches import sequences_of, smaller_micro_batch, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import available_memory_bytes, total_memory_bytes
from foretrain.predict.memory import MARGIN_BYTES, predict
from foretrain.predict.spec import StepSpec


def check(
    config: RunConfig, gpu: Gpu, *, compiled: bool, free: Callable[[], int | None] = available_memory_bytes
) -> None:
    """Raise UserError 'memory.machine…' where the run needs more than this process has and the machine has free."""
    left = free()
    if left is None:
        return
    left += resident_bytes() or 0
    dtypes: list[Dtype] = ["float32", "bfloat16"] if config.dtype == "auto" else [config.dtype]
    needs = min(_needs(config, gpu, dtype, compiled)[0] for dtype in dtypes)
    if needs <= left or needs <= (config.memory_limit_bytes or 0):
        return
    values = {
        "needs": needs,
        "free": left,
        "total": total_memory_bytes(),
        "limit": f"{-(-needs // GIB) + 1}GiB",
    }
    smaller = _fitting(config, gpu, dtypes[0], compiled, left)
    if smaller is None:
        raise UserError("memory.machine", **values)
    more = sequences_of(config) // smaller
    raise UserError("memory.machine_smaller", smaller=smaller, more=more, **values)


def _needs(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool) -> tuple[int, int]:
    """(low, expected) of what the run needs."""
    memory = predict(StepSpec.of(config, gpu, dtype=dtype, compiled=compiled))
    return max(phase.needed_low_bytes for phase in memory.phases), memory.needed_bytes


def _fitting(config: RunConfig, gpu: Gpu, dtype: Dtype, compiled: bool, left: int) -> int | None:
    """The largest of the ever smaller micro-batches for the same training that fits with room to spare."""
    size = smaller_micro_batch(config.batch_size, sequences_of(config))
    while size is not None:
        if _needs(with_micro_batch(config, size), gpu, dtype, compiled)[1] + MARGIN_BYTES <= left:
            return size
        size = smaller_micro_batch(size, sequences_of(config))
    return None

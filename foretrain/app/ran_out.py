"""Memory that ran out, as the end of a log says it, and what would have saved that run."""

from collections.abc import Callable
from pathlib import Path

from foretrain.advice.remedies import Remedy, remedies
from foretrain.analysis.run import OutOfMemory, failure_of
from foretrain.base import oom_message
from foretrain.base.safe_read import read_bytes
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu

TAIL_BYTES = 1 << 18  # of a log; where memory ran out it says so at its end

Listen = Callable[[str], object]  # hears what is being done: 'searching'


def ran_out_in(log: Path) -> oom_message.OutOfMemoryMessage | None:
    """What the end of a log says of memory that ran out."""
    try:
        return oom_message.parse(read_bytes(log, 2 * TAIL_BYTES, last_bytes=TAIL_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def failures(
    message: oom_message.OutOfMemoryMessage | None,
    config: RunConfig | None,
    gpu: Gpu | None,
    listen: Listen = lambda what: None,
) -> tuple[tuple[OutOfMemory, ...], tuple[Remedy, ...]]:
    """(the failure, what would have saved it): the second where the config and the card are known."""
    if message is None:
        return (), ()
    values = {key: value for key, value in message.to_json().items() if value is not None}
    allocated, unused = values.get("allocated_bytes"), values.get("unused_bytes")
    if allocated is not None and unused is not None:
        values["reserved_bytes"] = allocated + unused
    if {"card_bytes", "free_bytes", "process_bytes"} <= set(values):
        held = values["card_bytes"] - values["free_bytes"] - values["process_bytes"]
        values["used_by_others_bytes"] = max(0, held)
    failure = failure_of(values).model_copy(update={"fatal": True})
    if config is None or gpu is None:
        return (failure,), ()
    listen("searching")
    others, over = failure.used_by_others_bytes or 0, failure.over_bytes or 0
    return (failure,), remedies(config, gpu, used_by_others_bytes=others, over_bytes=over, step="nanogpt")

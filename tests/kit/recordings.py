"""The allocator's simulator against a recorded history: what each took from the driver, in order."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from foretrain.predict.allocator.blocks import Block, Lifetimes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.simulator import Allocator
from foretrain.predict.snapshot import SEGMENT_KINDS, Recording, requests_of


class SegmentEvent(NamedTuple):
    """The driver gave or took memory: "alloc" or "free", with expandable segments "map" or "unmap"; bytes."""

    kind: str
    nbytes: int
    stream: int


@dataclass(frozen=True)
class Comparison:
    """`recorded` and `simulated`: the driver's part in order.

    `same` counts entries that agree from the beginning; `first_difference` is the index of the first that does not,
    None if all agree. `complete` is false if the history does not begin with the first allocation: then a difference
    says nothing about the simulator.
    """

    recorded: tuple[SegmentEvent, ...]
    simulated: tuple[SegmentEvent, ...]
    same: int
    first_difference: int | None
    complete: bool
    unknown_frees: int
    unknown_live: int
    reserved_before_bytes: int
    recorded_peak_reserved_bytes: int
    simulated_peak_reserved_bytes: int
    simulated_peak_allocated_bytes: int
    out_of_memory_at: int | None  # index in the history


def compare_with_recorded(recording: Recording, limit_bytes: int | None = None, *, physical: bool = True) -> Comparison:
    """Ask the simulator for what the program asked for, in its order and on its streams.

    Without a limit the simulator's cache is emptied where the history shows memory going back to the driver: what made
    PyTorch do so (torch.cuda.empty_cache, a full card) is not in it. With a limit (as in Allocator, here by default
    the memory that the driver has) the simulator decides that by itself.
    """
    found = requests_of(recording)
    lifetimes = found.lifetimes
    if limit_bytes is None:
        emptied = [bisect_left(found.positions, at) for at in _releases(recording)]
        lifetimes = Lifetimes(lifetimes.events, lifetimes.sizes, streams=lifetimes.streams, emptied=emptied)
    simulated: list[SegmentEvent] = []

    def watch(index: int, allocator: Allocator, _block: Block | None) -> None:
        new = allocator.segments[len(simulated) :]
        simulated.extend(SegmentEvent(kind, nbytes, stream) for kind, _, nbytes, stream in new)

    result = replay(lifetimes, recording.settings, limit_bytes, physical=physical, watch=watch)
    ended_at = None
    if result.failure is not None:
        watch(result.failure.position, result.allocator, None)
        ended_at = found.positions[result.failure.position]
    recorded = [SegmentEvent(SEGMENT_KINDS[entry.action], entry.nbytes, entry.stream) for entry in recording.entries
                if entry.action in SEGMENT_KINDS]  # fmt: skip
    same = next((i for i, (a, b) in enumerate(zip(recorded, simulated, strict=False)) if a != b),
                min(len(recorded), len(simulated)))  # fmt: skip
    before_bytes = reserved_bytes = peak_bytes = recording.reserved_before_bytes
    for kind, nbytes, _ in recorded:
        reserved_bytes += nbytes if kind in ("alloc", "map") else -nbytes
        peak_bytes = max(peak_bytes, reserved_bytes)
    return Comparison(
        recorded=tuple(recorded), simulated=tuple(simulated), same=same,
        first_difference=None if same == len(recorded) == len(simulated) else same,
        complete=not (found.unknown_frees or found.unknown_live or before_bytes),
        unknown_frees=found.unknown_frees, unknown_live=found.unknown_live,
        reserved_before_bytes=before_bytes, recorded_peak_reserved_bytes=peak_bytes,
        simulated_peak_reserved_bytes=result.allocator.peak_reserved_bytes,
        simulated_peak_allocated_bytes=result.allocator.peak_allocated_bytes, out_of_memory_at=ended_at,
    )  # fmt: skip


def _releases(recording: Recording) -> list[int]:
    releasing = [entry.action in ("segment_free", "segment_unmap") for entry in recording.entries]
    return [at for at, now in enumerate(releasing) if now and not (at and releasing[at - 1])]

"""PyTorch's memory snapshots: read one, replay it, and compare what the driver was asked for.

The format is that of torch.cuda.memory._snapshot() (torch/csrc/cuda/memory_snapshot.cpp, torch/cuda/_memory_viz.py):
`segments` as they are when it is taken, `device_traces` with the history since _record_memory_history, and
`allocator_settings`. It comes as a pickle, which is read by an unpickler that knows plain values only, so nothing in
it can run. write.py writes the same format. Standard library only.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.base import plain_pickle
from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.lifetimes import Lifetimes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import UNLIMITED, Settings
from foretrain.predict.allocator.simulator import Allocator

# Actions of the history that take memory from the driver or give it back -> their kind in Allocator.segments.
SEGMENT_KINDS = {"segment_alloc": "alloc", "segment_free": "free", "segment_map": "map", "segment_unmap": "unmap"}


class Entry(NamedTuple):
    """One action of the allocator; bytes are those asked for, not rounded. The address of an oom is 0.

    alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom or snapshot;
    one that a newer PyTorch may add changes nothing here.
    """

    action: str
    address: int
    nbytes: int
    stream: int


class SegmentEvent(NamedTuple):
    """The driver gave or took memory: "alloc" or "free", with expandable segments "map" or "unmap"; bytes.

    `position` is the index in the recorded history, or for a simulated one the index of the replayed event; `stream`
    the one that the memory is for, 0 the default one, others as the recording names them.
    """

    kind: str
    nbytes: int
    position: int
    stream: int = 0


@dataclass(frozen=True)
class Recording:
    """What a snapshot holds for one device.

    `live_at_end` are addresses of blocks in use, `reserved_at_end_bytes` the size of all segments when it was taken.
    """

    entries: tuple[Entry, ...]
    settings: Settings
    live_at_end: frozenset[int]
    reserved_at_end_bytes: int

    @property
    def streams(self) -> tuple[int, ...]:
        """The streams that allocated, that with most allocations first."""
        counts = Counter(entry.stream for entry in self.entries if entry.action == "alloc")
        return tuple(stream for stream, _ in counts.most_common())

    @property
    def segments(self) -> list[SegmentEvent]:
        """What the driver gave and took, in order."""
        return [
            SegmentEvent(SEGMENT_KINDS[entry.action], entry.nbytes, position, entry.stream)
            for position, entry in enumerate(self.entries)
            if entry.action in SEGMENT_KINDS
        ]

    @property
    def reserved_before_bytes(self) -> int:
        """What was reserved on all streams before the first entry: the end, less what the history shows."""
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        change = sum(signs.get(entry.action, 0) * entry.nbytes for entry in self.entries)
        return self.reserved_at_end_bytes - change


@dataclass(frozen=True)
class Requests:
    """What a recording asks of the allocator, and what of it could not be told.

    `unknown_frees`: of allocations made before the recording began (or pushed out of its ring buffer);
    `unknown_live`: blocks in use at the end that the history does not explain.
    """

    lifetimes: Lifetimes
    positions: list[int]  # for each event its index in the history
    unknown_frees: int
    unknown_live: int


@dataclass(frozen=True)
class Comparison:
    """A recording against the simulator. `recorded` and `simulated` are the driver's part in order.

    `same` counts entries that agree from the beginning in kind, bytes and stream; `first_difference` is the index of
    the first that does not, None if all agree. `complete` is false if the history does not begin with the first
    allocation: then a difference says nothing about the simulator.
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


# -- reading -----------------------------------------------------------------------------------------------


def read(path: Path, device: int = 0) -> Recording:
    """The recording of one device. Raises ValueError with a sentence for what is no snapshot, OSError as open()."""
    return loads(path.read_bytes(), str(path), device)


def loads(data: bytes, name: str = "snapshot", device: int = 0) -> Recording:
    """As `read`, from the pickle's bytes; `name` begins the sentence of a ValueError."""
    return of_snapshot(unpickled(data, name), name, device)


def unpickled(data: bytes, name: str) -> Any:
    """The plain values of a pickle, whatever they are; nothing in it can run. Raises ValueError with a sentence."""
    try:
        return plain_pickle.loads(data)
    except plain_pickle.Asks as error:
        raise ValueError(f"{name}: it wants to load {error}, which no memory snapshot needs") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # a damaged pickle can end in almost any of them
        raise ValueError(f"{name}: is no pickle of a memory snapshot ({type(error).__name__})") from None


def of_snapshot(snapshot: Any, name: str = "snapshot", device: int = 0) -> Recording:
    """The recording in the dict that torch.cuda.memory._snapshot() returns. Raises ValueError."""
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise ValueError(
            f"{name}: has no device_traces; record a history with torch.cuda.memory._record_memory_history"
        )
    if not 0 <= device < len(traces):
        raise ValueError(f"{name}: has {len(traces)} devices, counted from 0; device {device} is not among them")
    entries = tuple(_entry(item, f"{name}: entry {i} of its history") for i, item in enumerate(traces[device]))
    live, reserved_bytes = _segments(snapshot.get("segments", []), name, device)
    settings = snapshot.get("allocator_settings", {})
    return Recording(entries, _settings(settings if isinstance(settings, dict) else {}, name), live, reserved_bytes)


def _entry(item: Any, where: str) -> Entry:
    if not isinstance(item, dict) or not isinstance(item.get("action"), str):
        raise ValueError(f"{where} has no action")
    address, nbytes, stream = item.get("addr", 0), item.get("size"), item.get("stream", 0)
    if not (isinstance(address, int) and isinstance(nbytes, int) and isinstance(stream, int) and nbytes >= 0):
        raise ValueError(f"{where} needs whole numbers as addr, size and stream")
    return Entry(item["action"], address, nbytes, stream)


def _segments(segments: Any, name: str, device: int) -> tuple[frozenset[int], int]:
    """(addresses of blocks in use, bytes of all segments) of a device."""
    live: set[int] = set()
    seen: set[int] = set()
    total_bytes = 0
    try:
        for segment in segments:
            if segment.get("device", 0) != device:
                continue
            total_bytes += index(segment["total_size"])
            address, blocks = index(segment["address"]), segment["blocks"]
            if blocks and id(blocks) in seen:  # a small file could so hold more blocks than any memory has
                raise ValueError("two segments share their blocks")
            seen.add(id(blocks))
            for block in blocks:
                if block["state"] != "inactive":
                    live.add(address)
                address += index(block["size"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{name}: its segments are not those of a memory snapshot") from None
    return frozenset(live), total_bytes


def _settings(values: Mapping[str, Any], name: str) -> Settings:
    """From allocator_settings: the text of the variable where it can be read, else the values one by one."""
    text = values.get("PYTORCH_CUDA_ALLOC_CONF", values.get("PYTORCH_ALLOC_CONF"))
    if isinstance(text, str) and text:
        try:
            return Settings.parse(text)
        except ValueError as error:
            if "MallocAsync" in text:
                raise ValueError(f"{name}: {error}") from None
            # A setting of another version of PyTorch: what the snapshot says itself must do.
    split, threshold = values.get("max_split_size"), values.get("garbage_collection_threshold")
    found = Settings(expandable_segments=values.get("expandable_segments") is True)
    for changes in (
        {"max_split_bytes": split if isinstance(split, int) and split > 0 else UNLIMITED},
        {"garbage_collection_threshold": threshold if isinstance(threshold, float) else 0.0},
    ):
        with contextlib.suppress(ValueError):  # one that cannot be says nothing about the others
            found = replace(found, **changes)
    return found


# -- comparing ---------------------------------------------------------------------------------------------


def requests_of(recording: Recording, *, follow_releases: bool, more_bytes: int = 0) -> Requests:
    """What a recording asks of the allocator. A block counts as free when PyTorch could use it again (free_completed),
    which is after all streams have done with it.

    `follow_releases`: where the history shows memory going back to the driver, empty the simulator's cache too. What
    made PyTorch do so (torch.cuda.empty_cache, a full card) is not in a history. `more_bytes`: a last request.
    """
    completed = any(entry.action == "free_completed" for entry in recording.entries)
    free_actions = ("free", "free_completed" if completed else "free_requested")
    events: list[int] = []
    sizes: list[int] = []
    positions: list[int] = []
    emptied: list[int] = []
    streams: dict[int, int] = {}
    alive: dict[int, int] = {}  # address -> id
    unknown_frees = 0
    releasing = False
    for position, entry in enumerate(recording.entries):
        if entry.action == "alloc":
            id = alive[entry.address] = len(sizes)
            sizes.append(entry.nbytes)
            streams[id] = entry.stream
            events.append(id)
            positions.append(position)
        elif entry.action in free_actions:
            born = alive.pop(entry.address, None)
            unknown_frees += born is None
            if born is not None:
                events.append(~born)
                positions.append(position)
        release = entry.action in ("segment_free", "segment_unmap")
        if release and follow_releases and not releasing:
            emptied.append(len(events))
        releasing = release
    if more_bytes:
        streams[len(sizes)] = streams.get(len(sizes) - 1, 0)
        events.append(len(sizes))
        sizes.append(more_bytes)
    unknown_live = len(recording.live_at_end - alive.keys())
    return Requests(Lifetimes(events, sizes, streams=streams, emptied=emptied), positions, unknown_frees, unknown_live)


def compare_with_recorded(recording: Recording, limit_bytes: int | None = None, *, physical: bool = True) -> Comparison:
    """Ask the simulator for what the program asked for, in its order and on its streams, and compare what each took
    from the driver.

    Without a limit the simulator gives memory back where the recording did; with one (as in Allocator, here by default
    the memory that the driver has) it decides that by itself.
    """
    found = requests_of(recording, follow_releases=limit_bytes is None)
    allocator, simulated, ended_at = _replay(found, recording.settings, limit_bytes, physical)
    recorded = recording.segments
    pairs = list(zip(recorded, simulated, strict=False))
    agrees = lambda a, b: (a.kind, a.nbytes, a.stream) == (b.kind, b.nbytes, b.stream)  # noqa: E731
    same = next((i for i, (a, b) in enumerate(pairs) if not agrees(a, b)), len(pairs))
    agree = same == len(recorded) == len(simulated)
    before_bytes = recording.reserved_before_bytes
    reserved_bytes = peak_bytes = before_bytes
    for kind, nbytes, _, _ in recorded:
        reserved_bytes += nbytes if kind in ("alloc", "map") else -nbytes
        peak_bytes = max(peak_bytes, reserved_bytes)
    return Comparison(
        recorded=tuple(recorded), simulated=tuple(simulated), same=same, first_difference=None if agree else same,
        complete=not (found.unknown_frees or found.unknown_live or before_bytes),
        unknown_frees=found.unknown_frees, unknown_live=found.unknown_live,
        reserved_before_bytes=before_bytes, recorded_peak_reserved_bytes=peak_bytes,
        simulated_peak_reserved_bytes=allocator.peak_reserved_bytes,
        simulated_peak_allocated_bytes=allocator.peak_allocated_bytes, out_of_memory_at=ended_at,
    )  # fmt: skip


def _replay(
    found: Requests, settings: Settings, limit_bytes: int | None, physical: bool
) -> tuple[Allocator, list[SegmentEvent], int | None]:
    """(allocator at the end, what it took and gave, index in the history where memory ran out)."""
    seen: list[SegmentEvent] = []

    def watch(index: int, allocator: Allocator, _block: Block | None) -> None:
        new = allocator.segments[len(seen) :]
        seen.extend(SegmentEvent(kind, nbytes, index, stream) for kind, _, nbytes, stream in new)

    result = replay(found.lifetimes, settings, limit_bytes, physical=physical, watch=watch)
    ended_at = None
    if result.death is not None:
        watch(result.death.position, result.allocator, None)
        ended_at = found.positions[result.death.position]
    return result.allocator, seen, ended_at

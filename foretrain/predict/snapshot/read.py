"""PyTorch's memory snapshots: read one, and what it asks of an allocator.

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
from foretrain.predict.allocator.lifetimes import Lifetimes
from foretrain.predict.allocator.settings import UNLIMITED, Settings

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
        raise ValueError(f"{name}: is not a memory snapshot, or a damaged one ({type(error).__name__})") from None


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


# -- replaying ---------------------------------------------------------------------------------------------


def requests_of(recording: Recording, *, more_bytes: int = 0) -> Requests:
    """What a recording asks of the allocator. A block counts as free when PyTorch could use it again (free_completed),
    which is after all streams have done with it. `more_bytes`: a last request.
    """
    completed = any(entry.action == "free_completed" for entry in recording.entries)
    free_actions = ("free", "free_completed" if completed else "free_requested")
    events: list[int] = []
    sizes: list[int] = []
    positions: list[int] = []
    streams: dict[int, int] = {}
    alive: dict[int, int] = {}  # address -> id
    unknown_frees = 0
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
    if more_bytes:
        streams[len(sizes)] = streams.get(len(sizes) - 1, 0)
        events.append(len(sizes))
        sizes.append(more_bytes)
    unknown_live = len(recording.live_at_end - alive.keys())
    return Requests(Lifetimes(events, sizes, streams=streams), positions, unknown_frees, unknown_live)

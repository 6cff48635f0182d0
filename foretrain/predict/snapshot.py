"""PyTorch's memory snapshots (torch/csrc/cuda/memory_snapshot.cpp, torch/cuda/_memory_viz.py): read, replay and write.
A pickle is read by an unpickler that knows plain values only, so nothing in it can run."""

import contextlib
import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.base import files
from foretrain.predict.allocator.blocks import Block, Lifetimes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import UNLIMITED, Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory

# Actions of the history that take memory from the driver or give it back -> their kind in Allocator.segments.
SEGMENT_KINDS = {"segment_alloc": "alloc", "segment_free": "free", "segment_map": "map", "segment_unmap": "unmap"}


class Entry(NamedTuple):
    """One action of the allocator; bytes as asked for. The address of an oom is 0; unknown actions change nothing."""

    action: str
    address: int
    nbytes: int
    stream: int


@dataclass(frozen=True)
class Recording:
    """`live_at_end` are addresses of blocks in use, `reserved_at_end_bytes` the size of all segments then."""

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
    """What a recording asks of the allocator. `unknown_frees`: of earlier allocations; `unknown_live`: at the end."""

    lifetimes: Lifetimes
    positions: list[int]  # for each event its index in the history
    unknown_frees: int
    unknown_live: int


def read(path: Path, device: int = 0) -> Recording:
    """Read the recording of one device. Raises ValueError with a sentence, and OSError as open()."""
    return parse(path.read_bytes(), str(path), device)


def parse(data: bytes, name: str = "snapshot", device: int = 0) -> Recording:
    return recording_of(unpickled(data, name), name, device)


def unpickled(data: bytes, name: str) -> Any:
    """Return the plain values of a pickle; nothing in it can run. Raises ValueError with a sentence."""
    try:
        return files.load_pickle(data)
    except files.ForbiddenName as error:
        raise ValueError(f"{name}: it wants to load {error}, which no memory snapshot needs") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # a damaged pickle can end in almost any of them
        raise ValueError(f"{name}: is not a memory snapshot, or a damaged one ({type(error).__name__})") from None


def recording_of(snapshot: Any, name: str = "snapshot", device: int = 0) -> Recording:
    """Read the dict that torch.cuda.memory._snapshot() returns. Raises ValueError."""
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
    """Return (addresses of blocks in use, bytes of all segments) of a device."""
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
    """Read allocator_settings: the text of the variable where it can be read, else the values one by one."""
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


def requests_of(recording: Recording, *, more_bytes: int = 0) -> Requests:
    """Return what a recording asks of the allocator, `more_bytes` at last. A block is free when streams are done."""
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
            allocation = alive.pop(entry.address, None)
            unknown_frees += allocation is None
            if allocation is not None:
                events.append(~allocation)
                positions.append(position)
    if more_bytes:
        streams[len(sizes)] = streams.get(len(sizes) - 1, 0)
        events.append(len(sizes))
        sizes.append(more_bytes)
    unknown_live = len(recording.live_at_end - alive.keys())
    return Requests(Lifetimes(events, sizes, streams=streams), positions, unknown_frees, unknown_live)


# A trace as a memory snapshot for https://pytorch.org/memory_viz. Frames carry the names of tensors; addresses and
# segments are the simulator's, the `category` of an allocation is as in _memory_viz.py's _profile_to_snapshot.

# What MemoryViz.js calls an allocation without a category. As soon as a history names any category it must name this
# one too: annotate_snapshot would add it, but there its code has a typing error and throws.
UNKNOWN_CATEGORY = "unknown"


class Label(NamedTuple):
    """What memory_viz shows of an allocation: its name, by what it is coloured, and further lines below the name."""

    name: str
    category: str = UNKNOWN_CATEGORY
    frames: tuple[str, ...] = ()


class History:
    """What happens in an allocator, written down as it happens; `data` is the snapshot so far."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.entries: list[dict[str, Any]] = []
        self._alive: dict[int, dict[str, Any]] = {}  # address -> what its entries say
        self._pending: list[tuple[Block, dict[str, Any]]] = []  # freed, while other streams still use them
        self._segments_seen = 0

    def allocate(self, block: Block, label: Label) -> None:
        frames = [{"name": name, "filename": "foretrain", "line": 0} for name in (label.name, *label.frames)]
        values = {"frames": frames, "addr": block.ptr, "size": block.requested, "stream": block.stream}
        self._alive[block.ptr] = values
        self._add("alloc", **values, category=label.category)

    def free(self, address: int, block: Block) -> None:
        """Note that a block was freed; it is complete when no other stream uses it."""
        values = self._alive.pop(address)
        self._add("free_requested", **values)
        if block.other_streams:
            self._pending.append((block, values))
        else:
            self._add("free_completed", **values)

    def driver(self) -> None:
        """Take over what the allocator did by itself: frees that other streams held back, and the driver's segments."""
        for block, values in self._pending:
            if not block.other_streams:
                self._add("free_completed", **values)
        self._pending = [held for held in self._pending if held[0].other_streams]
        for kind, address, nbytes, stream in self.allocator.segments[self._segments_seen :]:
            values = {"frames": [], "addr": address, "size": nbytes, "stream": stream}
            self._add(f"segment_{kind}", **values, category=UNKNOWN_CATEGORY)
        self._segments_seen = len(self.allocator.segments)

    def ran_out(self, error: OutOfMemory) -> None:
        free_bytes = max(0, error.limit_bytes - error.reserved_bytes)
        self._add("oom", device_free=free_bytes, size=error.requested_bytes, stream=0, frames=[])

    def _add(self, action: str, **values: Any) -> None:
        rest = {"time_us": len(self.entries), "compile_context": "N/A", "user_metadata": ""}
        self.entries.append({"action": action, **values, **rest})

    def data(self) -> dict[str, Any]:
        settings = self.allocator.settings
        return {
            "segments": [self._segment(blocks) for blocks in self.allocator.live_segments()],
            "device_traces": [self.entries],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": settings.text(),
                "max_split_size": -1 if settings.max_split_is_unlimited else settings.max_split_bytes,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {str(1 << i): n for i, n in enumerate(settings.roundup_power2_divisions)},
            },
            "external_annotations": [],
        }  # fmt: skip

    def _segment(self, blocks: list[Block]) -> dict[str, Any]:
        allocated_bytes = sum(block.size for block in blocks if block.ptr in self._alive)
        return {
            "device": 0, "address": blocks[0].ptr, "total_size": sum(block.size for block in blocks),
            "allocated_size": allocated_bytes, "active_size": sum(block.size for block in blocks if block.used),
            "requested_size": sum(block.requested for block in blocks), "stream": blocks[0].stream,
            "segment_type": "small" if blocks[0].pool.small else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.allocator.settings.expandable_segments, "frames": [],
            "blocks": [
                {
                    "address": block.ptr, "size": block.size, "requested_size": block.requested,
                    "state": self._state(block),
                    "frames": self._alive[block.ptr]["frames"] if block.ptr in self._alive else [],
                }
                for block in blocks
            ],
        }  # fmt: skip

    def _state(self, block: Block) -> str:
        if not block.used:
            return "inactive"
        return "active_allocated" if block.ptr in self._alive else "active_pending_free"


def snapshot_of(
    lifetimes: Lifetimes,
    label: Callable[[int], Label],
    settings: Settings | None = None,
    limit_bytes: int | None = None,
    *,
    physical: bool = False,
) -> dict[str, Any]:
    """Return lifetimes as a snapshot, by `replay`'s arguments; a limit ends it with an oom. `label`: by id."""
    history: History | None = None
    addresses: dict[int, int] = {}

    def watch(position: int, allocator: Allocator, block: Block | None) -> None:
        nonlocal history
        history = history or History(allocator)
        history.driver()
        if block is None:
            return
        event = lifetimes.events[position]
        if event >= 0:
            addresses[event] = block.ptr
            history.allocate(block, label(event))
        else:
            history.free(addresses.pop(~event), block)

    result = replay(lifetimes, settings, limit_bytes, physical=physical, watch=watch)
    history = history or History(result.allocator)
    history.driver()
    if result.out_of_memory is not None:
        history.ran_out(result.out_of_memory)
    return history.data()


def write(snapshot: dict[str, Any], path: Path) -> None:
    """Write a pickle, under its name only when whole. Raises OSError."""
    staging = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with staging.open("xb") as file:
            file.write(pickle.dumps(snapshot))
        staging.replace(path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise

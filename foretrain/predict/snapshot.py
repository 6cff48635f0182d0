"""PyTorch's memory snapshots (torch.cuda.memory._snapshot): read one, replay it, and write a trace as one.

A snapshot is a pickle. It is read by an unpickler that knows plain values only, so nothing in it can run. The
format is that of torch/csrc/cuda/memory_snapshot.cpp; https://pytorch.org/memory_viz opens what is written here.
Standard library only.
"""

import io
import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.predict.allocator import Allocator, Block, OutOfMemory
from foretrain.predict.allocator_settings import Settings


class Entry(NamedTuple):
    """One action of the allocator: alloc, free_requested, free_completed, segment_alloc, segment_free… Bytes."""

    action: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Recording:
    """What a snapshot's history holds for one device."""

    entries: tuple[Entry, ...]
    settings: Settings

    @property
    def segments(self) -> list[tuple[str, int]]:
        """("alloc" or "free", bytes) of each segment in order; with expandable segments, of each mapping."""
        kinds = {"segment_alloc": "alloc", "segment_map": "alloc", "segment_free": "free", "segment_unmap": "free"}
        return [(kinds[e.action], e.nbytes) for e in self.entries if e.action in kinds]


@dataclass
class Replayed:
    """A recording run through the simulator, and how its segments compare with the recorded ones."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    unknown_frees: int  # of what was allocated before the recording began: start it before the first allocation
    recorded_segments: list[tuple[str, int]]
    simulated_segments: list[tuple[str, int]]
    out_of_memory_at: int | None = None
    first_difference: int | None = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.recorded_segments, self.simulated_segments, strict=False)
        different = next((i for i, (recorded, simulated) in enumerate(pairs) if recorded != simulated), None)
        if different is None and len(self.recorded_segments) != len(self.simulated_segments):
            different = min(len(self.recorded_segments), len(self.simulated_segments))
        self.first_difference = different


# -- reading -----------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, tuples, texts and numbers need no class; whatever asks for one is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise ValueError(f"it wants to load {module_name}.{global_name}, which a memory snapshot has no need of")


def read(path: Path, device: int = 0) -> Recording:
    """The history of one device. Raises ValueError with a sentence for what is no snapshot, OSError as open()."""
    try:
        data = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError, MemoryError) as error:
        raise ValueError(f"{path}: is no pickle of a memory snapshot ({type(error).__name__})") from None
    return of_snapshot(data, str(path), device)


def of_snapshot(data: Any, name: str = "snapshot", device: int = 0) -> Recording:
    """The same from the dict that torch.cuda.memory._snapshot() returns. Raises ValueError."""
    traces = data.get("device_traces") if isinstance(data, dict) else None
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise ValueError(
            f"{name}: has no device_traces; record a history with torch.cuda.memory._record_memory_history"
        )
    if device >= len(traces):
        raise ValueError(f"{name}: has {len(traces)} devices, counted from 0; device {device} is not among them")
    entries = []
    for item in traces[device]:
        try:
            entries.append(Entry(str(item["action"]), int(item.get("addr", 0)), int(item["size"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{name}: entry {len(entries)} of its history has no action, address or size") from None
    settings = data.get("allocator_settings")
    return Recording(tuple(entries), _settings(settings if isinstance(settings, dict) else {}))


def _settings(values: dict[str, Any]) -> Settings:
    """From allocator_settings, as memory_snapshot.cpp writes them: sizes in bytes, -1 for no limit."""
    split = values.get("max_split_size", -1)
    options: dict[str, Any] = {"expandable_segments": bool(values.get("expandable_segments", False))}
    if isinstance(split, int) and split > 0:
        options["max_split_bytes"] = split
    threshold = values.get("garbage_collection_threshold", 0.0)
    if isinstance(threshold, float):
        options["garbage_collection_threshold"] = threshold
    return Settings(**options)


def replay(recording: Recording, limit_bytes: int | None = None) -> Replayed:
    """Ask the simulator for what the program asked for, in its order."""
    allocator = Allocator(recording.settings, limit_bytes, physical=True)
    completed = any(entry.action == "free_completed" for entry in recording.entries)
    frees = "free_completed" if completed else "free_requested"
    alive: dict[int, Block | None] = {}
    unknown, ended = 0, None
    for position, entry in enumerate(recording.entries):
        if entry.action == "alloc":
            try:
                alive[entry.address] = allocator.malloc(entry.nbytes)
            except OutOfMemory:
                ended = position
                break
        elif entry.action == frees:
            if entry.address in alive:
                allocator.free(alive.pop(entry.address))
            else:
                unknown += 1
    return Replayed(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, unknown, recording.segments,
        [(kind, nbytes) for kind, _, nbytes in allocator.segments], ended,
    )  # fmt: skip


# -- writing -----------------------------------------------------------------------------------------------


class Writer:
    """Builds a snapshot while a trace is replayed: give `watch` to exact.replay.replay, then `data`.

    `describe` gives an event's id the frames that memory_viz shows, innermost first.
    """

    def __init__(self, events: list[int], describe: Callable[[int], list[str]]) -> None:
        self.events, self.describe = events, describe
        self.history: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[Block, list[dict[str, Any]]]] = {}
        self.allocator: Allocator | None = None
        self._segments_seen = 0
        # Where each live allocation was made: a freed block's own address may have moved by merging.
        self._made: dict[int, tuple[int, int]] = {}

    def watch(self, position: int, allocator: Allocator, block: Block | None) -> None:
        """After each event."""
        self.allocator = allocator
        for kind, address, nbytes in allocator.segments[self._segments_seen :]:
            self._add(f"segment_{kind}", address, nbytes, [])
        self._segments_seen = len(allocator.segments)
        if block is None:
            return
        event = self.events[position]
        if event >= 0:
            frames = [{"name": name, "filename": "foretrain", "line": 0} for name in self.describe(event)]
            self.alive[event] = (block, frames)
            self._made[event] = (block.ptr, block.requested)
            self._add("alloc", block.ptr, block.requested, frames)
        else:
            _, frames = self.alive.pop(~event)
            address, nbytes = self._made.pop(~event)
            self._add("free_requested", address, nbytes, frames)
            self._add("free_completed", address, nbytes, frames)

    def _add(self, action: str, address: int, nbytes: int, frames: list[dict[str, Any]]) -> None:
        self.history.append(
            {
                "action": action, "addr": address, "size": nbytes, "stream": 0, "frames": frames,
                "time_us": len(self.history), "compile_context": "N/A", "user_metadata": "",
            }
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        """The snapshot: history, segments as they are at the end, settings."""
        settings = self.allocator.settings if self.allocator else Settings()
        return {
            "segments": self._segments(),
            "device_traces": [self.history],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": settings.text(),
                "max_split_size": -1 if settings.max_split_is_unlimited else settings.max_split_bytes,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
            },
            "external_annotations": [],
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """As a pickle, under its name only when whole. Raises OSError."""
        staging = path.with_name(path.name + ".part")
        staging.write_bytes(pickle.dumps(self.data()))
        staging.replace(path)

    def _segments(self) -> list[dict[str, Any]]:
        if self.allocator is None:
            return []
        live = _live_segments(self.allocator.segments, join=self.allocator.settings.expandable_segments)
        starts = sorted(live)
        blocks: dict[int, list[dict[str, Any]]] = {start: [] for start in starts}
        small: set[int] = set()
        used = {block.ptr: (block, frames) for block, frames in self.alive.values()}
        free = [block for pool in (self.allocator.small, self.allocator.large) for block in pool.blocks.values()]
        for block in [*(block for block, _ in used.values()), *free]:
            start = starts[bisect_right(starts, block.ptr) - 1]
            frames = used[block.ptr][1] if block.used else []
            blocks[start].append(
                {
                    "address": block.ptr, "size": block.size, "requested_size": block.requested if block.used else 0,
                    "state": "active_allocated" if block.used else "inactive", "frames": frames,
                }
            )  # fmt: skip
            if block.pool.small:
                small.add(start)
        return [self._segment(s, live[s], sorted(blocks[s], key=_address), s in small) for s in starts]

    def _segment(self, address: int, nbytes: int, blocks: list[dict[str, Any]], small: bool) -> dict[str, Any]:
        active = [block for block in blocks if block["state"] == "active_allocated"]
        allocated = sum(block["size"] for block in active)
        return {
            "device": 0, "address": address, "total_size": nbytes, "allocated_size": allocated,
            "active_size": allocated, "requested_size": sum(block["requested_size"] for block in active), "stream": 0,
            "segment_type": "small" if small else "large", "segment_pool_id": (0, 0),
            "is_expandable": bool(self.allocator and self.allocator.settings.expandable_segments), "frames": [],
            "blocks": blocks,
        }  # fmt: skip


def _address(block: dict[str, Any]) -> int:
    return block["address"]


def _live_segments(log: list[tuple[str, int, int]], *, join: bool) -> dict[int, int]:
    """address -> bytes of what is reserved after a log of segments; `join`: mappings that touch are one."""
    pieces: dict[int, int] = {}
    for kind, address, nbytes in log:
        if kind == "alloc":
            pieces[address] = nbytes
            continue
        for start in [s for s, size in pieces.items() if s < address + nbytes and address < s + size]:
            size = pieces.pop(start)
            if start < address:
                pieces[start] = address - start
            if start + size > address + nbytes:
                pieces[address + nbytes] = start + size - address - nbytes
    if not join:
        return pieces
    joined: dict[int, int] = {}
    head = end = -1
    for start in sorted(pieces):
        head = head if start == end else start
        end = start + pieces[start]
        joined[head] = end - head
    return joined

"""A trace written as a memory snapshot, which https://pytorch.org/memory_viz and torch/cuda/_memory_viz.py open.

Addresses and segments are the simulator's; frames carry the names of tensors, so that the picture is of one's own
model. The format is that of torch/csrc/cuda/memory_snapshot.cpp, with the `category` of an allocation as in
_memory_viz.py's _profile_to_snapshot. Standard library only.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.lifetimes import Lifetimes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory

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

    def born(self, block: Block, label: Label) -> None:
        """A block was allocated."""
        frames = [{"name": name, "filename": "foretrain", "line": 0} for name in (label.name, *label.frames)]
        values = {"frames": frames, "addr": block.ptr, "size": block.requested, "stream": block.stream}
        self._alive[block.ptr] = values
        self._add("alloc", **values, category=label.category)

    def died(self, address: int, block: Block) -> None:
        """The block that was allocated at this address was freed; it is complete when no other stream uses it."""
        values = self._alive.pop(address)
        self._add("free_requested", **values)
        if block.other_streams:
            self._pending.append((block, values))
        else:
            self._add("free_completed", **values)

    def driver(self) -> None:
        """Take over what the allocator did by itself since the last time: frees that other streams held back, and what
        it got from the driver and gave back."""
        for block, values in self._pending:
            if not block.other_streams:
                self._add("free_completed", **values)
        self._pending = [held for held in self._pending if held[0].other_streams]
        for kind, address, nbytes, stream in self.allocator.segments[self._segments_seen :]:
            values = {"frames": [], "addr": address, "size": nbytes, "stream": stream}
            self._add(f"segment_{kind}", **values, category=UNKNOWN_CATEGORY)
        self._segments_seen = len(self.allocator.segments)

    def ran_out(self, error: OutOfMemory) -> None:
        """A request was refused."""
        free_bytes = max(0, error.limit_bytes - error.reserved_bytes)
        self._add("oom", device_free=free_bytes, size=error.requested_bytes, stream=0, frames=[])

    def _add(self, action: str, **values: Any) -> None:
        rest = {"time_us": len(self.entries), "compile_context": "N/A", "user_metadata": ""}
        self.entries.append({"action": action, **values, **rest})

    def data(self) -> dict[str, Any]:
        """The snapshot: history, segments as they are now, settings."""
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
    """Lifetimes as a snapshot; the other arguments are those of `replay`.

    `label` says what memory_viz shows of a storage, by its id. A limit that is hit ends the history with an oom.
    """
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
            history.born(block, label(event))
        else:
            history.died(addresses.pop(~event), block)

    result = replay(lifetimes, settings, limit_bytes, physical=physical, watch=watch)
    history = history or History(result.allocator)
    history.driver()
    if result.out_of_memory is not None:
        history.ran_out(result.out_of_memory)
    return history.data()


def write(snapshot: dict[str, Any], path: Path) -> None:
    """As a pickle, under its name only when whole; nothing else is left behind. Raises OSError."""
    staging = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with staging.open("xb") as file:
            file.write(pickle.dumps(snapshot))
        staging.replace(path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise

"""Random programs of allocations on several streams, and what the simulator says of each. No torch.

tests/cuda_build/streams.py runs the same programs in PyTorch's CUDA build and writes down what its allocator did.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from foretrain.base.units import MIB
from foretrain.predict.allocator.blocks import Block
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator, OutOfMemory

Event = tuple[str, int, int]  # as tests.kit.lifetimes.Event, with numbers as ids


@dataclass
class Outcome:
    """What an allocator did: after each event its bytes (as `counts` gives them), all that it took from the driver and
    gave back in order, and its counters. A request that is refused leaves everything as it is."""

    allocated: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    segments: list[tuple[str, int]] = field(default_factory=list)
    retries: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Program:
    """Events, the allocator's settings, and the limit: the card's memory in MiB, and a share of it as a cap."""

    events: list[Event]
    settings: str = ""
    memory_mib: int = 0
    fraction: float = 1.0


# Settings, memory and cap; 0: as much as there is. Every way to make room is among them.
WAYS: tuple[tuple[str, int, float], ...] = (
    ("", 0, 1.0),
    ("expandable_segments:True", 0, 1.0),
    ("", 800, 1.0),
    ("expandable_segments:True", 800, 1.0),
    ("", 2000, 0.25),
    ("expandable_segments:True", 2000, 0.25),
    ("max_split_size_mb:24", 800, 1.0),
    ("garbage_collection_threshold:0.6", 2000, 0.25),
)


def random_program(seed: int, way: tuple[str, int, float], length: int, streams: int) -> Program:
    draw = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    while len(events) < length:
        chance = draw.random()
        if chance < 0.25 and streams > 1:
            events.append(("stream", draw.randrange(streams), 0))
        elif chance < 0.32 and live:
            events.append(("record_stream", draw.choice(live), draw.randrange(streams)))
        elif chance < 0.33:
            events.append(("empty_cache", 0, 0))
        elif chance < 0.62 and len(live) > 3:
            events.append(("free", live.pop(draw.randrange(len(live))), 0))
        else:
            live.append(len(events))
            events.append(("alloc", len(events), _size(draw)))
    return Program(events, *way)


def _size(draw: random.Random) -> int:
    """Bytes, of each kind of request that the allocator knows."""
    low, high = draw.choice([(1, 4096), (4096, MIB), (MIB, 10 * MIB), (10 * MIB, 30 * MIB), (30 * MIB, 90 * MIB)])
    return draw.randint(low, high)


def run(program: Program, do: Callable[[Event], bool], counts: Callable[[], tuple[int, int, int]]) -> Outcome:
    outcome = Outcome()
    gone: set[int] = set()
    for event in program.events:
        kind, id, _ = event
        if not (kind in ("free", "record_stream") and id in gone) and not do(event):
            gone.add(id)
            outcome.refused += 1
        allocated, active, reserved = counts()
        outcome.allocated.append(allocated)
        outcome.active.append(active)
        outcome.reserved.append(reserved)
    return outcome


def simulate(program: Program, memory_bytes: int, free_bytes: int) -> Outcome:
    """The program in the simulator, on a card of so much memory of which so much is free."""
    settings = Settings.parse(program.settings)
    cap_bytes = int(program.fraction * memory_bytes) if program.fraction < 1 else None
    allocator = Allocator(settings, free_bytes, physical=True, cap_bytes=cap_bytes)
    blocks: dict[int, Block | None] = {}
    stream = 0

    def do(event: Event) -> bool:
        nonlocal stream
        kind, id, number = event
        if kind == "alloc":
            try:
                blocks[id] = allocator.malloc(number, stream)
            except OutOfMemory:
                return False
        elif kind == "free":
            allocator.free(blocks.pop(id))
        elif kind == "record_stream":
            allocator.record_stream(blocks[id], number)
        elif kind == "stream":
            stream = id
        else:
            allocator.empty_cache()
        return True

    outcome = run(program, do, lambda: (allocator.allocated_bytes, allocator.active_bytes, allocator.reserved_bytes))
    outcome.segments = [(kind, nbytes) for kind, _, nbytes, _ in allocator.segments]
    outcome.retries = allocator.num_alloc_retries
    return outcome


def differences(simulated: Outcome, measured: dict[str, Any]) -> list[str]:
    found = []
    for name, ours in asdict(simulated).items():
        theirs = measured[name]
        if not isinstance(ours, list):
            ours, theirs = [ours], [theirs]
        ours, theirs = [_plain(each) for each in ours], [_plain(each) for each in theirs]
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            ours, theirs = (len(ours), len(theirs)) if at < 0 else (ours[at], theirs[at])
            found.append(f"{name} {f'at {at}' if at >= 0 else 'in number'}: {ours} simulated, {theirs} measured")
    return found


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

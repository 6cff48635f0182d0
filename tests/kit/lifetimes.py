"""Programs of allocations, written down as tuples with names, as lifetimes that are replayed."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretrain.predict.allocator.blocks import Block, Lifetimes, Mark
from foretrain.predict.allocator.replay import Replay, replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.allocator.simulator import Allocator
from foretrain.predict.snapshot import Label, snapshot_of


class Event(NamedTuple):
    """("alloc", id, bytes), ("free", id, 0), ("phase", its name, 0) or ("empty_cache", None, 0).

    ("stream", a number, 0): what follows is allocated on that stream; at first it is the default stream, 0.
    ("record_stream", id, stream): that stream uses it, too. An id may come again after it was freed.
    """

    kind: str
    id: Hashable = None
    nbytes: int = 0


Events = Iterable[tuple[str, Any, int]]


def lifetimes_of(events: Events) -> tuple[Lifetimes, list[Hashable]]:
    made: list[int] = []
    sizes: list[int] = []
    names: list[Hashable] = []
    alive: dict[Hashable, int] = {}
    phases: list[Mark] = []
    emptied: list[int] = []
    streams: dict[int, int] = {}
    used_on: dict[int, tuple[int, ...]] = {}
    stream = 0
    for kind, id, number in events:
        if kind == "alloc":
            assert id not in alive
            alive[id], streams[len(sizes)] = len(sizes), stream
            made.append(len(sizes))
            sizes.append(number)
            names.append(id)
        elif kind == "free":
            made.append(~alive.pop(id))
        elif kind == "stream":
            stream = id
        elif kind == "record_stream":
            used_on[alive[id]] = (*used_on.get(alive[id], ()), number)
        elif kind == "phase":
            phases.append(Mark(len(made), str(id)))
        else:
            assert kind == "empty_cache"
            emptied.append(len(made))
    return Lifetimes(made, sizes, phases, streams, used_on, emptied), names


@dataclass(frozen=True)
class Played:
    replay: Replay
    allocated_bytes: list[int]
    reserved_bytes: list[int]


def played(
    events: Events, settings: Settings | None = None, limit_bytes: int | None = None, *, physical: bool = False
) -> Played:
    allocated: list[int] = []
    reserved: list[int] = []

    def watch(position: int, allocator: Allocator, block: Block | None) -> None:
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)

    found = replay(lifetimes_of(events)[0], settings, limit_bytes, physical=physical, watch=watch)
    return Played(found, allocated, reserved)


def replayed(
    events: Events, settings: Settings | None = None, limit_bytes: int | None = None, *, physical: bool = False
) -> Replay:
    """Events, replayed without looking at each."""
    return replay(lifetimes_of(events)[0], settings, limit_bytes, physical=physical)


def export(
    events: Events,
    labels: Mapping[Any, Label],
    settings: Settings | None = None,
    limit_bytes: int | None = None,
    *,
    physical: bool = False,
) -> dict[str, Any]:
    lifetimes, names = lifetimes_of(events)
    label = lambda id: labels.get(names[id]) or Label(str(names[id]))  # noqa: E731
    return snapshot_of(lifetimes, label, settings, limit_bytes, physical=physical)

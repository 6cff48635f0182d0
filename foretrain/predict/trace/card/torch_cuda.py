"""torch.cuda as the card answers it: nothing runs; memory statistics are the trace's, by the simulated allocator."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.accelerator
import torch.cuda.graphs
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.cuda.random
import torch.cuda.streams
from torch import Tensor

from foretrain.base.units import MIB
from foretrain.hardware.catalogue import Gpu
from foretrain.predict import software
from foretrain.predict.allocator.blocks import GRAPH_POOL
from foretrain.predict.allocator.replay import Player
from foretrain.predict.allocator.simulator import Allocator
from foretrain.predict.estimate.kernel_buffers import Processors
from foretrain.predict.snapshot import UNKNOWN_CATEGORY, History, Label
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.streams import Event, Stream, Streams
from foretrain.predict.trace.record import Recorder

SEEDS = 2  # a generator's seed and offset, 8 bytes each (CUDAGeneratorImpl.cpp)
# Where a function of torch.cuda may be found by its name.
MODULES = (
    torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.nvtx, torch.cuda.random, torch.cuda.streams,
)  # fmt: skip


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    cache_bytes: int = 32 * MIB  # L2

    @classmethod
    def of(cls, gpu: Gpu) -> "Card":
        return cls(gpu.name, gpu.capability, gpu.sm_count or 1, gpu.memory_bytes or 1 << 34, gpu.cache_bytes)

    @property
    def processors(self) -> Processors:
        return Processors.of(self.capability, self.sm_count)

    def properties(self) -> SimpleNamespace:
        major, minor = self.capability
        shared = {(7, 5): 65536, (8, 0): 166912, (9, 0): 232448, (10, 0): 232448}.get(self.capability, 101376)
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_bytes, warp_size=32,
            multi_processor_count=self.sm_count, regs_per_multiprocessor=65536, is_integrated=0, is_multi_gpu_board=0,
            max_threads_per_multi_processor=self.processors.threads, max_threads_per_block=1024, gcnArchName="",
            shared_memory_per_block=49152, shared_memory_per_block_optin=shared,
            shared_memory_per_multiprocessor=shared + 1024, L2_cache_size=self.cache_bytes,
        )  # fmt: skip


@dataclass
class Recorded:
    start: int | None = None  # the position of the first recorded event; None where none is
    end: int | None = None
    _events: list[int] = field(default_factory=list)

    def ask(self, record: Recorder | None, enabled: Any) -> None:
        """_record_memory_history(enabled=…): None ends the history, which stays."""
        position = len(record.events) if record is not None else 0
        if enabled is None:
            self.end = position
        elif self.start is None or self.end is not None:
            self.start, self.end = position, None

    def snapshot(self, record: Recorder | None) -> dict[str, Any]:
        """torch.cuda.memory._snapshot(): segments as they are, and the recorded history."""
        player = Player(record or Recorder())
        history = History(player.allocator)
        start = end = 0
        for position, event in enumerate(record.events if record is not None else ()):
            if position == self.start:
                start = len(history.entries)
            assert record is not None
            dying = player.blocks.get(~event)
            address = dying.ptr if dying is not None else 0
            block = player.play(event)
            history.driver()
            if block is not None and event >= 0:
                history.allocate(block, _label(record, event))
            elif block is not None:
                history.free(address, block)
            if self.end is None or position < self.end:
                end = len(history.entries)
        data = history.data()
        data["device_traces"] = [history.entries[start:end] if self.start is not None else []]
        return data


def _label(record: Recorder, id: int) -> Label:
    op, module, shape, dtype = record.labels[id]
    category, name = record.tags.get(id, (UNKNOWN_CATEGORY, ""))
    made = f"{record.names.get(id, op)} {list(shape)} {dtype}"
    return Label(name or made, category, tuple(line for line in (made if name else "", module) if line))


@dataclass
class Memory:
    """The card's memory while the code runs: the events so far, through the simulated allocator."""

    card: Card
    record: Recorder | None = None
    recorded: Recorded = field(default_factory=Recorded)
    streams: Streams = field(default_factory=Streams)
    fraction: float = 1.0
    # Called when the program resets its peaks: a new phase begins.
    at_reset: Callable[[], None] = lambda: None
    _player: Player | None = None
    _position: int = 0

    def now(self) -> Allocator:
        record = self.record or Recorder()
        if self._player is None or self._player.lifetimes is not record:
            self._player, self._position = Player(record), 0
        for event in record.events[self._position :]:
            self._player.play(event)
        self._position = len(record.events)
        return self._player.allocator

    def stats(self, device: object = None) -> Counter[str]:
        """torch.cuda.memory_stats; what the simulator does not count is 0."""
        return Counter(self.now().memory_stats())

    def nested_stats(self, device: object = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in self.stats().items():
            *path, last = key.split(".")
            inner = found
            for name in path:
                inner = inner.setdefault(name, {})
            inner[last] = value
        return found

    def reset_peak(self, device: object = None) -> None:
        self.now().reset_peak()
        self.at_reset()

    def ask_history(self, enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
        self.recorded.ask(self.record, enabled)

    def snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.recorded.snapshot(self.record)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache: whole free segments go back to the card, here and in a replay."""
        self.now().empty_cache()
        if self.record is not None:
            self.record.empty_cache()

    def alloc(self, nbytes: int, device: object = None, stream: Any = None) -> int:
        """torch.cuda.caching_allocator_alloc: the address is the allocation's number, from 1 on."""
        assert self.record is not None
        id = self.record.alloc(nbytes, "caching_allocator_alloc", "", (nbytes,), "uint8")
        if stream is not None:
            self.record.streams[id] = getattr(stream, "cuda_stream", stream)
        return 1 + id

    def delete(self, address: int) -> None:
        assert self.record is not None
        self.record.free(address - 1)

    def set_fraction(self, fraction: float, device: object = None) -> None:
        self.fraction = fraction

    def info(self, device: object = None) -> tuple[int, int]:
        """Return (free, total) as torch.cuda.mem_get_info does, without the CUDA context."""
        return max(self.card.memory_bytes - self.now().reserved_bytes, 0), self.card.memory_bytes


class Generator(torch.Generator):
    """A random generator of any device: its state is on the host anyway, and fake tensors draw nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Generator":  # noqa: ARG004  # __init__ reads them
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def clone_state(self) -> "Generator":
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Any) -> "Generator":
        return self

    def get_state(self) -> Tensor:
        return torch.empty(16, dtype=torch.uint8)

    def set_state(self, state: Any) -> "Generator":
        return self


def _always(value: Any) -> Callable[..., Any]:
    """Return a new function for each use: Dynamo keeps rules by function."""
    return lambda *args, **kwargs: value


def _is_available() -> bool:
    """Return False to torch itself, which would start CUDA; what it does without a card is corrected in standin.py."""
    return str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] != "torch"


def _about_memory(memory: Memory) -> dict[str, Any]:
    summary = torch.cuda.memory.memory_summary
    return {
        "memory_stats_as_nested_dict": memory.nested_stats, "host_memory_stats": lambda: Counter[str](),
        "host_memory_stats_as_nested_dict": dict[str, Any], "get_allocator_backend": _always("native"),
        "caching_allocator_alloc": memory.alloc, "caching_allocator_delete": memory.delete,
        "set_per_process_memory_fraction": memory.set_fraction,
        "get_per_process_memory_fraction": lambda device=None: memory.fraction,
        "device_memory_used": lambda device=None: memory.now().reserved_bytes,
        "list_gpu_processes": lambda device=None: f"GPU:0\nprocess {os.getpid():>10d} uses "
        f"{memory.now().reserved_bytes / MIB:>12.3f} MB GPU memory",
        "memory_stats": memory.stats, "mem_get_info": memory.info,
        "reset_peak_memory_stats": memory.reset_peak, "reset_max_memory_allocated": memory.reset_peak,
        "reset_max_memory_cached": memory.reset_peak,
        "memory_summary": lambda device=None, abbreviated=False: summary(0, abbreviated),
    }  # fmt: skip


def answer_as(patches: Patches, card: Card) -> Memory:
    memory = Memory(card)

    Stream.made.clear()
    streams = memory.streams
    on_stream = streams.context()
    answers: dict[str, Any] = {
        "is_available": _is_available, "device_count": _always(1), "current_device": _always(0),
        "get_device_name": _always(card.name), "get_device_capability": _always(card.capability),
        "get_device_properties": lambda device=None: card.properties(),
        # Emulated counts too, unless one asks without.
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "is_tf32_supported": _always(card.capability >= (8, 0)),
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "can_device_access_peer": _always(False), "is_current_stream_capturing": _always(False),
        "_exchange_device": _always(0), "_maybe_exchange_device": _always(0),
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"), _always(0)),
        "empty_cache": memory.empty_cache, **_about_memory(memory),
        "default_generators": (Generator("cuda:0"),), "set_rng_state": _always(None),
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "Stream": Stream, "Event": Event, "StreamContext": on_stream, "stream": on_stream,
        "current_stream": lambda device=None: Stream(stream_id=streams.now()), "set_stream": streams.choose,
        "default_stream": lambda device=None: Stream(stream_id=0), "CUDAGraph": graph_class(streams, memory.alloc),
    }  # fmt: skip
    silent = (
        "init", "_lazy_init", "_lazy_call", "set_device", "synchronize", "ipc_collect",
        "reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
        "_sleep", "range_push", "range_pop", "mark", "_set_allocator_settings", "_set_memory_metadata",
    )  # fmt: skip
    for name, answer in {**answers, **{name: _always(None) for name in silent}}.items():
        patches.set_everywhere(MODULES, name, answer)
    accelerator = (torch.accelerator, *([torch.accelerator.memory] if hasattr(torch.accelerator, "memory") else []))
    names = ("is_available", "device_count", "empty_cache", "synchronize", "memory_stats", "reset_peak_memory_stats")
    for name in names:
        patches.set_everywhere(accelerator, name, answers.get(name, _always(None)))
    patches.set_everywhere(accelerator, "current_device_index", _always(0))
    patches.set_everywhere(accelerator, "set_device_index", _always(None))
    for name in ("start", "stop"):
        patches.set(torch.cuda.profiler, name, _always(None))
    patches.set(torch._C, "_host_emptyCache", _always(None))
    patches.set(torch._C, "_cuda_record_memory_history", memory.ask_history)
    patches.set(torch._C, "_cuda_memorySnapshot", memory.snapshot)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda device: streams.now())  # bitsandbytes takes it at import
    patches.set(torch, "Generator", Generator)
    return memory


def graph_class(streams: Streams, alloc: Callable[..., object]) -> type:
    """Return a stand-in for torch.cuda.CUDAGraph: allocations between capture_begin and capture_end belong to the
    graph's pool, in every thread (c10/cuda/CUDACachingAllocator.cpp, beginAllocateToPool)."""
    made, of_each = [0], (software.parse(torch.__version__) or software.ASSUMED).seeds_each_graph

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._pool, self._before = 0, 0

        def capture_begin(self, pool: tuple[int, int] | None = None, **_options: object) -> None:
            for _ in range(SEEDS if of_each or not made[0] else 0):
                alloc(8, stream=0 if of_each else streams.now())
            if pool is None:
                made[0] += 1
            self._pool = pool[1] if pool else made[0]
            self._before = streams.now()
            streams.choose_number(self._pool * GRAPH_POOL + self._before)

        def capture_end(self) -> None:
            streams.choose_number(self._before)

        def pool(self) -> tuple[int, int]:
            return (0, self._pool)

        def replay(self) -> None: ...

        instantiate = reset = replay

    return Graph

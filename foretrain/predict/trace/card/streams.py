"""torch.cuda's streams on a stand-in card: an op allocates on its stream, in a backward pass on that of its forward op,
as the engine switches to it (torch/csrc/autograd/engine.cpp, evaluate_function)."""

from bisect import bisect_right
from typing import Any, ClassVar

import torch

from foretrain.predict.trace.record import Recorder

CUDA = 1  # c10/core/DeviceType.h
STREAMS_IN_POOL = 32  # kStreamsPerPool (c10/cuda/CUDAStream.cpp): then they are reused in turn
NOT_COUNTED = 2**64 - 1  # the sequence number of a node that accumulates a gradient


class Stream(torch.Stream):
    """A stream by its number: 0 is the default one."""

    made: ClassVar[dict[bool, int]] = {}  # how many, those of high priority and others

    def __new__(
        cls,
        device: Any = None,  # noqa: ARG004
        priority: int = 0,
        stream_id: int | None = None,
        **_: Any,
    ) -> "Stream":
        if stream_id is None:
            count = cls.made.get(priority < 0, 0)
            cls.made[priority < 0] = count + 1
            stream_id = 1 + count % STREAMS_IN_POOL + (STREAMS_IN_POOL if priority < 0 else 0)
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=CUDA)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    wait = record

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0  # milliseconds; not 0, by which speeds are divided


class Streams:
    def __init__(self) -> None:
        self._used = False
        self._chosen = 0  # outside of nodes' backwards
        self._in_node = (-1, 0)  # a node's sequence number, and what was chosen while its backward ran
        # (the next node's sequence number, the stream) at each choice: nodes run on their forward op's stream.
        self._since: list[tuple[int, int]] = []

    def now(self) -> int:
        number = _node() if self._used else -1
        if number == self._in_node[0]:
            return self._in_node[1]
        if number < 0 or number == NOT_COUNTED:
            return self._chosen
        position = bisect_right(self._since, number, key=lambda since: since[0]) - 1
        return self._since[position][1] if position >= 0 else 0

    def choose(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            self.choose_number(stream.stream_id)

    def choose_number(self, stream: int) -> None:
        """torch.cuda.set_stream by its number, which may be one of a graph's pool."""
        self._used = True
        number = _node()
        if number >= 0:  # the choice ends with the node
            self._in_node = number, stream
        else:
            self._chosen, self._in_node = stream, (-1, stream)
            self._since.append((torch._C._autograd._get_sequence_nr(), stream))  # type: ignore[attr-defined]

    def context(self) -> type:
        """Return the class of torch.cuda.stream(...). A class, as Dynamo asks for instances of it."""
        streams = self

        class OnStream:
            def __init__(self, stream: torch.Stream | None = None) -> None:
                self.stream, self.before = stream, 0

            def __enter__(self) -> None:
                self.before = streams.now()
                streams.choose(self.stream)

            def __exit__(self, *error: object) -> None:
                if self.stream is not None:
                    streams.choose_number(self.before)

        return OnStream


def _node() -> int:
    """Return the sequence number of the node whose backward runs; -1 where none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def record_stream(record: Recorder, id: int | None, stream: torch.Stream) -> None:
    if id is not None:
        record.use(id, stream.stream_id)

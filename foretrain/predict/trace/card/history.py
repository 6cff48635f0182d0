"""torch.cuda.memory's snapshots during a trace: its allocations so far, as memory_viz shows them."""

from dataclasses import dataclass, field
from typing import Any

from foretrain.predict.allocator.replay import Player
from foretrain.predict.snapshot.write import UNKNOWN_CATEGORY, History, Label
from foretrain.predict.trace.record import Recorder


@dataclass
class Recorded:
    """What _record_memory_history has asked for, and the snapshot that _snapshot gives of it."""

    start: int | None = None  # the position of the first event that is asked for; None where none is
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
        """As torch.cuda.memory._snapshot() gives it: segments as they are, and the history that was asked for."""
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
                history.born(block, _label(record, event))
            elif block is not None:
                history.died(address, block)
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

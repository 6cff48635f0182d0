"""What a trace of any code answers, and why there may be none. No torch."""

from dataclasses import dataclass, replace
from typing import Any

from foretrain.base.units import format_bytes
from foretrain.hardware.catalogue import Gpu, find
from foretrain.predict.allocator.replay import Replay, smallest_limit_bytes
from foretrain.predict.allocator.replay import replay as replayed
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.trace import versions
from foretrain.predict.trace.record import Trace


class StandInError(RuntimeError):
    """This torch, system or card cannot be stood in for; the sentence says why."""


@dataclass(frozen=True)
class Traced:
    """A finished trace with its replays. Bytes. `notes` say what it leaves out, a sentence each.

    Where only the card knows what something takes, this is the lower end and `high` the same code with the upper end.
    """

    trace: Trace
    gpu: Gpu
    notes: tuple[str, ...] = ()
    high: "Traced | None" = None

    def with_versions(self, trains: str) -> "Traced":
        """With notes on what the torch that trains is known to allocate otherwise; '' is not known."""
        return replace(self, notes=(*self.notes, *versions.notes(self.trace, trains)))

    def __repr__(self) -> str:
        return f"<trace on {self.gpu.name}: {format_bytes(self.peak_allocated_bytes)} allocated at the peak>"

    def __str__(self) -> str:
        found = self.replay()
        high = self.high or self
        most = high.replay()
        ends = {phase.phase: phase.allocated_bytes for phase in most.phases}
        peaks = [f"  {p.phase:<24} {_range(p.allocated_bytes, ends.get(p.phase, 0)):>12}" for p in found.phases]
        lines = (
            f"Traced on {self.gpu.name} with torch {self.trace.facts['torch']}: "
            f"{_range(found.peak_allocated_bytes, most.peak_allocated_bytes)} allocated, "
            f"{_range(found.peak_reserved_bytes, most.peak_reserved_bytes)} reserved at the peak; "
            f"runs with {_range(self.smallest_limit_bytes, high.smallest_limit_bytes)} reserved or more",
            *peaks,
            *(f"Note: {note}" for note in self.notes),
        )
        return "\n".join(lines)

    def replay(self, limit_bytes: int | None = None, settings: Settings | None = None) -> Replay:
        """Through the allocator, under a limit of reserved bytes or none."""
        return replayed(self.trace, settings, limit_bytes, physical=True)

    @property
    def peak_allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        return self.replay().peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """What torch.cuda.max_memory_reserved would say with all memory there is."""
        return self.replay().peak_reserved_bytes

    @property
    def smallest_limit_bytes(self) -> int:
        """The least reserved memory under which it lives."""
        return smallest_limit_bytes(self.trace, physical=True)

    def fits(self, limit_bytes: int, settings: Settings | None = None) -> bool:
        """Whether it lives with so many bytes for the allocator, the CUDA context not included; at the upper end."""
        return (self.high or self).replay(limit_bytes, settings).survives


def _range(low: int, high: int) -> str:
    """5.2 GiB, or 5.2 GiB to 5.9 GiB."""
    return " to ".join(dict.fromkeys((format_bytes(low), format_bytes(high))))


def card_of(gpu: str | Gpu) -> Gpu:
    """The card to trace on. Raises StandInError for what is not a CUDA card."""
    if isinstance(gpu, Gpu):
        card = gpu
    else:
        kind: Any = gpu.strip().lower()
        card = Gpu(name=gpu, kind=kind) if kind in ("cpu", "mps") else find(gpu)
    if card.kind != "cuda":
        raise StandInError(f"{card.name} is not a CUDA card, and a trace is of one: gpu='RTX 4070', for example")
    return card

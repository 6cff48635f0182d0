"""What a trace of any code answers, and why there may be none. No torch."""

from dataclasses import dataclass

from foretrain.hardware import Gpu
from foretrain.predict.allocator_settings import Settings
from foretrain.predict.exact.record import Trace
from foretrain.predict.exact.replay import Replay, replay, smallest_limit_bytes
from foretrain.units import format_bytes


class StandInError(RuntimeError):
    """This torch, system or card cannot be stood in for; the sentence says why."""


@dataclass(frozen=True)
class Traced:
    """A finished trace with its replays. Bytes. `notes` say what it leaves out, a sentence each."""

    trace: Trace
    gpu: Gpu
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<trace on {self.gpu.name}: {format_bytes(self.peak_allocated_bytes)} allocated at the peak>"

    def __str__(self) -> str:
        found = self.replay()
        peaks = [f"  {phase.phase:<24} {format_bytes(phase.allocated_bytes):>12}" for phase in found.phases]
        lines = (
            f"Traced on {self.gpu.name}: {format_bytes(found.peak_allocated_bytes)} allocated, "
            f"{format_bytes(found.peak_reserved_bytes)} reserved at the peak; "
            f"runs with {format_bytes(self.smallest_limit_bytes)} reserved or more",
            *peaks,
            *(f"Note: {note}" for note in self.notes),
        )
        return "\n".join(lines)

    def replay(self, limit_bytes: int | None = None, settings: Settings | None = None) -> Replay:
        """Through the allocator, under a limit of reserved bytes or none."""
        return replay(self.trace, settings, limit_bytes, physical=True)

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
        """Whether it lives with so many bytes for the allocator, the CUDA context not included."""
        return self.replay(limit_bytes, settings).survives

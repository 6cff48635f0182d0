"""The answer of a trace of any code, and why there may be none. No torch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from foretrain.base.units import format_bytes
from foretrain.hardware.catalogue import Gpu, find
from foretrain.predict.allocator.replay import Replay, smallest_limit_bytes
from foretrain.predict.allocator.replay import replay as replayed
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.trace import interpreter
from foretrain.predict.trace.record import Trace


class StandInError(RuntimeError):
    """This torch, system or card cannot be stood in for; the sentence says why."""


@dataclass(frozen=True)
class Traced:
    """A finished trace with its replays, in bytes. `notes`: what it leaves out, a sentence each; `high`: the same with
    the upper end of what only the card knows; `bound`: "at_least" where other values may take more."""

    trace: Trace
    gpu: Gpu
    notes: tuple[str, ...] = ()
    high: "Traced | None" = None
    bound: str = "exact"

    def with_versions(self, trains: str) -> "Traced":
        """Add notes on the known differences of the torch that trains; '' is unknown."""
        return replace(self, notes=(*self.notes, *interpreter.notes(self.trace, trains)))

    def __repr__(self) -> str:
        return f"<trace on {self.gpu.name}: {format_bytes(self.peak_allocated_bytes)} allocated at the peak>"

    def __str__(self) -> str:
        found = self.replay()
        high = self.high or self
        most = high.replay()
        ends = {phase.phase: phase.allocated_bytes for phase in most.phases}
        least = "" if self.bound == "exact" else "at least "
        peaks = [
            f"  {p.phase:<24} {_range(p.allocated_bytes, ends.get(p.phase, p.allocated_bytes)):>12}"
            for p in found.phases
        ]
        lines = (
            f"Traced on {self.gpu.name} with torch {self.trace.facts['torch']}: "
            f"{least}{_range(found.peak_allocated_bytes, most.peak_allocated_bytes)} allocated, "
            f"{least}{_range(found.peak_reserved_bytes, most.peak_reserved_bytes)} reserved at the peak; "
            f"runs with {least}{_range(self.smallest_limit_bytes, high.smallest_limit_bytes)} reserved or more",
            *peaks,
            *(f"Note: {note}" for note in self.notes),
        )
        return "\n".join(lines)

    def replay(self, limit_bytes: int | None = None, settings: Settings | None = None) -> Replay:
        return replayed(self.trace, settings, limit_bytes, physical=True)

    @property
    def peak_allocated_bytes(self) -> int:
        return self.replay().peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.replay().peak_reserved_bytes

    @property
    def smallest_limit_bytes(self) -> int:
        return smallest_limit_bytes(self.trace, physical=True)

    def fits(self, limit_bytes: int, settings: Settings | None = None) -> bool | None:
        """Return whether it runs in so many bytes without the CUDA context; None where `bound` leaves it open."""
        if not all(end.replay(limit_bytes, settings).survives for end in (self, self.high) if end):
            return False
        return True if self.bound == "exact" else None


def _range(low: int, high: int) -> str:
    """Format 5.2 GiB, or 5.2 GiB to 5.9 GiB; the upper end can be smaller at the peak of another moment."""
    return " to ".join(dict.fromkeys(map(format_bytes, sorted((low, high)))))


def call_with(code: Callable[..., object], given: object) -> object:
    """Call the traced function with `given`; one without parameters, as a script's main, with none."""
    try:
        asked = inspect.signature(code).parameters.values()
    except ValueError:  # a builtin's
        return code(given)
    many = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    needed = [each for each in asked if each.default is each.empty and each.kind not in many]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        name, names = getattr(code, "__name__", "the function"), ", ".join(each.name for each in needed)
        raise StandInError(
            f"{name} needs values for {names}, of which a trace has none: write a function without arguments that "
            f"calls {name} with them, and trace that one"
        )
    if needed or any(each.name == "on" or each.kind is each.VAR_POSITIONAL for each in asked):
        return code(given)
    return code()


def card_of(gpu: str | Gpu) -> Gpu:
    """Return the card to trace on. Raises StandInError for what is not a CUDA card."""
    if isinstance(gpu, Gpu):
        card = gpu
    else:
        kind: Any = gpu.strip().lower()
        card = Gpu(name=gpu, kind=kind) if kind in ("cpu", "mps") else find(gpu)
    if card.kind != "cuda":
        raise StandInError(f"{card.name} is not a CUDA card, and a trace is of one: gpu='RTX 4070', for example")
    return card

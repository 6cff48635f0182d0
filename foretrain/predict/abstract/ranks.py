"""How ranks that share a model change its passes. No torch.

torch/csrc/distributed/c10d/reducer.cpp: with gradient_as_bucket_view a gradient is copied into its bucket when it is
whole, and ends; but not before the last micro-batch of a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from foretrain.model.ranks.sharing import Sharing
from foretrain.predict.abstract.passage import Structure
from foretrain.predict.timeline import Tensor


class State(NamedTuple):
    """What a micro-batch finds: whether gradients are there, and whether it is the last of its step."""

    gradients: bool
    last: bool


FRESH = State(gradients=False, last=False)

Unrolled = Callable[[bool, State], Structure]


class Alone:
    """One card. Gradients stay until the step is done; `key`: what decides a pass besides its state."""

    key: Any = None

    def state(self, gradients: list[Tensor], last: bool) -> State:
        """As much of it as decides a pass."""
        return State(bool(gradients), False)

    def structure(self, unrolled: Unrolled, saving: bool, state: State) -> Structure:
        """The pass of all layers."""
        return unrolled(saving, state)


class Buckets(Alone):
    """DDP with gradients that are views of its buckets."""

    def state(self, gradients: list[Tensor], last: bool) -> State:
        return State(bool(gradients), last)

    def structure(self, unrolled: Unrolled, saving: bool, state: State) -> Structure:
        if not (saving and state.last):
            return unrolled(saving, state)
        kept = [n for n, _ in _gradients(unrolled(saving, State(False, False)))]
        later = unrolled(saving, State(True, False))  # each gradient ends as it is added to another one, or copied
        return _ended(later, kept) if state.gradients else later


def _gradients(first: Structure) -> list[tuple[int, Any]]:
    """(serial, size) of each that a pass leaves."""
    ended = {~event for event in first.events if event < 0}
    return [(n, kind) for n, kind in enumerate(first.kinds) if kind[0] == "gradients" and n not in ended]


def _ended(later: Structure, kept: list[int]) -> Structure:
    """A pass whose gradients are added to those of earlier ones, which end there."""
    old, shift = {serial: n for n, serial in enumerate(kept)}, len(kept)
    events: list[int] = []
    moments: list[str] = []
    places: list[int] = []  # of each event, in the new ones
    for event, moment in zip(later.events, later.moments, strict=True):
        places.append(len(events))
        events.append(event + shift if event >= 0 else event - shift)
        moments.append(moment)
        if event < 0 and ~event in old:
            events.append(~old[~event])
            moments.append(moment)
    return later._replace(
        events=events, moments=moments, split=places[later.split], given=shift,
        kinds=[("gradients", later.kinds[serial][1]) for serial in kept] + later.kinds,
        timed=[(places[at], tuple(n + shift for n in changed)) for at, changed in later.timed],
    )  # fmt: skip


def passes_of(sharing: Sharing | None) -> Alone:
    """What is known of the passes of a rank."""
    if sharing is None or sharing.way.shards_weights or not sharing.bucket_view:
        return Alone()
    return Buckets()

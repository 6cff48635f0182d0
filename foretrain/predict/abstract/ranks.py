"""Passes of ranks that share a model; FSDP2's are in fully_shard.py. No torch. With gradient_as_bucket_view a finished
gradient is copied into its bucket and ends, in the last micro-batch (torch/csrc/distributed/c10d/reducer.cpp). When
buckets are rebuilt, NCCL still has the old one (trace/ranks.py, Reducer)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from foretrain.base.units import MIB
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.passage import Recorder, Structure
from foretrain.predict.timeline import Passage, Tensor, Timeline

BUCKETS, MOMENTS = "buckets", "optimizer"
FIRST_BUCKET_BYTES = 1 * MIB  # torch/nn/parallel/distributed.py, dist._DEFAULT_FIRST_BUCKET_BYTES


class State(NamedTuple):
    """The state before a pass: gradients, whether it is the last micro-batch; `left`: tensors of earlier passes."""

    gradients: bool = False
    last: bool = False
    left: int = 0


FRESH = State()


class OneCard:
    """One card, whose gradients live until the step is done, unless it `sends` them; `key`: decides with State."""

    key: Any = None
    sends = False
    machine: type[m.Machine] = m.Machine
    on: Any = None  # the machine, once a model is built
    leaves: tuple[str, ...] = ()  # components of what passes leave besides gradients

    def state(self, gradients: list[Tensor], left: list[Tensor], *, last: bool, saving: bool) -> State:
        """Return the part of the state that decides a pass."""
        return State(gradients=bool(gradients))

    def recorder(self, recorded: Callable[[State], Recorder], state: State) -> Recorder:
        return recorded(FRESH).later() if state.gradients else recorded(FRESH)

    def structure(self, unrolled: Callable[[State], Structure], state: State) -> Structure:
        return unrolled(state)

    def sized(self, structure: Structure, state: State, t: Timeline) -> Passage:
        return structure.sized(t)

    def wrap(self, model: Any, machine: m.Machine) -> None:
        self.on = machine

    def begin(self, t: Recorder, state: State, *, saving: bool) -> None:
        """Begin to record a pass. Tensors that it finds and ends are allocated first; `given` counts them."""

    def end(self) -> None:
        pass

    def given(self, gradients: list[Tensor], left: list[Tensor], count: int) -> list[Tensor]:
        """Return the tensors of earlier passes that one with so many `given` ends, in its order."""
        return gradients[:count]


class Remains:
    """What passes leave for later ones: gradients, the workspaces of cuBLAS, and whatever else `ranks` leave."""

    def __init__(self, t: Timeline, ranks: OneCard) -> None:
        self.t, self.ranks = t, ranks
        self.gradients: list[Tensor] = []
        self.left: list[Tensor] = []
        self.workspaces: list[Tensor] = []  # the forward pass's first

    def given(self, passage: Passage) -> list[Tensor]:
        given = self.ranks.given(self.gradients, self.left, passage.given)
        ends = {tensor.serial for tensor in given}
        self.gradients = [tensor for tensor in self.gradients if tensor.serial not in ends]
        self.left = [tensor for tensor in self.left if tensor.serial not in ends]
        return given

    def keep(self, passage: Passage, *shifts: int) -> None:
        """Take what its parts left, played with these shifts."""
        second = passage.parts[1].first
        for serial in passage.left:
            component, size = passage.kinds[serial]
            kinds = (("gradients", self.gradients), ("workspace", self.workspaces))
            for name, kept in (*kinds, *((name, self.left) for name in self.ranks.leaves)):
                if component == name:
                    kept.append(self.t.adopt(component, size, serial + shifts[serial >= second]))

    def zero_grad(self) -> None:
        self.t.free(*self.gradients)
        self.gradients = []


class SendingMachine(m.Machine):
    """A gradient goes to the host in the dtype in which it was made."""

    wide_gradients = False
    leaving: Any = None

    def accumulate(self, parameter: Any, gradient: Any) -> None:
        """Hold it until the next one leaves (model/master.py)."""
        self.leaving = gradient


class SendingGradients(OneCard):
    key, sends, machine = "sends", True, SendingMachine

    def end(self) -> None:
        self.on.leaving = None


class UpdatingMachine(m.Machine):
    """A gradient ends when its parameter is updated. `first`: AdamW's state of the parameter is made then."""

    first = False

    def accumulate(self, parameter: Any, gradient: Any) -> None:
        if self.first:
            self.t.allocate(MOMENTS, 4, ())
            for _ in range(2):
                self.t.allocate(MOMENTS, 4, parameter.shape)


class UpdatingInBackward(OneCard):
    """One card that updates each parameter in the backward pass. Its first pass leaves the optimizer's states."""

    key, sends, machine, leaves = "updates", True, UpdatingMachine, (MOMENTS,)

    def state(self, gradients: list[Tensor], left: list[Tensor], *, last: bool, saving: bool) -> State:
        return State(left=1 if saving and left else 0)

    def recorder(self, recorded: Callable[[State], Recorder], state: State) -> Recorder:
        return recorded(state)

    def begin(self, t: Recorder, state: State, *, saving: bool) -> None:
        self.on.first = not state.left


class Buckets(OneCard):
    as_views = False

    def state(self, gradients: list[Tensor], left: list[Tensor], *, last: bool, saving: bool) -> State:
        ends = last and saving  # which changes a pass for views alone, but for what has been left
        return State(gradients=bool(gradients), last=ends and self.as_views, left=len(left) if ends else 0)

    def sized(self, structure: Structure, state: State, t: Timeline) -> Passage:
        passage = structure.sized(t)
        return _let_go(passage, t, as_views=self.as_views) if state.left else passage

    def given(self, gradients: list[Tensor], left: list[Tensor], count: int) -> list[Tensor]:
        return [*left, *gradients][:count]


class BucketViews(Buckets):
    """DDP with gradients that are views of its buckets."""

    as_views = True

    def structure(self, unrolled: Callable[[State], Structure], state: State) -> Structure:
        if not state.last:
            return unrolled(state)
        later = unrolled(State(gradients=True))  # each gradient ends as it is added to another one, or copied
        return _ended(later, _gradients(unrolled(FRESH))) if state.gradients else later


def _gradients(first: Structure) -> list[int]:
    ended = {~event for event in first.events if event < 0}
    return [n for n, (component, _) in enumerate(first.kinds) if component == "gradients" and n not in ended]


def _ended(later: Structure, kept: list[int]) -> Structure:
    """Return a pass that adds its gradients to those of earlier ones and ends."""
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


def _let_go(passage: Passage, t: Timeline, *, as_views: bool) -> Passage:
    """Return a pass that ends the old bucket, the first of its `given`, when the first new one is full or viewed."""
    kinds = [(BUCKETS, t.size(4, "P")), *passage.kinds]
    events = [event + 1 if event >= 0 else event - 1 for event in passage.events]
    split = passage.split
    ready, at = 0, len(events)
    for place in range(split, len(events)):
        serial = ~events[place] if as_views else events[place]
        if serial > passage.given and kinds[serial][0] == "gradients":
            ready += kinds[serial][1].nbytes
            if ready >= FIRST_BUCKET_BYTES:
                at = place + 1
                break
    moments = [*passage.moments[:at], passage.moments[at - 1], *passage.moments[at:]]
    streams = {n + 1: on for n, on in passage.streams.items()}
    return Passage([*events[:at], ~0, *events[at:]], kinds, moments, split, passage.given + 1, streams)

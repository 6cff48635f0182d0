"""FSDP2 in the passes of one rank, with groups as in model/parallel.py. No torch. torch/distributed/fsdp/_fully_shard:
_fsdp_param_group.py (order of gathering, copying and freeing; prefetching), _fsdp_collectives.py (buffers, their dtypes
and streams), _fsdp_param.py (unreduced gradients)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from foretrain.config.sharing import Sharing
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter, record
from foretrain.predict.abstract.passage import OUTSIDE, Factors, Recorder
from foretrain.predict.abstract.ranks import Buckets, BucketViews, OneCard, State
from foretrain.predict.abstract.tensors import Storage, Tensor
from foretrain.predict.timeline import Tensor as Kept

GATHERED, EXCHANGED = "gathered", "exchanged"
GATHERING_STREAM, REDUCING_STREAM = 1, 2
REDUCED_BYTES = 4  # gradients are summed over ranks in fp32


class ShardingMachine(m.Machine):
    """Gathered weights' gradients wait for the others of their block; `adds`: to an unreduced one."""

    wide_gradients = adds = False

    def accumulate(self, parameter: Parameter, gradient: Tensor) -> None:
        assert gradient.storage is not None
        if self.adds:
            return
        serial = gradient.storage.serial
        self.t.allocated[serial] = self.t.allocated[serial]._replace(component="gradients")
        parameter.grad = gradient


class Group:
    """Weights that are gathered together. `letters` stand for their elements, all pieces of all ranks, and for those of
    one rank; `sizes`: the first of each weight; `widths`: bytes of a gathered element.

    Factors: `cast`, its piece in the gathered dtype; `sent`, its gradients; `summed`, its piece of these; `kept`, that
    in another dtype.
    """

    widths: list[int]
    gathered: Factors
    sent: Factors
    summed: Factors
    cast: Factors | None = None
    kept: Factors | None = None

    def __init__(self, parameters: Iterable[Parameter], sharing: Sharing, layer: int, *, reshards: bool) -> None:
        self.parameters, self.layer, self.reshards, self.number = list(parameters), layer, reshards, 0
        self.is_outer = False
        self.trained = [p for p in self.parameters if p.requires_grad]
        self.sizes = [sharing.share(p.shape) * sharing.shards for p in self.parameters]
        self.clear()

    @classmethod
    def of_letters(
        cls, letters: tuple[str, str], parameters: Iterable[Parameter], sharing: Sharing, layer: int, *, half: bool
    ) -> "Group":
        """Return fp32 weights, gathered as they are or in half precision, whose gradients are summed in fp32."""
        found, (letter, piece), width = cls(parameters, sharing, layer, reshards=sharing.way.reshards), letters, 4
        if half:
            width = 2
        found.widths = [width] * len(found.parameters)
        found.cast = (width, piece) if half else None
        found.gathered, found.sent, found.summed = (width, letter), (REDUCED_BYTES, letter), (REDUCED_BYTES, piece)
        return found

    def clear(self) -> None:
        self.whole: list[Storage | None] = []  # the gathered weights; unchanged ones are not written
        self.arriving: Storage | None = None  # what was gathered, before it is cut into weights
        self.held: list[Storage] = []  # unreduced gradients
        self.reduced: Storage | None = None  # HSDP's, until the sum over all nodes is done
        self.is_done = False  # its backward pass
        for parameter in self.parameters:
            parameter.grad = None


class FullyShard(OneCard):
    """`groups`: in the order in which their forward passes end, the last around all others. `outer`: gathered first,
    summed last. `widens`: gradients that are held back become fp32; `adds`: later ones are added to them at once;
    `waits`: only the last micro-batch of a step waits for what is on its way.
    """

    machine, adds, waits = ShardingMachine, False, True
    leaves = (GATHERED, EXCHANGED)

    def __init__(self, sharing: Sharing, shapes: Sequence[Sequence[int]], *, half: bool) -> None:
        self.sharing, self.widens = sharing, half
        padded = tuple(sharing.share(shape) * sharing.shards for shape in shapes)
        # Weights that cannot be cut evenly have sizes that no letter stands for.
        uneven = any(shape[0] % sharing.shards for shape in shapes)
        self.key = sharing.way, sharing.shards > 1, sharing.syncs_each, half, padded if uneven else ()

    def state(self, gradients: list[Kept], left: list[Kept], *, last: bool, saving: bool) -> State:
        return State(bool(gradients), last, len(left)) if saving else State(left=len(left))

    def recorder(self, recorded: Callable[[State], Recorder], state: State) -> Recorder:
        return recorded(state)

    def given(self, gradients: list[Kept], left: list[Kept], count: int) -> list[Kept]:
        return [*left, *gradients][:count]

    def wrap(self, model: Any, machine: m.Machine) -> None:
        self.on = machine
        blocks, half = list(model.layers()), self.widens
        self.groups = [
            Group.of_letters(("Pb", "Sb"), block.parameters(), self.sharing, i, half=half)
            for i, block in enumerate(blocks)
        ]
        inside = {id(p) for group in self.groups for p in group.parameters}
        outside = [p for p in model.parameters() if id(p) not in inside]
        self._own(Group.of_letters(("Pr", "Sr"), outside, self.sharing, OUTSIDE, half=half))
        for group, module in zip(self.groups, [*blocks, model], strict=True):
            module.forward = partial(self._forward, group, module.forward)
        model.forward = partial(self._around, model.forward)

    def _own(self, *outer: Group) -> None:
        self.outer = list(outer)
        for group in outer:
            group.is_outer = True
        self.groups += reversed(outer)
        for number, group in enumerate(self.groups):
            group.number = number

    @property
    def _in_order(self) -> list[Group]:
        return [*self.outer, *(group for group in self.groups if not group.is_outer)]

    def begin(self, t: Recorder, state: State, *, saving: bool) -> None:
        self.now, self.kept = state, []
        self.behind: Storage | None = None  # the last gathered buffer, freed when the next weights are there
        self.sent: Storage | None = None  # the last gradients on their way, until the next ones are ready
        for group in self.groups:
            group.clear()
        whole = [group for group in self._in_order if not group.reshards] if state.left else []
        if not saving:
            for group in whole:
                group.whole = [None]
            return
        if state.gradients:
            self._resume(t, state)
        else:  # gathered for an evaluation
            for group in whole:
                t.layer = group.layer
                group.whole = [self._allocated(GATHERED, *each) for each in self._each(group)]
        t.layer, t.given = OUTSIDE, len(t.events)

    @property
    def _holds(self) -> bool:
        return not self.sharing.syncs_each

    def _resume(self, t: Recorder, state: State) -> None:
        self.on.adds, last = self.adds, self.outer[-1] if self.outer else None
        for group in [*reversed([each for each in self.groups if not each.is_outer]), *self.outer]:
            t.layer = group.layer
            if self._holds and state.last:
                group.held = [self._gradient(parameter) for parameter in group.trained]
            if group is last and state.left:
                self.sent = self._buffer(EXCHANGED, group.sent)
            if state.left > 1:
                group.reduced = self._buffer(EXCHANGED, group.summed, REDUCING_STREAM)

    def end(self) -> None:
        """What has nothing before it is done when all else is."""
        for group in self._in_order:
            if not group.is_done:
                self._post_backward(group)
        if self.now.last or not self.waits:
            self.sent = None
            for group in self.groups:
                group.reduced = group.arriving = None

    def _forward(self, group: Group, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.on.again:  # a checkpoint recomputes what has been gathered for its backward pass
            return forward(*args, **named)
        return self._leave(group, forward(*self._enter(group, args), **named))

    def _enter(self, group: Group, args: Sequence[Any]) -> Sequence[Any]:
        self._gather(group)
        self._arrive(group, ahead=True)
        return self._entered(group, args)

    def _leave(self, group: Group, out: Any) -> Any:
        if group.reshards:
            group.whole = []
        elif not self.on.grad:
            self.kept += group.whole
        return self._left(group, out)

    def _around(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run the whole model, which lets go of the last gathered buffer."""
        out = forward(*args, **named)
        self.behind = None
        return out

    def _entered(self, group: Group, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments; when their gradients are there, those of the weights are, too."""
        inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if not self.on.grad or not inputs:
            return args
        outs = {id(x): x.detach() for x in inputs}

        def run(saved: list[Any], *grads: Tensor | None) -> Sequence[Tensor | None]:
            self._post_backward(group)
            return grads

        record(list(outs.values()), run, list({id(x): x for x in inputs}.values()))
        return [outs.get(id(x), x) for x in args]

    def _left(self, group: Group, out: Tensor) -> Tensor:
        """Return the result; when its gradient is there, the weights are gathered once more."""
        if not self.on.grad or not out.requires_grad:
            return out
        found = out.detach()

        def run(saved: list[Any], grad: Tensor) -> Sequence[Tensor]:
            self._pre_backward(group)
            return (grad,)

        record(found, run, (out,))
        return found

    def _pre_backward(self, group: Group) -> None:
        self._gather(group)
        self._arrive(group, ahead=False)
        if group.number:
            self._gather(self.groups[group.number - 1])

    def _post_backward(self, group: Group) -> None:
        group.is_done = True
        gradients = [p.grad.storage for p in group.parameters if p.grad is not None]
        if self._holds and not self.now.last:
            self._hold(group)
            return
        for parameter in group.parameters:
            parameter.grad = None
        if group.held:  # the new ones are added to them
            gradients, group.held = list(group.held), []
        group.whole = []
        self.sent = group.reduced = None
        if not gradients:  # all is frozen
            return
        self.sent = self._buffer(EXCHANGED, group.sent)
        gradients.clear()
        adds = self.now.gradients and not self._holds
        out = self._buffer(EXCHANGED if adds or group.kept else "gradients", group.summed, REDUCING_STREAM)
        if not adds:
            self.kept.append(self._buffer("gradients", group.kept, REDUCING_STREAM) if group.kept else out)
        elif self.sharing.way.replicates:
            group.reduced = out

    def _hold(self, group: Group) -> None:
        group.whole = []
        for parameter in group.parameters:
            if parameter.grad is None:
                continue
            if not self.widens:  # it stays as it is; written once more so that these come in the order of the weights
                parameter.grad = None
            if not self.now.gradients:
                self.kept.append(self._gradient(parameter))
            parameter.grad = None

    def _gather(self, group: Group) -> None:
        if group.whole or group.arriving is not None or self.sharing.shards == 1:
            return
        cast = self._buffer(GATHERED, group.cast, GATHERING_STREAM) if group.cast else None
        group.arriving = self._buffer(GATHERED, group.gathered, GATHERING_STREAM)
        del cast

    def _arrive(self, group: Group, *, ahead: bool) -> None:
        """Split what was gathered into weights. `ahead`: in a forward pass its buffer lives until the next one's."""
        if group.whole:
            return
        if ahead:
            self.behind = None
        cast = None
        for each in self._each(group):
            if self.sharing.shards == 1 and group.cast:
                cast = self._allocated(GATHERED, *each)
            group.whole.append(self._allocated(GATHERED, *each))
        del cast
        if ahead and self.sharing.shards > 1:
            self.behind = group.arriving
        group.arriving = None

    def _each(self, group: Group) -> list[tuple[int, Parameter, int]]:
        return list(zip(group.widths, group.parameters, group.sizes, strict=True))

    def _gradient(self, parameter: Parameter) -> Storage:
        width = parameter.dtype.itemsize if self.adds else REDUCED_BYTES
        return Storage(self.on.t, self.on.t.allocate("gradients", width, parameter.shape))

    def _allocated(self, component: str, item_bytes: int, parameter: Parameter, size: int) -> Storage:
        """Allocate a weight with its padding."""
        t = self.on.t
        if size == parameter.numel():
            return Storage(t, t.allocate(component, item_bytes, parameter.shape))
        return Storage(t, t.allocate(component, item_bytes, (), (item_bytes * size,)))

    def _buffer(self, component: str, factors: Factors, stream: int = 0) -> Storage:
        t = self.on.t
        serial = t.allocate(component, 1, (), factors)
        if stream and self.on.cuda:
            t.streams[serial] = stream
        return Storage(t, serial)


def passes_of(sharing: Sharing | None, shapes: Sequence[Sequence[int]], *, half: bool) -> OneCard:
    if sharing is None:
        return OneCard()
    if sharing.way.shards_weights:
        return FullyShard(sharing, shapes, half=half)
    return BucketViews() if sharing.bucket_view else Buckets()
